"""Pairs that the dataset draws with `random`, BatchNorm."""

import random

import torch.nn.functional as F
from beside import LABELLED
from program import Part
from torch import nn

BITWISE = True


class Pairs(list):
    def __getitem__(self, i):
        one, label = super().__getitem__(i)
        other, other_label = super().__getitem__(random.randrange(len(self)))
        return one, other, (label == other_label).float()


OPTIONS = {"dataset": Pairs(LABELLED)}


def net():
    def forward(net, one, other):
        return net.head((net.body(one) - net.body(other)).abs())[:, 0]

    return Part(forward, body=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)), head=nn.Linear(8, 1))


def loss_of(net, batch):
    one, other, same = batch
    return F.binary_cross_entropy_with_logits(net(one, other), same)
