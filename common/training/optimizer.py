"""Optimizers and the learning rate.

To add an optimizer: a line in OPTIMIZERS, and its default rate in LR of common/options/options.py.
"""
import math

import torch
from torch import nn

from common.options import Options

OPTIMIZERS = {  # all are fused, and bit_facts in world/determinism.py says so: tests compare the two
    "sgd": lambda groups, opts: torch.optim.SGD(
        groups, opts.lr, momentum=opts.momentum or 0.0, weight_decay=opts.weight_decay,
        # torch has no fused SGD of sharded weights
        fused=not any(hasattr(p, "to_local") for p in groups[0]["params"])),
    "adam": lambda groups, opts: torch.optim.Adam(
        groups, opts.lr, weight_decay=opts.weight_decay, fused=True),
    "adamw": lambda groups, opts: torch.optim.AdamW(
        groups, opts.lr, weight_decay=opts.weight_decay, fused=True),
}


def build_optimizer(net: nn.Module, opts: Options) -> torch.optim.Optimizer:
    """The optimizer with its state allocated: a checkpoint has the same names at step 0 and at step 1000."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[opts.optimizer]([{"params": parameters}], opts)  # a frozen stage has none
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates; at rate 0 and gradient 0 no weight moves
    optimizer.zero_grad(set_to_none=True)
    for values in optimizer.state.values():
        for value in values.values():
            if torch.is_tensor(value):
                value.zero_()
    return optimizer


def learning_rate(step, opts, steps_per_epoch):
    """A pure function of the step, so nothing is stored and nothing is lost with a node."""
    warmup, total = opts.warmup_epochs * steps_per_epoch, max(1, opts.epochs * steps_per_epoch)
    if step < warmup:
        return opts.lr * (step + 1) / (warmup + 1)
    if opts.lr_schedule == "cosine":
        return opts.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))
    if opts.lr_schedule == "step":  # a tenth after each third of the run
        return opts.lr * 0.1 ** min(2, 3 * step // total)
    return opts.lr
