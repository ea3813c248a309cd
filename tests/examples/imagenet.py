"""A net with BatchNorm, momentum and decay, a rate by steps, the best two answers."""

from beside import class_loss, evaluated, labelled
from torch import nn, optim

BITWISE = True
mine = evaluated


def rate(step, total):
    return 0.1 ** (step // 3)


OPTIONS = {"dataset": labelled(48, 1, 8, 8), "schedule": rate}


def net():
    head = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *head)


def optimizer(net):
    return optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)


def plain(net, optimizer, epochs):
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, 6))
    for epoch in epochs:
        for batch in epoch:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


def judge(run, batch):
    best = run.model(batch.x).topk(2).indices
    return {"acc2": ((best == batch.y[:, None]).sum(), len(best))}
