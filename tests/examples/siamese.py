"""Pairs that the dataset draws with `random`, BatchNorm."""

import random

import torch.nn.functional as F
from beside import labelled
from program import Part
from torch import nn, optim

BITWISE = True


class Pairs(list):
    def __getitem__(self, i):
        one, label = super().__getitem__(i)
        other, other_label = super().__getitem__(random.randrange(len(self)))
        return one, other, (label == other_label).float()


def made():
    def forward(net, one, other):
        return net.head((net.body(one) - net.body(other)).abs())[:, 0]

    net = Part(forward, body=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), head=nn.Linear(8, 1))
    return {"net": net, "optimizer": optim.Adadelta(net.parameters()), "dataset": Pairs(labelled(48, 6))}


def loss_of(net, batch):
    one, other, same = batch
    return F.binary_cross_entropy_with_logits(net(one, other), same)
