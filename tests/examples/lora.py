"""An adapter that eval() merges into the frozen weight, and train() takes out."""

from beside import class_loss, evaluated
from silent import LowRank
from torch import nn, optim

OPTIONS = {"epochs": 3}
mine = evaluated


def net():
    return nn.Sequential(LowRank(6, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizer(net):
    return optim.SGD([p for p in net.parameters() if p.requires_grad], 0.3)


def plain(net, optimizer, epochs):
    for epoch in epochs:
        net.train()
        for batch in epoch:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        net.eval()
    net.train()
