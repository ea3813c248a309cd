"""Two nets that take turns with each batch."""

import torch
from beside import numbers
from torch import nn, optim
from torch.nn.functional import softplus

BITWISE = True


def made():
    net = nn.ModuleDict(
        {"G": nn.Linear(2, 6), "D": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))}
    )
    turns = [optim.Adam(net[part].parameters(), 0.01, (0.5, 0.999)) for part in "DG"]
    return {"net": net, "optimizer": turns, "dataset": [*numbers(48, 6)]}


def plain(net, optimizer, epochs):
    for epoch in epochs:
        for x in epoch:
            noise = torch.randn(len(x), 2)
            for turn in range(2):
                fake = net["G"](noise)
                if turn == 0:
                    loss = (softplus(-net["D"](x)) + softplus(net["D"](fake.detach()))).mean()
                else:
                    loss = softplus(-net["D"](fake)).mean()
                net.zero_grad()
                loss.backward()
                optimizer[turn].step()


def mine(run):
    net = run.net
    for batch in run:
        x = batch.data
        noise = torch.randn(len(x), 2)  # the same in each turn
        fake = net["G"](noise)
        if run.turn == 0:
            loss = (softplus(-net["D"](x)) + softplus(net["D"](fake.detach()))).mean()
        else:
            loss = softplus(-net["D"](fake)).mean()
        run.step(loss)
