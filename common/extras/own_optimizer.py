"""The optimizer that a user's function returns (--optimizer path/to/file.py:function)."""

import inspect

import torch
from torch import nn

from common.errors import UserError, blamed
from common.extras.own_files import call_user
from common.options import Options
from common.training import parts_of


def own_optimizer(net: nn.Module, opts: Options) -> torch.optim.Optimizer:
    """Return it at the rate of --lr; UserError if it is none, or has another rate that is not usual."""
    flag = f"--optimizer {opts.optimizer}"
    optimizer = call_user(opts.optimizer, net, opts, first=True)
    with blamed(flag, "return a torch.optim.Optimizer of the net's weights"):
        parts = [(part, part.param_groups) for part in parts_of(optimizer)]
    for part, groups in parts:
        usual = inspect.signature(type(part)).parameters.get("lr")
        for group in groups:
            if group.get("lr", opts.lr) not in (opts.lr, usual and usual.default):
                raise UserError(
                    f"{flag}: its lr={group['lr']} cannot take effect, --lr is {opts.lr}\n"
                    "give --lr, and a group with another rate a `scale`"
                )
            group["lr"] = opts.lr * group.get("scale", 1.0)
    return optimizer


def groups_without_decay(weights: list[nn.Parameter]) -> list[dict]:
    """Return two groups: only weights of several dimensions decay (--no-decay-1d)."""
    return [
        {"params": [p for p in weights if p.dim() > 1]},
        {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
    ]
