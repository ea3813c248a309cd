"""Cut a net over several devices of one process: its parts in a row, each where its weights fit.

From a net to its places: `cut` shares out the parts of an nn.Sequential by weight or by counts; `Stages`
moves them there, and hands each forward from one device to the next. A net that its author has placed on
several devices stays as it is. A process holds the whole net, so all else is as in train_ddp.py.

A GPU works on one micro batch while the next GPU works on the one before: outputs and losses stay on the last
device, and there is one backward for several forwards (`--in-flight`), so no GPU waits for a copy back.
"""

import functools
import itertools
from collections import OrderedDict

from torch import nn

from common.device import devices_of, is_gpu, module_of
from common.errors import UserError


def cut(net, opts, world):
    """Put the net on the devices of this process, a part on each."""
    return net if len(devices_of(net)) > 1 else Stages(net, opts, world)


class Stages(nn.Module):
    """An nn.Sequential, called; its parts are on the devices of this process."""

    def __init__(self, net, opts, world):
        super().__init__()
        self.net = net
        usual = getattr(type(net), "forward", None) is nn.Sequential.forward
        if not usual or net._forward_hooks or net._forward_pre_hooks:
            raise UserError(
                f"train_mp.py cuts an nn.Sequential, {type(net).__name__} is none\n"
                "place its parts yourself, with .to(...) in its forward; it then trains in every script"
            )
        weights = [sum(p.numel() for p in part.parameters()) for part in net]
        parts = iter(net._modules.items())
        self.places = []  # (device, its parts)
        for device, count in zip(itertools.cycle(world.devices), counts_of(weights, opts, world.devices)):
            group = nn.Sequential(OrderedDict(itertools.islice(parts, count)))
            self.places.append((device, group.to(device)))
        self.takes_turns = bool(opts.virtual_ranks) and len(world.devices) > 1

    def forward(self, x):
        first = before = self.places[0][0]
        for device, group in self.places:
            hand_over(before, device)
            x = group(x.to(device, non_blocking=True))
            before = device
        hand_over(before, first)
        return x

    def describe(self):
        """Return the cut as lines."""
        lines = [f"{device}: {', '.join(group._modules)}" for device, group in self.places]
        if self.takes_turns:
            lines.append(
                "with --virtual-ranks the devices take turns: a slice is one forward and its backward"
            )
        return lines


def hand_over(before, device):
    """Let the draws go on from one GPU to the next, as one generator would: its state lies on the host."""
    if before != device and is_gpu(before) and is_gpu(device):
        generators = module_of(device).default_generators
        generators[device.index].set_state(generators[before.index].get_state())


def counts_of(weights, opts, devices):
    """Return how many parts each device has."""
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
    """Return how many parts each stage has: none empty, the heaviest as light as possible (exactly)."""

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
