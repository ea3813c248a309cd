"""Forward and backward: a global batch becomes one gradient.

The gradient is the exact mean over the samples at any number of ranks and micro batches: sums are divided by
the size of the global batch before the backward; `state.update` corrects for what else a task counts.
"""
import contextlib
import random
from typing import Any, SupportsIndex

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.data import Batch, leaves, map_tensors
from common.errors import blamed
from common.options import Options
from common.sampler import hash_seed
from common.training.state import TrainState
from common.world import World


def backward(model: nn.Module, batch: Batch, state: TrainState, world: World) -> Tensor:
    """Leaves the mean gradient of the global batch in `.grad`; returns the totals of this rank's forwards.

    Call it on every rank for every global batch, with an empty share too: it synchronises exactly once.
    """
    opts = state.opts
    if opts.virtual_ranks:
        return backward_slices(model, batch, state, world)
    seed(world, opts.seed, "step", state.step, world.rank)  # dropout: derived, never stored
    totals = state.task.zeros(world.device)
    parts = batch.parts or [(0, None)] * (world.size > 1)  # DDP waits for a rank without samples, too
    for i, (_, part) in enumerate(parts, 1):
        with contextlib.nullcontext() if i == len(parts) or world.size == 1 else model.no_sync():
            loss = forward(model, placed(part, world.device, opts), state, totals)
            # DDP divides by the number of ranks: the factor world.size undoes that.
            scale(loss * (world.size / batch.size), state).backward()
    state.buffers.average(world, sum(n for n, _ in parts) / batch.size)
    state.count(totals[1], batch.size, world.all_sum)
    return totals


def backward_slices(model, batch, state, world):
    """`backward` for --virtual-ranks: slices are summed along a fixed tree, so no bit depends on the world.

    Each slice is computed as if it were alone; the number of ranks only decides which rank computes it.
    """
    tree = model.tree
    tree.begin(state)
    for v, (n, part) in zip(tree.slices, batch.parts, strict=True):  # in a short last batch n may be 0
        if v > tree.slices.start:
            tree.buffers.restore()
        one_slice(model.net, tree, v, n, part, batch.size, state, world)
    return tree.finish(batch, state)


def one_slice(net, tree, v, n, part, size, state, world):
    """Forward and backward of slice v, which has n of the `size` samples of the global batch."""
    seed(world, state.opts.seed, "step", state.step, v)
    with tree.leaf(v):
        if n:
            totals = state.task.zeros(world.device, tree.kind)
            loss = forward(net, placed(part, world.device, state.opts, own=True), state, totals)
            tree.measure(totals, tree.buffers.moves(n / size, v == tree.count - 1))
            scale(loss / size, state).backward()


def scale(loss: Tensor, state: TrainState) -> Tensor:
    return state.scaler.scale(loss) if state.scaler else loss


def seed(world: World, *key: SupportsIndex | str) -> None:
    """Seeds the generators in use from a key; torch.manual_seed would take 0.3 ms for absent devices."""
    number = hash_seed(*key)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)
    if world.device.type == "cuda":
        torch.cuda.manual_seed_all(number)


def placed(part: Any, device: torch.device, opts: Options, own: bool = False) -> Any:
    """What collate made, on the device and in the memory layout of --channels-last.

    With `own` each tensor has memory of its own: the order of vector code may depend on the alignment.
    """
    def move(x):
        if own:
            x = torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x, non_blocking=True)
        x = x.to(device, non_blocking=True)
        return x.contiguous(memory_format=torch.channels_last) if opts.channels_last and x.dim() == 4 else x

    return map_tensors(move, part)


def forward(model: nn.Module, part: Any, state: TrainState, totals: Tensor) -> Tensor:
    """The summed loss of some samples, or of none; adds all that the task returns to `totals`.

    A task may call the net as it likes, so DDP wraps all of it: it must know when a forward begins and ends.
    """
    def run(net):
        def nothing():
            return sum(p.flatten()[:0].sum() for p in net.parameters() if p.requires_grad)

        if part is None:
            return nothing()
        shapes = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in leaves(part)[:2])
        with blamed(f"model {state.opts.model} on a batch of {shapes}"):
            values = state.task(net, part, state)
        state.task.add(totals, values)
        return state.task.minimised(values, nothing)

    return model(run) if isinstance(model, DistributedDataParallel) else run(model)
