"""Endless data, drawn where they are read; it stops by the loss of all."""

import torch
import torch.nn.functional as F
from torch import nn, optim


class Endless:
    def __len__(self):
        return 10**9

    def __getitem__(self, i):
        x = torch.randn(1)
        powers = torch.cat([x, x**2, x**3])
        return powers, powers @ torch.tensor([[2.0], [-1.0], [0.5]]) + 3


def made():
    net = nn.Linear(3, 1)
    return {"net": net, "optimizer": optim.SGD(net.parameters(), 0.05), "dataset": Endless(), "epochs": 1}


def plain(net, optimizer, epochs):
    for epoch in epochs:
        for x, y in epoch:
            loss = F.smooth_l1_loss(net(x), y)
            if loss < 1:
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def mine(run):
    for batch in run:
        loss = F.smooth_l1_loss(run.model(batch.x), batch.y)
        if run.mean(loss) < 1:
            break
        run.step(loss)
