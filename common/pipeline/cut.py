"""Where a net may be cut into stages: its pieces in order, measured, in groups that weigh about the same.

The net keeps its modules and names: a stage runs its pieces, and `prune` removes the other stages' weights.
"""
import functools
import itertools
import time
from typing import Any, NamedTuple

import torch
from torch import nn

from common.errors import UserError, one_line, only_deterministic, out_of_memory
from common.models import named_tensors

HOST = torch.device("cpu")
CHAINS = "ResNet", "AlexNet", "VGG", "MobileNetV3", "EfficientNet", "ConvNeXt"  # of torchvision
MEASURE_ROUNDS = 8           # how often each piece is measured, after a first time that warms up
MEASURE_SECONDS = 1.0        # of all pieces; but each is measured once


class Piece(NamedTuple):
    """One of the parts that a net runs in a row; its weights' names begin with one of `owns`."""

    name: str
    call: Any
    owns: tuple


class Measure(NamedTuple):
    """Cost and output of a piece, for two samples."""

    seconds: float        # forward and backward
    kept: int             # bytes per sample that are kept for the backward
    shape: tuple          # of the output, without the batch
    dtype: torch.dtype    # of the output


def pieces(net):
    """The net as pieces, each with weights of its own: a part without weights joins the piece before it."""
    vision = type(net).__name__ if type(net).__module__.startswith("torchvision.") else ""
    if net._forward_hooks or net._forward_pre_hooks:  # of the whole net
        found = [Piece("all of it", net, ("",))]
    elif getattr(type(net), "forward", None) is nn.Sequential.forward:
        # named_children would leave out a part that occurs twice
        found = [Piece(name, part, (name,)) for name, part in net._modules.items()]
    elif vision in CHAINS:
        found = _chain(net)
    elif vision == "VisionTransformer":
        found = _vit(net)
    else:
        found = [Piece("all of it", net, ("",))]
    joined = []
    for piece in found:
        if joined and not (count(net, piece.owns) and count(net, joined[-1].owns)):
            last = joined.pop()
            piece = Piece(f"{last.name}+{piece.name}", _then(last.call, piece.call), last.owns + piece.owns)
        joined.append(piece)
    known = [prefix for piece in joined for prefix in piece.owns]
    loose = tuple(n for n, _ in named_tensors(net) if not belongs(n, known))
    return [joined[0]._replace(owns=joined[0].owns + loose), *joined[1:]]  # of no piece, but saved


def _then(*calls):
    return lambda x: functools.reduce(lambda y, call: call(y), calls, x)


def _chain(net):
    """The children of a convolutional net, with those of its layers; the last one takes flat rows."""
    for name, child in net.named_children():
        if name.startswith(("features", "layer")):
            yield from (Piece(f"{name}.{n}", part, (f"{name}.{n}",)) for n, part in child.named_children())
        else:
            flat = name in ("classifier", "fc") and type(net).__name__ != "ConvNeXt"  # that one has its own
            yield Piece(name, _then(nn.Flatten(), child) if flat else child, (name,))


def _vit(net):
    def patches(x):
        x = net._process_input(x)
        x = torch.cat([net.class_token.expand(len(x), -1, -1), x], dim=1)
        return net.encoder.dropout(x + net.encoder.pos_embedding)

    layers = net.encoder.layers.named_children()
    return [Piece("patches", patches, ("conv_proj", "class_token", "encoder.pos_embedding")),
            *(Piece(name, layer, (f"encoder.layers.{name}",)) for name, layer in layers),
            Piece("heads", lambda x: net.heads(net.encoder.ln(x)[:, 0]), ("encoder.ln", "heads"))]


def belongs(name, prefixes):
    return any(not prefix or name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _slots(net):
    """(name, module that has it, its name there, tensor) of each weight and buffer."""
    for path, module in net.named_modules():
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{key}".removeprefix("."), module, key, tensor


def prune(net, prefixes):
    """Removes every weight and buffer that no stage of this rank owns; the others keep their names."""
    for name, module, key, _ in _slots(net):
        if not belongs(name, prefixes):
            setattr(module, key, None)  # an RNN notes it in a list of its own, too


def place(net, piece, device):
    """Moves the piece's weights and buffers to a device."""
    for name, module, key, tensor in _slots(net):
        if belongs(name, piece.owns) and tensor.device != device:
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(device)
            else:
                setattr(module, key, tensor.to(device))
            if isinstance(module, nn.RNNBase):  # side by side once all are there; else cuDNN copies them
                module.flatten_parameters()


def refuse_ties(net, groups):
    """UserError if a tensor with two names would be in two stages: each would train a copy of its own."""
    first = {}
    for stage, group in enumerate(groups):
        owned = [prefix for piece in group for prefix in piece.owns]
        named = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            other, there = first.setdefault(tensor, (name, stage)) if belongs(name, owned) else (name, stage)
            if there != stage:
                raise UserError(
                    f"{other} and {name} are one tensor, but the cut has them in stages {there} and {stage}\n"
                    "untie them, or cut elsewhere: --balance with counts of pieces, as in --balance 3,1")


def count(net, prefixes):
    return sum(p.numel() for n, p in net.named_parameters() if belongs(n, prefixes))


@only_deterministic()
def measure(net, found, x, device, forward):
    """A Measure of each piece, run inside `forward()`; afterwards buffers and generators are as before.

    Only one piece at a time is on the device, because the whole net may not fit.
    """
    before, training, measures = {n: b.clone() for n, b in net.named_buffers()}, net.training, []
    net.train()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for piece in found:
            place(net, piece, device)
            facts, x = _measure(net, piece, x.to(device), forward, MEASURE_SECONDS / len(found))
            place(net, piece, HOST)
            measures.append(facts)
    for name, buffer in net.named_buffers():
        buffer.copy_(before[name])
    net.train(training)
    return measures


def _measure(net, piece, x, forward, limit):
    """(Measure, output) of one piece."""
    own, kept, times = {p.data_ptr() for p in net.parameters()}, {}, []

    def note(tensor):  # what a forward keeps for its backward
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    while len(times) < 2 or len(times) <= MEASURE_ROUNDS and sum(times) < limit:
        x = x.detach().requires_grad_(x.is_floating_point())
        kept.clear()
        began = time.perf_counter()
        try:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), forward():
                y = piece.call(x.clone())
        except Exception as error:
            if out_of_memory(error):
                raise
            raise UserError(f"piece {piece.name} of the net, given {x.dtype} of shape {tuple(x.shape)}: "
                            f"{type(error).__name__}: {one_line(error)}\nits traceback: --debug") from error
        if not torch.is_tensor(y) or not y.dim() or len(y) != len(x):
            shape = f" of shape {tuple(y.shape)}" if torch.is_tensor(y) else ""
            raise UserError(f"piece {piece.name} of the net returns {type(y).__name__}{shape}, "
                            "not one tensor with a row per sample\n"
                            "a net can be cut where one tensor goes from one part to the next")
        if y.requires_grad:
            y.sum().backward()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append(time.perf_counter() - began)
    for p in net.parameters():
        p.grad = None
    size = sum(size for place, size in kept.items() if place not in own) // len(x)
    return Measure(min(times[1:]), size, tuple(y.shape[1:]), y.dtype), y.detach()


def cut(found, weights, parts, by):
    """[[piece, ...] of each stage]: contiguous, none empty, by `weights` or by the counts in `by`."""
    names = ", ".join(piece.name for piece in found)
    if parts > len(found):
        raise UserError(
            f"{parts} stages, but this model can be cut into {len(found)} at most: {names[:150]}\n"
            "ask for fewer stages, or choose a --model with more places to cut it (a longer nn.Sequential)")
    counts = balance(weights, parts) if by in ("parameters", "time") else list(map(int, by.split(",")))
    if len(counts) != parts or sum(counts) != len(found):
        raise UserError(f"--balance {by}: {len(counts)} stages of {sum(counts)} pieces, "
                        f"but there are {parts} stages and {len(found)} pieces\n"
                        f"give {parts} counts that add up to {len(found)}; the pieces: {names[:200]}")
    rest = iter(found)
    return [list(itertools.islice(rest, n)) for n in counts]


def balance(weights, parts):
    """The number of pieces of each stage: none empty, the heaviest as light as possible (found exactly)."""
    sums = [0, *itertools.accumulate(weights)]
    best = {0: (0, 0, [])}  # {pieces placed: (the heaviest stage, where the last one begins, counts)}
    for _ in range(parts):
        best = {end: min((max(heaviest, sums[end] - sums[start]), start, [*counts, end - start])
                         for start, (heaviest, _, counts) in best.items() if start < end)
                for end in range(min(best) + 1, len(sums))}
    return best[len(weights)][2]
