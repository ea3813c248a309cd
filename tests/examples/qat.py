"""Inputs of layers in eight bits, within what an observer has seen: it looks on in an evaluation, too."""

import torch
from beside import accuracy as judge  # noqa: F401
from beside import labelled
from torch import nn, optim

BITWISE = True


class Quantized(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("top", torch.tensor(3.0))

    def forward(self, x):
        self.top.lerp_(x.detach().abs().amax(), 0.1)
        unit = self.top / 127
        rounded = (x / unit).round().clamp(-128, 127) * unit
        return super().forward(x + (rounded - x).detach())


def made():
    net = nn.Sequential(Quantized(6, 8), nn.ReLU(), Quantized(8, 3))
    return {"net": net, "optimizer": optim.Adam(net.parameters(), 0.01), "dataset": labelled(48, 6)}
