"""Three runs in one script, one after another."""

import torch.nn.functional as F
from beside import labelled
from torch import nn, optim

RUNS = 3
ALL = labelled(72, 6)


def made(before):
    net = nn.Linear(6, 3)
    fold = len(before)
    return {
        "net": net,
        "optimizer": optim.SGD(net.parameters(), 0.5),
        "dataset": [sample for i, sample in enumerate(ALL) if i % 3 != fold],
        "test_set": ALL[fold::3],
    }


def plain(net, optimizer, epochs):
    for epoch in epochs:
        for x, y in epoch:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def mine(run):
    for batch in run:
        loss = F.cross_entropy(run.model(batch.x), batch.y)
        run.step(loss)
