"""Inputs of layers in eight bits, within what an observer has seen: it looks on in an evaluation, too."""

import torch
from beside import evaluated
from torch import nn

BITWISE = True
mine = evaluated


class Quantized(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("top", torch.tensor(3.0))

    def forward(self, x):
        self.top.lerp_(x.detach().abs().amax(), 0.1)
        unit = self.top / 127
        rounded = (x / unit).round().clamp(-128, 127) * unit
        return super().forward(x + (rounded - x).detach())


def net():
    return nn.Sequential(Quantized(6, 8), nn.ReLU(), Quantized(8, 3))
