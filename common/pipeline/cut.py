"""Where a net may be cut into stages: a nn.Sequential between any two of its parts, in groups of like weight.

A piece is a tuple of names: parts of the net that stay together. The net keeps its names: on a rank, the
parts of other stages are nn.Identity.
"""
import functools
import itertools

import torch
from torch import nn

from common.errors import UserError

HOST = torch.device("cpu")


def pieces(net):
    """The net as pieces, each with weights of its own: a part without weights joins the one before it."""
    hooked = net._forward_hooks or net._forward_pre_hooks
    if hooked or getattr(type(net), "forward", None) is not nn.Sequential.forward:
        return [("",)]  # all of it
    joined = []
    for name in net._modules:
        if joined and not (weight(net, (name,)) and weight(net, joined[-1])):
            joined[-1] += (name,)
        else:
            joined.append((name,))
    return joined


def module(net, piece):
    """What runs a piece."""
    parts = [net._modules[name] if name else net for name in piece]
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def weight(net, piece):
    return sum(p.numel() for p in module(net, piece).parameters())


def keep(net, names):
    """Removes the parts of other stages; what belongs to none of the parts is the first one's."""
    parts = [] if "" in names else list(net._modules)
    for name in parts:
        if name not in names:
            net._modules[name] = nn.Identity()
    if parts and parts[0] not in names:
        for kind in (net._parameters, net._buffers):
            kind.update(dict.fromkeys(kind))


def refuse_ties(net, groups):
    """UserError if a tensor with two names would be in two stages: each would train a copy of its own."""
    stage_of = {name: stage for stage, group in enumerate(groups) for name in sum(group, ())}
    places = {}
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        stage = stage_of.get(name.partition(".")[0], 0)
        other, place = places.setdefault(tensor, (name, stage))
        if place != stage:
            raise UserError(f"{other} and {name} are one tensor, but the cut has them in stages {place} and "
                            f"{stage}\nuntie them, or cut elsewhere: --balance with counts of pieces, as in "
                            "--balance 3,1")


@torch.no_grad()
def edges(net, groups, x, device, cast):
    """(shape, dtype) of a sample behind each stage; one piece at a time is on the device: all may not fit."""
    shapes = []
    training = net.training
    net.eval()  # nothing is drawn, no running statistics move
    for group in groups:
        for piece in group:
            with cast:
                y = module(net, piece).to(device)(x.to(device))
            module(net, piece).to(HOST)
            if not torch.is_tensor(y) or len(y) != len(x):
                raise UserError(f"part {'+'.join(piece)} of the net returns no tensor with a row per sample\n"
                                "a net can be cut where one tensor goes from one part to the next")
            x = y
        shapes.append((tuple(x.shape[1:]), x.dtype))
    net.train(training)
    return shapes


def cut(net, stages, by):
    """The pieces of each stage: contiguous, none empty, by weight or by the counts in `by`."""
    parts = pieces(net)
    names = ", ".join("+".join(piece) or "all of it" for piece in parts)[:200]
    if stages > len(parts):
        raise UserError(
            f"{stages} stages, but this model can be cut into {len(parts)} at most: {names}\n"
            "ask for fewer stages, or choose a --model with more places to cut it (a longer nn.Sequential)")
    counts = [int(count) for count in by.split(",")] if "," in by else balance(
        [weight(net, piece) + 1 for piece in parts], stages)
    if len(counts) != stages or sum(counts) != len(parts):
        raise UserError(f"--balance {by} does not fit {stages} stages of {len(parts)} pieces: {names}\n"
                        f"give {stages} counts that add up to {len(parts)}")
    rest = iter(parts)
    return [list(itertools.islice(rest, count)) for count in counts]


def balance(weights, stages):
    """The number of pieces of each stage: none empty, the heaviest as light as possible (exactly)."""
    @functools.cache
    def best(start, stages):
        """(the heaviest stage, counts) of the pieces from `start`."""
        if stages == 1:
            return sum(weights[start:]), [len(weights) - start]
        tries = []
        for end in range(start + 1, len(weights) - stages + 2):
            heaviest, counts = best(end, stages - 1)
            tries.append((max(sum(weights[start:end]), heaviest), [end - start, *counts]))
        return min(tries)

    return best(0, stages)[1]
