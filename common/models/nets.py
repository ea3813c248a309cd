"""The net of a first run; `build_model` makes any net, also one of a user's own.

To add one, write a function that takes the facts of the data (classes, sample_shape, vocab) and returns an
nn.Module, and name it in MODELS of options/registry.py. One in a file of your own needs no edit here:
`--model FILE.py:function`.
"""

from collections import OrderedDict
from dataclasses import fields
from pathlib import Path

import torch
from torch import nn

from common.checkpoint import facts_of
from common.data import DataFacts
from common.device import is_gpu
from common.errors import blamed
from common.options import MODELS, Options, extra, find_function
from common.sampler import seeded


class MaxPool(nn.Module):
    """nn.MaxPool2d(2); on CPUs the same bits in half the time: torch's is slow unless channels come last."""

    def forward(self, x):
        if is_gpu(x.device):
            return nn.functional.max_pool2d(x, 2)
        with torch.no_grad():
            last = x.contiguous(memory_format=torch.channels_last)
            where = nn.functional.max_pool2d(last, 2, return_indices=True)[1].contiguous()
        return x.flatten(2).gather(2, where.flatten(2)).view_as(where)


def build_net(data):
    """Build the MNIST network of the tutorials: two convolutions, two linear layers, log-probabilities."""
    channels, height, width = data.sample_shape
    rows = ((height - 4) // 2 - 4) // 2
    columns = ((width - 4) // 2 - 4) // 2
    return nn.Sequential(
        OrderedDict(
            # Pooling before ReLU gives the same numbers as after it, from a quarter of the work.
            block1=nn.Sequential(nn.Conv2d(channels, 10, 5), MaxPool(), nn.ReLU()),
            block2=nn.Sequential(nn.Conv2d(10, 20, 5), nn.Dropout2d(), MaxPool(), nn.ReLU()),
            fc1=nn.Sequential(nn.Flatten(), nn.Linear(20 * rows * columns, 50), nn.ReLU(), nn.Dropout()),
            fc2=nn.Sequential(nn.Linear(50, data.classes), nn.LogSoftmax(1)),
        )
    )


def build_model(opts: Options, data: DataFacts) -> nn.Module:
    """Build the net that `opts.model` names, on the CPU, from opts.seed and --init-from."""
    name, *size = opts.model.split(":")
    shape = tuple(data.sample_shape)
    way_out = f"dataset {data.name} has samples of shape {shape}: choose another --model or --dataset"
    with seeded(opts.seed, "init"), blamed(f"model {opts.model}", way_out):
        if name.endswith(".py"):
            net = extra("own_net")(opts, data)
        elif name in MODELS:
            net = find_function(MODELS[name])(data, *size)
        else:
            net = extra("torchvision")(name, data)
    kept = {field.name: getattr(data, field.name, None) for field in fields(DataFacts)}
    vars(net)["_facts"] = facts_of(net) | {"data": kept}
    if opts.init_from:
        extra("init_from")(net, opts)
    if opts.sync_bn:  # into new modules, so before some of them are frozen
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if opts.freeze or name.endswith(".py"):
        extra("freeze")(net, opts)
    else:
        net.train()
    return net


def load(run: str | Path, which: str | int = "best", model: str = "") -> nn.Module:
    """Return the net of a run, on the CPU, in evaluation mode: no torchrun is needed, nor the data.

    Its weights are those of the best evaluation, averaged with --ema-decay; or the "newest", or of a step.
    A `model` as "my.py:net" runs that file, in place of the one that the run names.
    """
    return extra("load")(run, which, model)
