"""A critic with three turns, whose weights are clipped, and a generator with one."""

import torch
from beside import numbers
from torch import nn, optim

BITWISE = True


def made():
    critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    net = nn.ModuleDict({"critic": critic, "generator": nn.Linear(2, 6)})
    of_critic, of_generator = (optim.RMSprop(part.parameters(), 0.005) for part in net.values())
    turns = [of_critic] * 3 + [of_generator]
    return {"net": net, "optimizer": turns, "dataset": [*numbers(48, 6)]}


def clip(net):
    for p in net["critic"].parameters():
        p.data.clamp_(-0.3, 0.3)


def plain(net, optimizer, epochs):
    critic, generator = net.values()
    for epoch in epochs:
        for x in epoch:
            fake = torch.randn(len(x), 2)
            for turn in range(4):
                if turn < 3:
                    loss = (critic(generator(fake).detach()) - critic(x)).mean()
                else:
                    loss = -critic(generator(fake)).mean()
                net.zero_grad()
                loss.backward()
                optimizer[turn].step()
                clip(net)


def mine(run):
    critic, generator = run.net.values()
    for batch in run:
        x = batch.data
        fake = torch.randn(len(x), 2)
        if run.turn < 3:
            loss = (critic(generator(fake).detach()) - critic(x)).mean()
        else:
            loss = -critic(generator(fake)).mean()
        run.step(loss)
        if run.stepped:
            clip(run.net)
