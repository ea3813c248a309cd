"""A loss that is summed over the batch, and noise."""

import torch
import torch.nn.functional as F
from beside import numbers
from program import Part
from torch import nn, optim

BITWISE = True


def made():
    def forward(net, x):
        mean, log = net.encoder(x).chunk(2, 1)
        return net.decoder(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log

    net = Part(forward, encoder=nn.Linear(6, 4), decoder=nn.Linear(2, 6))
    return {"net": net, "optimizer": optim.SGD(net.parameters(), 1e-3), "dataset": [*numbers(48, 6)]}


def elbo(x, out, mean, log):
    return F.mse_loss(out, x, reduction="sum") - 0.5 * (1 + log - mean.square() - log.exp()).sum()


def plain(net, optimizer, epochs):
    for epoch in epochs:
        for x in epoch:
            loss = elbo(x, *net(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def mine(run):
    for batch in run:
        x = batch.data
        loss = elbo(x, *run.model(x))
        run.step(loss * batch.size, len(x))
