"""A loss that is summed over the batch, and noise."""

import torch
import torch.nn.functional as F
from beside import NUMBERS
from program import Part
from torch import nn

BITWISE = True
OPTIONS = {"dataset": NUMBERS}


def net():
    def forward(net, x):
        mean, log = net.encoder(x).chunk(2, 1)
        return net.decoder(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log

    return Part(forward, encoder=nn.Linear(6, 4), decoder=nn.Linear(2, 6))


def loss_of(net, x):
    out, mean, log = net(x)
    return F.mse_loss(out, x, reduction="sum") - 0.5 * (1 + log - mean.square() - log.exp()).sum()


def mine(run):
    for batch in run:
        loss = loss_of(run.model, batch.data)
        run.step(loss * batch.size, len(batch.data))
