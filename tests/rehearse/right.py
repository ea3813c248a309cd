"""Programs that are right, of which a rehearsal must say so; beside those of tests/plain."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from stage import Read, Rehearsed, around, headed, row
from torch import nn


class Right(Rehearsed):
    """A row without a family."""


class Flat(Right):
    def loop(self, run):
        for batch in run:
            self.step(run, batch)


# ---- nets ----
class Drop(Right):
    notes = "it draws"

    def net(self):
        return around(nn.Tanh(), nn.Dropout(0.3))


class Norm(Right):
    notes = "BatchNorm"
    count = 44  # four whole batches

    def net(self):
        return around(nn.BatchNorm1d(8), nn.Tanh())


class DropAndNorm(Norm):
    def net(self):
        return around(nn.BatchNorm1d(8), nn.Dropout(0.2))


class Adam(Right):
    kind = torch.optim.Adam
    rate = 1e-3
    arguments = {}


class Convolutions(Adam):
    notes = "BatchNorm"

    def net(self):
        def part(a, b):
            return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]

        return nn.Sequential(*part(1, 4), *part(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    def sample(self, draws):
        x = torch.randn(1, 8, 8, generator=draws)
        return x, int(x[0, 0, :3].argmax())


class LayerNorms(Right):
    def net(self):
        return around(nn.LayerNorm(8), nn.GELU())


class Attention(Adam):
    def net(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(20, 8), layer, nn.Flatten(), nn.Linear(40, 3))

    def sample(self, draws):
        words = torch.randint(20, (5,), generator=draws)
        return words, int(words[0] % 3)


class Recurrent(Attention):
    def net(self):
        def forward(net, x):
            return net.head(net.cell(net.words(x))[0][:, -1])

        return headed(forward, words=nn.Embedding(20, 6), cell=nn.GRU(6, 6, batch_first=True))


class Deep(Right):
    rate = 0.01

    def net(self):
        return around(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)))


row("Chaotic", Right, rate=8.0)
row("Heavy", Right, rate=0.02, arguments={"momentum": 0.99})


class TwoCalls(Right):
    def step(self, run, batch):
        out = run.model(batch.x) + run.net[2](torch.tanh(run.net[0](batch.x.flip(1))))
        run.step(F.cross_entropy(out, batch.y))


class Checkpointed(Right):
    def net(self):
        def forward(net, x):
            return net.head(torch.utils.checkpoint.checkpoint(net.inner, x, use_reentrant=False))

        return headed(forward, inner=nn.Sequential(nn.Linear(6, 6), nn.Tanh()))


class Large(Right):
    """A tensor of which random sums are kept."""

    def net(self):
        return nn.Sequential(nn.Linear(6, 900), nn.Tanh(), nn.Linear(900, 3))


# ---- optimizers ----
OPTIMIZERS = {
    "AdamW": {"amsgrad": True},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adadelta": {},
    "Adafactor": {},
    "ASGD": {},
    "Rprop": {},
}
for name, arguments in OPTIMIZERS.items():
    row(name, Adam, kind=getattr(torch.optim, name), arguments=arguments)
row("Nesterov", Right, arguments={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3})
row("Dampened", Right, arguments={"momentum": 0.9, "dampening": 0.5})


class Muon(Adam):
    kind = torch.optim.Muon

    def net(self):
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


class TwoRates(Right):
    slow = {"lr": 0.01}

    def optimizer(self, net):
        groups = [{"params": net[0].parameters()} | self.slow, {"params": net[2].parameters()}]
        return torch.optim.SGD(groups, self.rate)


row("TwoRatesScript", TwoRates, doors="script", slow={"scale": 0.1})


# ---- losses, data ----
class NoisyLoss(Right):
    notes = "it draws"

    def of_batch(self, out, y):
        return F.cross_entropy(out + 0.3 * torch.randn_like(out), y)


class SumAndCount(Right):
    def step(self, run, batch):
        loss = F.cross_entropy(run.model(batch.x), batch.y, reduction="none")
        weight = batch.y + 1
        run.step((weight * loss).sum(), count=weight.sum())


class Matrix(Right):
    """A task with a table of whole numbers."""

    doors = "script"

    def scores(self, out, y):
        table = torch.zeros(3, 3, dtype=torch.int64)
        table.index_put_((y, out.argmax(1)), torch.tensor(1), accumulate=True)
        return super().scores(out, y) | {"table": table}


class Augmented(Right):
    """Draws of torch, random and numpy in a Dataset."""

    class samples(Read):
        def read(self, x):
            return x + 0.1 * torch.randn(6) * random.random() * np.random.rand()


class Changed(Right):
    """Other inputs."""

    def sample(self, draws):
        x, y = super().sample(draws)
        return self.changed(x), y


class Doubles(Changed):
    changed = torch.Tensor.double

    def net(self):
        return super().net().double()


# without a task of one's own float64 of a table becomes float32
class DefaultTask(Changed):
    doors = "script"
    own = "model dataset optimizer"
    changed = torch.Tensor.double


class LargeIds(DefaultTask):
    """Numbers of users above 2**24."""

    def changed(self, x):
        x = x.double()
        x[0] = 2**24 + (1000 * x[0].abs()).floor()
        return x

    def net(self):
        def forward(net, x):
            return net.head(net.words(x[:, 0].long() % 30) + x.float()[:, :6] * 0.1)

        return headed(forward, words=nn.Embedding(30, 6))


class Milliseconds(DefaultTask):
    """Differences of large numbers, made up here."""

    def changed(self, x):
        return 1e8 + 10 * x.double()

    def net(self):
        return headed(lambda net, x: net.head((x - x[:, :1]).float() / 10))


class Bytes(Changed):
    def changed(self, x):
        return (x.abs() * 9).byte()

    def net(self):
        return headed(lambda net, x: net.head(x.float() / 9))


row("NoTask", DefaultTask, changed=lambda self, x: x)
row("FewSamples", Right, count=7)
row("OneSample", Right, count=1)


# ---- what a loop does ----
class KeptPlateau(Right):
    def optimizer(self, net):
        optimizer = super().optimizer(net)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return optimizer

    def memory(self, net, train):
        return {"plateau": self.plateau}

    def report(self, run):
        self.plateau.step(round(super().report(run)["val_acc"], 1))


class OfTheStep(Right):
    """A temperature of run.progress.step."""

    def step(self, run, batch):
        run.step(F.cross_entropy(run.model(batch.x) / (1 + run.progress.step / 20), batch.y))


class Gan(Right):
    """Two optimizers take turns."""

    rate = 0.05
    report = Right.nothing

    def net(self):
        return nn.ModuleDict({"D": nn.Linear(6, 1), "G": nn.Linear(6, 6)})

    def optimizer(self, net):
        one, two = (torch.optim.SGD(net[name].parameters(), self.rate) for name in "DG")
        return [one, one, two]

    def step(self, run, batch):
        made = run.net["G"](batch.x.flip(1))
        if run.turn < 2:
            run.step((F.softplus(run.net["D"](made.detach())) + F.softplus(-run.net["D"](batch.x))).mean())
        else:
            run.step(F.softplus(-run.net["D"](made)).mean())


class Leaves(Right):
    """The loop is left in each epoch, and goes on."""

    def loop(self, run):
        for epoch in run.epochs():
            for i, batch in enumerate(epoch):
                self.step(run, batch)
                if i == 2:
                    break


class TwoForwardsInAJudge(Right):
    def judge(self, run, batch):
        return self.scores(run.model(batch.x) + run.model(-batch.x), batch.y)


class AcceptedCut(Right):
    """Who means it says so."""

    accept = "cut"

    def of_batch(self, out, y):
        return F.cross_entropy(out - out.mean(0), y)


# ---- flags ----
SGD = {"optimizer": "sgd"}
ADAMW = {"optimizer": "adamw", "lr": 0.001}
FLAGS = {
    "Cosine": SGD | {"lr_schedule": "cosine"},
    "Warmup": ADAMW | {"warmup_epochs": 1},
    "Steps": SGD | {"lr_schedule": "step"},
    "Clips": SGD | {"clip_grad_norm": 0.05},
    "Averaged": SGD | {"ema_decay": 0.9},
    "Pieces": SGD | {"micro_batch_size": 3},
    "Slices": ADAMW | {"virtual_ranks": 4},
    "TwoSlices": SGD | {"virtual_ranks": 2},
    "Decay1d": ADAMW | {"weight_decay": 0.1, "no_decay_1d": ""},
    "ByName": {"optimizer": "radam", "lr": 0.001},
}
for name, flags in FLAGS.items():
    row(name, Right, doors="script", own="model dataset task", only_script=flags)
row("Schedule", Right, flags={"schedule": lambda step, total: 1 - step / total})
row("DropScript", Drop, doors="script")
row("DropSlices", Drop, doors="script", flags={"virtual_ranks": 4})
row("NormScript", Norm, doors="script")
row("NormSlices", Norm, doors="script", flags={"virtual_ranks": 4})
row("TwoDevices", Right, doors="script", script="train_dp.py", flags={"devices": "cpu,cpu"})
row("StagesOfOne", Right, doors="script", script="train_mp.py", flags={"devices": "cpu,cpu"})
