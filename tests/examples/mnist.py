"""A CNN with dropout, Adadelta, a rate that falls after each epoch."""

import torch.nn.functional as F
from beside import labelled
from torch import nn, optim

BITWISE = True


def made():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.25), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    optimizer = optim.Adadelta(net.parameters(), lr=0.5)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    return {
        "net": net,
        "optimizer": optimizer,
        "dataset": labelled(48, 1, 8, 8),
        "memory": {"scheduler": scheduler},
    }


def plain(net, optimizer, epochs, scheduler):
    for epoch in epochs:
        for x, y in epoch:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


def mine(run, scheduler):
    for epoch in run.epochs():
        for batch in epoch:
            loss = F.cross_entropy(run.model(batch.x), batch.y)
            run.step(loss)
        scheduler.step()
