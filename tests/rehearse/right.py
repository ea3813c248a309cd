"""Programs that are right, of which a rehearsal must say so: what tests/plain does not have.

Nets that draw, normalise batches, or carry rounding far; flags.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from stage import Read, Rehearsed, around, row
from torch import nn


class Right(Rehearsed):
    """A row without a family."""


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


class Attention(Adam):
    def net(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(20, 8), layer, nn.Flatten(), nn.Linear(40, 3))

    def sample(self, draws):
        words = torch.randint(20, (5,), generator=draws)
        return words, int(words[0] % 3)


class Deep(Right):
    rate = 0.01

    def net(self):
        return around(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)))


row("Chaotic", Right, rate=8.0)
row("Heavy", Right, rate=0.02, arguments={"momentum": 0.99})


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


# ---- losses, data ----
class NoisyLoss(Right):
    notes = "it draws"

    def of_batch(self, out, y):
        return F.cross_entropy(out + 0.3 * torch.randn_like(out), y)


class Augmented(Right):
    """Draws of torch, random and numpy in a Dataset."""

    class samples(Read):
        def read(self, x):
            return x + 0.1 * torch.randn(6) * random.random() * np.random.rand()


row("FewSamples", Right, count=7)
row("OneSample", Right, count=1)


# ---- what a loop does ----
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
