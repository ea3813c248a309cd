"""Programs that are right, of which a rehearsal must say so."""

import random
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from stage import Program, Samples
from torch import nn
from wrong import Part, mean_loss


class Right(Program):
    """A row without a family."""


class Classifier(Right):
    pass


class ClassifierScript(Right):
    door = "script"


class DefaultTask(Right):
    door = "script"
    own = "model dataset optimizer"


class Flat(Right):
    def loop(self, run):
        for batch in run:
            run.step(mean_loss(run.model, batch))


# ---- nets ----
class Drop(Right):
    notes = "it draws"

    def net(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


class DropScript(Drop):
    door = "script"


class Norm(Right):
    notes = "BatchNorm"
    count = 44  # four whole batches

    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


class NormScript(Norm):
    door = "script"


class DropAndNorm(Norm):
    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


class Convolutions(Norm):
    rate = 1e-3
    count = 46

    def net(self):
        def part(a, b):
            return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]

        return nn.Sequential(*part(1, 4), *part(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    def sample(self, draws):
        x = torch.randn(1, 8, 8, generator=draws)
        return x, int(x[0, 0, :3].argmax())

    def optimizer(self, net):
        return torch.optim.AdamW(net.parameters(), self.rate)


class LayerNorms(Right):
    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))


class Attention(Right):
    rate = 1e-3

    def net(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

        def forward(net, x):
            return net.head(net.layer(net.words(x)).mean(1))

        return Part(forward, words=nn.Embedding(20, 8), layer=layer, head=nn.Linear(8, 3))

    def sample(self, draws):
        words = torch.randint(20, (5,), generator=draws)
        return words, int(words[0] % 3)

    def optimizer(self, net):
        return torch.optim.Adam(net.parameters(), self.rate)


class Recurrent(Attention):
    def net(self):
        def forward(net, x):
            return net.head(net.cell(net.words(x))[0][:, -1])

        return Part(
            forward, words=nn.Embedding(20, 8), cell=nn.GRU(8, 8, batch_first=True), head=nn.Linear(8, 3)
        )


class Deep(Right):
    rate = 0.01

    def net(self):
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)]
        return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


class Chaotic(Right):
    rate = 8.0


class Heavy(Right):
    rate = 0.02

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), self.rate, momentum=0.99)


class Unusual(Right):
    """Weights that are normalised, tied, complex."""

    def net(self):
        norms = nn.utils.parametrizations

        def forward(net, x):
            return net.head((net.inner(x).cfloat() @ net.turn).abs())

        tied = norms.weight_norm(nn.Linear(8, 8))
        head = nn.Sequential(tied, nn.Tanh(), tied, nn.Linear(8, 3))
        turn = nn.Parameter(torch.eye(8, dtype=torch.cfloat) * (1 + 0.5j))
        return Part(forward, inner=nn.Linear(6, 8), head=head, turn=turn)


class FrozenBackbone(Right):
    def net(self):
        backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout())
        return nn.Sequential(backbone.eval().requires_grad_(False), nn.Linear(8, 3))


class HeadTrains(Right):
    def net(self):
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3)).eval()
        net[2].train()
        return net


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
    "Adam": partial(torch.optim.Adam, lr=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Asgd": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
}
for name, kind in OPTIMIZERS.items():
    type(
        name,
        (Right,),
        {"optimizer": lambda self, net, kind=kind: kind(net.parameters()), "__module__": __name__},
    )


class Muon(Right):
    def net(self):
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))

    def optimizer(self, net):
        return torch.optim.Muon(net.parameters(), 0.01)


class Lookahead(Right):
    """Its slow weights are made in the first step, in the state."""

    class kind(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.clone()
                    state["count"] = torch.tensor(0)
                state["count"] += 1
                if state["count"] % 4 == 0:
                    p.copy_(state["slow"].lerp_(p, 0.5))

    def optimizer(self, net):
        return self.kind(net.parameters(), self.rate, momentum=0.9)


class TwoRates(Right):
    def optimizer(self, net):
        groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[2].parameters()}]
        return torch.optim.SGD(groups, self.rate)


class TwoRatesScript(TwoRates):
    door = "script"

    def optimizer(self, net):
        groups = [{"params": net[0].parameters(), "scale": 0.1}, {"params": net[2].parameters()}]
        return torch.optim.SGD(groups, self.rate)


class ClippedInAHook(Right):
    def optimizer(self, net):
        optimizer = super().optimizer(net)

        def clip(*_):
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)

        optimizer.register_step_pre_hook(clip)
        return optimizer


# ---- losses, data ----
class NoisyLoss(Right):
    notes = "it draws"

    def step(self, run, batch):
        x = batch.x + 0.3 * torch.randn_like(batch.x)
        run.step(F.cross_entropy(run.model(x), batch.y))


class Slope(Right):
    """A gradient of a gradient."""

    def step(self, run, batch):
        x = batch.x.requires_grad_()
        loss = F.cross_entropy(run.model(x), batch.y, reduction="sum")
        slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        run.step((loss + slope.square().sum()) / len(x))


class Distilled(Right):
    def step(self, run, batch):
        out = run.model(batch.x)
        soft = F.kl_div(F.log_softmax(out / 2, 1), F.softmax(-out.detach(), 1), reduction="batchmean")
        run.step(0.7 * F.cross_entropy(out, batch.y) + 0.3 * soft)


class SumAndCount(Right):
    def step(self, run, batch):
        loss = F.cross_entropy(run.model(batch.x), batch.y, reduction="none")
        weight = batch.y + 1
        run.step((weight * loss).sum(), count=weight.sum())


class Regression(Right):
    door = "script"
    outputs = 1

    def sample(self, draws):
        x, _ = super().sample(draws)
        return x, x[:1] + 5

    def scores(self, out, y):
        return {"loss": ((out - y).square().sum(), len(y))}


class Matrix(Right):
    """A task with a table of whole numbers."""

    door = "script"

    def scores(self, out, y):
        table = torch.zeros(3, 3, dtype=torch.int64).index_put_(
            (y, out.argmax(1)), torch.tensor(1), accumulate=True
        )
        return super().scores(out, y) | {"table": table}


class Boxes(Right):
    """Any number of boxes a sample."""

    outputs = 6

    def sample(self, draws):
        x, count = super().sample(draws)
        return x, {"boxes": x.expand(3, 6)[: count + 1]}

    def collate(self, samples):
        return [*zip(*samples, strict=True)]

    def loss(self, net, batch):
        x, targets = batch
        errors = [row - y["boxes"] for row, y in zip(net(torch.stack(x)), targets, strict=True)]
        return {"loss": (torch.cat(errors).abs().sum(), sum(map(len, errors)))}


class Autoencoder(Right):
    def net(self):
        return nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))

    def sample(self, draws):
        return super().sample(draws)[0]

    def loss(self, net, batch):
        return {"loss": (F.mse_loss(net(batch), batch, reduction="sum"), len(batch))}


class Augmented(Right):
    """Draws of torch, random and numpy in a Dataset."""

    class samples(Samples):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + 0.1 * torch.randn(6) * random.random() * np.random.rand(), y


class Curriculum(Right):
    class samples(Samples):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x * (1 + self.epoch), y


class Skips(Right):
    flags = {"bad_samples": "skip"}
    door = "script"

    class samples(Samples):
        def __getitem__(self, i):
            if i % 5 == 3:
                raise ValueError("unreadable")
            return super().__getitem__(i)


class Doubles(Right):
    def net(self):
        return super().net().double()

    def sample(self, draws):
        x, y = super().sample(draws)
        return x.double(), y


class DoublesConverted(Right):
    """float64 of a table, for a net of float32."""

    door = "script"
    own = "model dataset optimizer"

    def sample(self, draws):
        x, y = super().sample(draws)
        return x.double() / 3, y


class Bytes(Right):
    def sample(self, draws):
        x = torch.randint(0, 9, (6,), generator=draws, dtype=torch.uint8)
        return x, int(x[:3].argmax())

    def loss(self, net, batch):
        x, y = batch
        return self.scores(net(x.float() / 9), y)


class FewSamples(Right):
    count = 7


class OneSample(Right):
    count = 1


# ---- what a loop does ----
class Annealed(Right):
    """A buffer that the loop changes."""

    def net(self):
        net = Part(lambda net, x: net.head(x) / net.heat, head=nn.Linear(6, 3))
        net.register_buffer("heat", torch.tensor(2.0))
        return net

    def after(self, run):
        run.net.heat *= 0.9


class FollowingTeacher(Right):
    def net(self):
        teacher = nn.Linear(6, 3).requires_grad_(False)
        return Part(lambda net, x: net.pupil(x) + net.teacher(x), pupil=nn.Linear(6, 3), teacher=teacher)

    @torch.no_grad()
    def after(self, run):
        run.net.teacher.weight.lerp_(run.net.pupil.weight, 0.5)


class Clamped(Right):
    @torch.no_grad()
    def after(self, run):
        for p in run.net.parameters():
            p.clamp_(-0.2, 0.2)


class Counter:
    n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class KeptCounter(Right):
    def memory(self, net):
        self.counter = Counter()
        return {"counter": self.counter}

    def step(self, run, batch):
        run.step(F.cross_entropy(run.model(batch.x) / (1 + self.counter.n / 20), batch.y))

    def after(self, run):
        self.counter.n += 1


class KeptAverage(Right):
    def memory(self, net):
        self.mean = torch.optim.swa_utils.AveragedModel(net)
        return {"mean": self.mean}

    def after(self, run):
        self.mean.update_parameters(run.net)

    def report(self, run):
        run.report(**run.evaluate(lambda batch: self.loss(self.mean, batch.data)))


class KeptPlateau(Right):
    def optimizer(self, net):
        optimizer = super().optimizer(net)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
        return optimizer

    def memory(self, net):
        return {"plateau": self.plateau}

    def report(self, run):
        found = run.evaluate(lambda batch: self.values(run, batch))
        run.report(**found)
        self.plateau.step(round(found["val_acc"], 1))


class OfTheStep(Right):
    """A temperature of run.progress.step."""

    def step(self, run, batch):
        run.step(F.cross_entropy(run.model(batch.x) / (1 + run.progress.step / 20), batch.y))


class Decays(Right):
    """A setting that the loop changes."""

    def after(self, run):
        run.optimizer.param_groups[0]["weight_decay"] = 0.1 * (run.progress.step > 2)


class Schedule(Right):
    def main(self):
        self.flags = {"schedule": lambda step, total: 1 - step / total}
        super().main()


class Gan(Right):
    """Two optimizers take turns."""

    rate = 0.05

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

    def report(self, run):
        pass


class Leaves(Right):
    """The loop is left in each epoch, and goes on."""

    def loop(self, run):
        for epoch in run.epochs():
            for i, batch in enumerate(epoch):
                self.step(run, batch)
                if i == 2:
                    break


class EvaluatesFirst(Right):
    def step(self, run, batch):
        loss = mean_loss(run.model, batch)
        run.evaluate(lambda batch: self.values(run, batch))
        run.step(loss)

    def report(self, run):
        pass


class TwoForwardsInAJudge(Right):
    def report(self, run):
        def judge(batch):
            out = run.model(batch.x) + run.model(-batch.x)
            return self.scores(out, batch.y)

        run.report(**run.evaluate(judge))


class AcceptedCut(Right):
    """Who means it says so."""

    accept = "cut"
    notes = "two processes part"

    def step(self, run, batch):
        out = run.model(batch.x)
        run.step(F.cross_entropy(out - out.mean(0), batch.y))


# ---- flags ----
class Flags(Right):
    door = "script"
    own = "model dataset task"


FLAGS = {
    "Cosine": {"lr_schedule": "cosine", "optimizer": "sgd"},
    "Warmup": {"warmup_epochs": 1, "optimizer": "adamw", "lr": 0.001},
    "Steps": {"lr_schedule": "step", "optimizer": "sgd"},
    "Clips": {"clip_grad_norm": 0.05, "optimizer": "sgd"},
    "Averages": {"ema_decay": 0.9, "optimizer": "sgd"},
    "Bf16": {"amp": "bf16", "optimizer": "sgd"},
    "Pieces": {"micro_batch_size": 3, "optimizer": "sgd"},
    "Slices": {"virtual_ranks": 4, "optimizer": "adam", "lr": 0.001},
    "TwoSlices": {"virtual_ranks": 2, "optimizer": "sgd"},
    "Decay1d": {"weight_decay": 0.1, "no_decay_1d": "", "optimizer": "adamw", "lr": 0.001},
    "ByName": {"optimizer": "radam", "lr": 0.001},
}
for name, flags in FLAGS.items():
    type(name, (Flags,), {"flags": flags, "__module__": __name__})


class DropSlices(Drop):
    notes = ""
    flags = {"virtual_ranks": 4}
    door = "script"


class NormSlices(Norm):
    notes = ""
    flags = {"virtual_ranks": 4}
    door = "script"
    count = 44


class TwoDevices(Right):
    door = "script"
    script = "train_dp.py"
    flags = {"devices": "cpu,cpu"}


class StagesOfOne(Right):
    door = "script"
    script = "train_mp.py"
    flags = {"devices": "cpu,cpu"}
