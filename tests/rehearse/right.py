"""Programs that are right, of which a rehearsal must say so: what tests/plain does not have.

Nets that draw, normalise batches, or carry rounding far; flags.
"""

import random

import dcgan
import imagenet
import numpy as np
import torch
import torch.nn.functional as F
from program import SLICES
from stage import Read, Rehearsed, around, row, wide
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
        return imagenet.net()

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


row("Large", Right, net=wide)


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

    report = Right.nothing

    def net(self):
        return dcgan.net()

    def optimizer(self, net):
        return dcgan.optimizer(net)

    def step(self, run, batch):
        run.step(dcgan.loss_of(run.net, batch.x, batch.x[:, :2], run.turn))


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
row("DropSlices", Drop, doors="script", flags=SLICES)
row("NormScript", Norm, doors="script")
row("NormSlices", Norm, doors="script", flags=SLICES)
for name in ("train_dp.py", "train_mp.py"):
    row(name, Right, doors="script", script=name, flags={"devices": "cpu,cpu"})
