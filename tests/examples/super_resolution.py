"""Sub-pixel convolution; a PSNR of the whole test set."""

import torch
import torch.nn.functional as F
from beside import numbers
from torch import nn
from torch.utils.data import default_collate


def pairs(count):
    return [(F.avg_pool2d(y, 2), y) for y in numbers(count, 1, 8, 8)]


OPTIONS = {"dataset": pairs(48), "test_set": pairs(20)}


def net():
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(*layers, nn.PixelShuffle(2))


def loss_of(net, batch):
    x, y = batch
    return F.mse_loss(net(x), y)


def psnr(mse):
    return -10 * torch.as_tensor(mse).log10()


def seen(net, optimizer):
    return {"step 6: val_psnr": psnr(loss_of(net, default_collate(pairs(20))))}


def mine(run):
    for epoch in run.epochs():
        for batch in epoch:
            loss = loss_of(run.model, batch.data)
            run.step(loss)
        found = run.evaluate(
            lambda batch: {"mse": (loss_of(run.model, batch.data) * len(batch.x), len(batch.x))}
        )
        run.report(psnr=psnr(found["val_mse"]))
