"""A CNN with dropout, Adadelta, a rate that falls after each epoch."""

from beside import class_loss, labelled
from torch import nn, optim

BITWISE = True
OPTIONS = {"dataset": labelled(48, 1, 8, 8)}


def net():
    head = nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.25), *head)


def optimizer(net):
    return optim.Adadelta(net.parameters(), 0.5)


def memory(net, optimizer):
    return {"scheduler": optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


def plain(net, optimizer, epochs, scheduler):
    for epoch in epochs:
        for batch in epoch:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()


def mine(run, scheduler):
    for epoch in run.epochs():
        for batch in epoch:
            loss = class_loss(run.model, batch.data)
            run.step(loss)
        scheduler.step()
