"""Forward and backward: a global batch becomes one gradient.

The gradient is the exact mean over the samples, at any number of ranks and micro batches.
"""
import contextlib
import time

import torch
import torch._dynamo  # noqa: F401  (takes a second, for which other ranks would wait later)
from torch import Tensor, nn

from common.data import Batch
from common.sampler import hash_seed, share
from common.training.bitwise.buffers import average_buffers
from common.training.loss import autocast, correct, inputs_and_targets, summed_loss
from common.training.prepare import rounds
from common.training.state import TrainState
from common.world import World


def backward(model: nn.Module, batch: Batch, state: TrainState, world: World) -> Tensor:
    """Leaves the mean gradient of the global batch in `.grad`; returns this rank's [summed loss, hits].

    Call it on every rank for every global batch, with an empty share too: it synchronises exactly once.
    """
    opts = state.opts
    if opts.virtual_ranks:
        return backward_slices(model, batch, state, world)
    seed(world, opts.seed, "step", state.step, world.rank)  # dropout: derived, never stored
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    x, y = batch.x.to(world.device, non_blocking=True), batch.y.to(world.device, non_blocking=True)
    size = opts.micro_batch_size or max(1, len(x))
    parts = list(zip(x.split(size), y.split(size), strict=True))
    if opts.sync_bn and batch.size % world.size:  # its layers wait for all ranks: all need as many forwards
        count = rounds(batch.size, opts, world)
        parts = list(zip(x.tensor_split(count), y.tensor_split(count), strict=True))
    began = time.monotonic()
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        with contextlib.nullcontext() if last or world.size == 1 else model.no_sync():
            loss, right = forward(model, *part, state, world)
            if last:
                state.own_seconds += time.monotonic() - began  # the last backward waits for other ranks
            # Divided by the size of the whole batch, so that uneven shares give the exact mean.
            # DDP divides by the number of ranks: the factor world.size undoes that.
            scaled = loss * (world.size / batch.size)
            (state.scaler.scale(scaled) if state.scaler else scaled).backward()
        totals[0] += loss.detach()
        totals[1] += right
    if world.size > 1 and state.buffers:
        average_buffers(state, world, len(batch.x) / batch.size)
    return totals


def backward_slices(model, batch, state, world):
    """`backward` for --virtual-ranks: slices are summed along a fixed tree, so no bit depends on the world.

    Each slice is computed as if it were alone; the number of ranks only decides which rank computes it.
    """
    tree, at, began = model.tree, 0, time.monotonic()
    tree.begin(state)
    for v in tree.slices:
        n = len(share(batch.size, v, tree.count))  # in a short last batch it may be 0
        seed(world, state.opts.seed, "step", state.step, v)
        if v == tree.slices[-1]:
            state.own_seconds += time.monotonic() - began  # the exchange that follows waits for other ranks
        if v > tree.slices.start:
            tree.buffers.restore()
        with tree.leaf(v):
            if n:
                x, y = (own_copy(t[at:at + n], world) for t in (batch.x, batch.y))
                loss, right = forward(model.net, x, y, state, world)
                tree.measure(loss, right, tree.moves(v, n / batch.size))
                scaled = loss / batch.size
                (state.scaler.scale(scaled) if state.scaler else scaled).backward()
        at += n
    return tree.finish()


def seed(world: World, *key: object) -> None:
    """Seeds the generators in use from a key; torch.manual_seed would take 0.3 ms for absent devices."""
    torch.default_generator.manual_seed(hash_seed(*key))
    if world.device.type == "cuda":
        torch.cuda.manual_seed_all(hash_seed(*key))


def own_copy(x: Tensor, world: World) -> Tensor:
    """A copy on the device with its own memory: the order of vector code may depend on the alignment."""
    return torch.empty(x.shape, dtype=x.dtype, device=world.device).copy_(x, non_blocking=True)


def forward(model, x, y, state, world):
    """The summed loss of some samples, and how many of them are answered right."""
    x, targets = inputs_and_targets(x, y, state)
    with autocast(state.opts, world.device):
        out = model(x)
    right = correct(out, y) if len(y) else torch.zeros((), device=x.device)
    return summed_loss(out, targets, state.opts), right
