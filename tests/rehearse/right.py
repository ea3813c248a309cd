"""Programs that are right, of which a rehearsal must say so; beside those of tests/plain."""

import random
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from program import Part, Samples, mean_loss
from stage import Rehearsed
from torch import nn


class Right(Rehearsed):
    """A row without a family."""


class Flat(Right):
    def loop(self, run):
        for batch in run:
            run.step(mean_loss(run.model, batch))


class DefaultTask(Right):
    doors = "script"
    own = "model dataset optimizer"


# ---- nets ----
class Drop(Right):
    notes = "it draws"

    def net(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


class DropScript(Drop):
    doors = "script"


class Norm(Right):
    notes = "BatchNorm"
    count = 44  # four whole batches

    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class NormScript(Norm):
    doors = "script"


class DropAndNorm(Norm):
    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


class Convolutions(Norm):
    count = 46
    kind = torch.optim.AdamW
    rate = 1e-3
    arguments = {}

    def net(self):
        def part(a, b):
            return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]

        return nn.Sequential(*part(1, 4), *part(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    def sample(self, draws):
        x = torch.randn(1, 8, 8, generator=draws)
        return x, int(x[0, 0, :3].argmax())


class LayerNorms(Right):
    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


class Attention(Right):
    kind = torch.optim.Adam
    rate = 1e-3
    arguments = {}

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

        cell = nn.GRU(8, 8, batch_first=True)
        return Part(forward, words=nn.Embedding(20, 8), cell=cell, head=nn.Linear(8, 3))


class Deep(Right):
    rate = 0.01

    def net(self):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)]
        return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


class Chaotic(Right):
    rate = 8.0


class Heavy(Right):
    rate = 0.02
    arguments = {"momentum": 0.99}


class TwoCalls(Right):
    def step(self, run, batch):
        out = run.model(batch.x) + run.net[2](torch.tanh(run.net[0](batch.x.flip(1))))
        run.step(F.cross_entropy(out, batch.y))


class Checkpointed(Right):
    def net(self):
        def forward(net, x):
            inner = torch.utils.checkpoint.checkpoint(net.inner, x, use_reentrant=False)
            return net.head(inner)

        return Part(forward, inner=nn.Sequential(nn.Linear(6, 8), nn.Tanh()), head=nn.Linear(8, 3))


class Large(Right):
    """A tensor of which random sums are kept."""

    def net(self):
        return nn.Sequential(nn.Linear(6, 900), nn.Tanh(), nn.Linear(900, 3))


# ---- optimizers ----
OPTIMIZERS = {
    "Adam": {},
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


def row(name, base=Right, **facts):
    type(name, (base,), facts | {"__module__": __name__})


for name, arguments in OPTIMIZERS.items():
    row(name, kind=getattr(torch.optim, name), rate=1e-3, arguments=arguments)
row("Nesterov", arguments={"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3})
row("Dampened", arguments={"momentum": 0.9, "dampening": 0.5})


class Muon(Right):
    kind = torch.optim.Muon
    rate = 0.01
    arguments = {}

    def net(self):
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


class TwoRates(Right):
    slow = {"lr": 0.01}

    def optimizer(self, net):
        groups = [{"params": net[0].parameters()} | self.slow, {"params": net[2].parameters()}]
        return torch.optim.SGD(groups, self.rate)


class TwoRatesScript(TwoRates):
    doors = "script"
    slow = {"scale": 0.1}


# ---- losses, data ----
class NoisyLoss(Right):
    notes = "it draws"

    def step(self, run, batch):
        x = batch.x + 0.3 * torch.randn_like(batch.x)
        run.step(F.cross_entropy(run.model(x), batch.y))


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

    class samples(Samples):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + 0.1 * torch.randn(6) * random.random() * np.random.rand(), y


class Doubles(Right):
    def net(self):
        return super().net().double()

    def sample(self, draws):
        x, y = super().sample(draws)
        return x.double(), y


class DoublesConverted(DefaultTask):
    """float64 of a table, for a net of float32."""

    def sample(self, draws):
        x, y = super().sample(draws)
        return x.double() / 3, y


class LargeIds(DefaultTask):
    """Numbers of users above 2**24 in a table of float64."""

    def net(self):
        def forward(net, x):
            return net.head(net.words(x[:, 0].long() % 30) + x[:, 1:].float())

        return Part(forward, words=nn.Embedding(30, 5), head=nn.Linear(5, 3))

    def sample(self, draws):
        x, y = super().sample(draws)
        x = x.double()
        x[0] = 2**24 + torch.randint(0, 1000, (), generator=draws).item()
        return x, y


class Milliseconds(DefaultTask):
    """Differences of large numbers, made up here."""

    def net(self):
        return Part(lambda net, x: net.head((x[:, 1:] - x[:, :1]).float() / 10), head=nn.Linear(5, 3))

    def sample(self, draws):
        x, y = super().sample(draws)
        return 1e8 + 10 * x.double(), y


class Bytes(Right):
    def sample(self, draws):
        x = torch.randint(0, 9, (6,), generator=draws, dtype=torch.uint8)
        return x, int(x[:3].argmax())

    def loss(self, net, batch):
        x, y = batch
        return self.scores(net(x.float() / 9), y)


row("FewSamples", count=7)
row("OneSample", count=1)


# ---- what a loop does ----
class KeptPlateau(Right):
    def optimizer(self, net):
        optimizer = super().optimizer(net)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return optimizer

    def memory(self, net, train):
        return {"plateau": self.plateau}

    def report(self, run):
        found = run.evaluate(lambda batch: self.values(run, batch))
        run.report(**found)
        self.plateau.step(round(found["val_acc"], 1))


class OfTheStep(Right):
    """A temperature of run.progress.step."""

    def step(self, run, batch):
        run.step(F.cross_entropy(run.model(batch.x) / (1 + run.progress.step / 20), batch.y))


class Schedule(Right):
    @property
    def flags(self):
        return {"schedule": lambda step, total: 1 - step / total}


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
    def report(self, run):
        def judge(batch):
            out = run.model(batch.x) + run.model(-batch.x)
            return self.scores(out, batch.y)

        run.report(**run.evaluate(judge))


class AcceptedCut(Right):
    """Who means it says so."""

    accept = "cut"

    def step(self, run, batch):
        out = run.model(batch.x)
        run.step(F.cross_entropy(out - out.mean(0), batch.y))


# ---- flags ----
SGD = {"optimizer": "sgd"}
FLAGS = {
    "Cosine": SGD | {"lr_schedule": "cosine"},
    "Warmup": {"warmup_epochs": 1, "optimizer": "adamw", "lr": 0.001},
    "Steps": SGD | {"lr_schedule": "step"},
    "Clips": SGD | {"clip_grad_norm": 0.05},
    "Averaged": SGD | {"ema_decay": 0.9},
    "Pieces": SGD | {"micro_batch_size": 3},
    "Slices": {"virtual_ranks": 4, "optimizer": "adam", "lr": 0.001},
    "TwoSlices": SGD | {"virtual_ranks": 2},
    "Decay1d": {"weight_decay": 0.1, "no_decay_1d": "", "optimizer": "adamw", "lr": 0.001},
    "ByName": {"optimizer": "radam", "lr": 0.001},
}
for name, flags in FLAGS.items():
    row(name, doors="script", own="model dataset task", only_script=flags)
in_script = partial(row, doors="script", notes="")
in_script("DropSlices", Drop, flags={"virtual_ranks": 4})
in_script("NormSlices", Norm, flags={"virtual_ranks": 4})
in_script("TwoDevices", script="train_dp.py", flags={"devices": "cpu,cpu"})
in_script("StagesOfOne", script="train_mp.py", flags={"devices": "cpu,cpu"})
