"""A net and a dataset for tests that interrupt: steps of a set length, in float64, so that worlds agree to
1e-9.
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Pace(nn.Module):
    """Takes PACE seconds: there must be time to interrupt a step in. Holds STATE_MB of untrained weights."""

    def __init__(self):
        super().__init__()
        if size := int(os.environ.get("STATE_MB", "0")) << 18:
            self.ballast = nn.Parameter(torch.zeros(size), requires_grad=False)

    def forward(self, x):
        time.sleep(float(os.environ.get("PACE", "0.02")))
        return x.double()


def net():
    return nn.Sequential(Pace(), nn.Linear(6, 32).double(), nn.Tanh(), nn.Linear(32, 3).double())


def dropping():
    """With dropout: only fixed slices (--virtual-ranks) give the same bits at every world."""
    return nn.Sequential(*net()[:3], nn.Dropout(0.3), nn.Linear(32, 3).double())


def data():
    """331 samples: no world and no batch divides them."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(331 + 64, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()
    return x[:331], y[:331], x[331:], y[331:]


class Files(TensorDataset):
    """Map-style: a sample at a time, which is what worker processes are for."""

    classes = 3


def files():
    """The same samples, read one by one."""
    x, y, x_test, y_test = data()
    return Files(x, y), Files(x_test, y_test)
