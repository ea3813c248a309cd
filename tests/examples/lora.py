"""An adapter that eval() merges into the frozen weight, and train() takes out."""

import torch.nn.functional as F
from beside import accuracy as judge  # noqa: F401
from beside import labelled
from silent import LowRank
from torch import nn, optim


def made():
    net = nn.Sequential(LowRank(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = optim.SGD([p for p in net.parameters() if p.requires_grad], 0.3)
    return {"net": net, "optimizer": optimizer, "dataset": labelled(48, 6), "epochs": 3}


def plain(net, optimizer, epochs):
    for epoch in epochs:
        net.train()
        for x, y in epoch:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
    net.train()
