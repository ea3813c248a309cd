"""A net and a dataset for tests that interrupt: steps of a set length, float64 and no dropout, so that worlds
agree to 1e-9.
"""

import os
import sys
import time
from collections import OrderedDict

import torch
from torch import nn
from torch.utils.data import Dataset


class Pace(nn.Module):
    """Takes PACE seconds: there must be time to interrupt a step in. Holds STATE_MB of untrained weights."""

    def __init__(self):
        super().__init__()
        if size := int(os.environ.get("STATE_MB", "0")) << 18:
            self.ballast = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, x):
        time.sleep(float(os.environ.get("PACE", "0.02")))
        return x.double()


class Cast(nn.Module):
    def forward(self, x):
        return x.float()


def net(opts, data):
    return nn.Sequential(
        OrderedDict(pace=Pace(), fc1=nn.Linear(6, 32).double(), act=nn.Tanh(), fc2=nn.Linear(32, 3).double())
    )


def dropping(opts, data):
    """float32 with dropout: only fixed slices (--virtual-ranks) give the same bits at every world."""
    return nn.Sequential(
        OrderedDict(
            pace=Pace(),
            cast=Cast(),
            fc1=nn.Linear(6, 32),
            act=nn.Tanh(),
            drop=nn.Dropout(0.3),
            fc2=nn.Linear(32, 3),
        )
    )


def deep(opts, data):
    """More places to cut it."""
    layers = [part for _ in range(5) for part in (nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(Pace(), *(layer.double() for layer in layers), nn.Linear(6, 3).double())


def data():
    """331 samples: no world and no batch divides them."""
    if "--data-dir=nowhere" in sys.argv:
        raise FileNotFoundError("no data is mounted here")
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(331 + 64, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()
    if "--data-dir=less" in sys.argv:  # a sample was not copied
        return x[1:331], y[1:331], x[331:], y[331:]
    return x[:331], y[:331], x[331:], y[331:]


class Files(Dataset):
    """Map-style: a sample at a time, which is what worker processes are for."""

    classes = 3

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def files():
    """The same samples, read one by one."""
    x, y, x_test, y_test = data()
    return Files(x, y), Files(x_test, y_test)
