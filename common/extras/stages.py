"""A net over several devices of one process: its parts in a row, each where its weights fit.

From a net to its places: `cut` shares out the parts of an nn.Sequential by weight or by counts; `Stages` moves
them there, and hands each micro batch from one to the next. A process holds the whole net, so all else is as
in train_ddp.py: DDP averages over the processes, any of them can save. A GPU works on one chunk of a batch
while the next one works on the chunk before: `--micro-batch-size` makes them.
"""

import functools
import itertools

import torch
from torch import nn

from common.device import hand_over
from common.errors import UserError
from common.options import Options
from common.world import World


class Stages(nn.Module):
    """The net, called; its parts are on the devices of this process."""

    def __init__(self, net: nn.Module, opts: Options, world: World) -> None:
        super().__init__()
        self.net = net
        names = list(net._modules)
        usual = getattr(type(net), "forward", None) is nn.Sequential.forward
        if not usual or net._forward_hooks or net._forward_pre_hooks:
            raise UserError(
                f"train_mp.py cuts an nn.Sequential, {type(net).__name__} is none\n"
                "place its parts yourself, with .to(...) in its forward, and use train_ddp.py"
            )
        weights = [sum(p.numel() for p in net._modules[name].parameters()) for name in names]
        counts = cut(weights, opts, world.devices)
        rest = iter(names)
        self.groups = [list(itertools.islice(rest, count)) for count in counts]
        refuse_ties(net, self.groups)
        self.places = list(zip(itertools.cycle(world.devices), self.groups))
        for device, group in self.places:
            for name in group:
                net._modules[name].to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.places[0][0]
        for device, group in self.places:
            hand_over(before, device)
            x = x.to(device, non_blocking=True)
            for name in group:
                x = self.net._modules[name](x)
            before = device
        return x

    def describe(self) -> list[str]:
        """The cut as lines."""
        return [f"{device}: {', '.join(group)}" for device, group in self.places]


def cut(weights, opts, devices):
    """How many parts each stage has."""
    if opts.balance == "parameters" and len(devices) <= len(weights):
        return balance([weight + 1 for weight in weights], len(devices))
    counts = [int(count) for count in opts.balance.split(",") if count.isdecimal()]
    if not counts or len(counts) % len(devices) or sum(counts) != len(weights):
        raise UserError(
            f"--balance {opts.balance} on {len(devices)} devices, but this net has {len(weights)} parts\n"
            "give counts that add up to them, or choose a longer nn.Sequential"
        )
    return counts


def balance(weights, stages):
    """The number of parts of each stage: none empty, the heaviest as light as possible (exactly)."""

    @functools.cache
    def best(start, stages):
        if stages == 1:
            return sum(weights[start:]), [len(weights) - start]
        tries = []
        for end in range(start + 1, len(weights) - stages + 2):
            heaviest, counts = best(end, stages - 1)
            tries.append((max(sum(weights[start:end]), heaviest), [end - start, *counts]))
        return min(tries)

    return best(0, stages)[1]


def refuse_ties(net, groups):
    """UserError if a tensor would be in two stages."""
    stage_of = {name: stage for stage, group in enumerate(groups) for name in group}
    places = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        stage = stage_of[name.partition(".")[0]]
        other, place = places.setdefault(tensor, (name, stage))
        if place != stage:
            raise UserError(
                f"{other} and {name} are one tensor, but lie in two stages\nuntie them, or cut elsewhere"
            )
