"""Forward and backward: a global batch becomes one gradient.

From a batch to a gradient: `backward` seeds the draws, and runs forward and backward of each part of this
rank's share; the last backward averages the gradient over the ranks (DDP); `average` ends the mean of buffers
and counts. With --virtual-ranks the parts are slices, which bitwise.py adds up. In a loop of one's own the
script runs the forwards (elastic.py).

The gradient is the exact mean over the samples at any number of ranks and micro batches: sums are divided by
the size of the global batch before the backward; `end_mean` corrects for what else a task counts.
"""

import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.data import Batch, batches, map_tensors
from common.errors import blamed, warn
from common.options import Options
from common.sampler import ElasticSampler, seed
from common.training.bitwise import Slices
from common.training.optimizer import end_mean
from common.training.state import TrainState
from common.training.tasks import nothing
from common.world import World, fingerprint_of, gather


IN_FLIGHT = 4  # forwards a device: it works on one while the next device works on the one before


def backward(model: nn.Module | Slices, batch: Batch, state: TrainState, world: World) -> Tensor:
    """Leaves the mean gradient of the global batch in `.grad`; returns the totals of this rank's forwards.

    Call it on every rank for every global batch, with an empty share too: it synchronises exactly once.
    """
    gradient = Gradient(model, batch, state, world)
    for samples in gradient.pieces():
        totals = state.task.zeros(world.output)
        loss = forward(gradient.net, samples, state, totals)
        gradient.add(loss, totals)
    return gradient.finish()


class Gradient:
    """The mean gradient of one global batch: `add` the loss of each of the `pieces`, then `finish`.

    A piece is one forward of this rank. With --virtual-ranks it is a slice, which is computed as if it were
    alone: the number of ranks only decides which rank computes it.
    """

    def __init__(self, model: nn.Module | Slices, batch: Batch, state: TrainState, world: World) -> None:
        self.model = model
        self.batch = batch
        self.state = state
        self.world = world
        self.totals = state.task.zeros(world.output)
        self.is_first = True  # of the pieces
        self.pending: list[Tensor] = []  # losses of forwards whose backward has not begun
        self.flight = IN_FLIGHT * len(world.devices) if len(world.devices) > 1 else 1
        self.is_last = True
        self.ids: list[int] = []  # of this piece
        self.slices = model if isinstance(model, Slices) else None
        self.net = self.slices.net if self.slices else model
        numbers = self.slices.own if self.slices else repeat(world.rank)
        parts = [(number, *part) for number, part in zip(numbers, batch.parts, strict=False)]
        self.parts = parts or [(world.rank, [], None)]  # DDP waits for a rank without samples, too

    def pieces(self) -> Iterator[Any]:
        """Yields the samples of each; what is drawn for them follows from its number: it is never stored."""
        state = self.state
        if self.slices:
            self.slices.begin(state)
        for i, (number, ids, samples) in enumerate(self.parts, 1):
            self.number = number
            self.ids = ids
            self.is_first = i == 1
            self.is_last = i == len(self.parts)
            if self.slices:
                state.statistics.reset()
            if self.slices or self.is_first:
                seed(state.opts.seed, "step", state.progress.step, number)
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = self.is_last
            yield placed(samples, self.world.device, state.opts, own=bool(self.slices))

    def add(self, loss: Tensor, totals: Tensor) -> None:
        """The backward of this piece, whose summed loss and totals these are."""
        size = self.batch.size
        scale = self.state.scaler.scale
        if not self.slices:
            self.totals += totals
            # DDP divides by the number of ranks: the factor world.size undoes that.
            self.pending.append(scale(loss * (self.world.size / size)))
            if self.is_last or len(self.pending) == self.flight:
                torch.autograd.backward(self.pending)
                self.pending = []
        elif self.ids:
            tail = self.slices.measured(self.number, len(self.ids) / size, totals)
            self.slices.backward(self.number, tail, scale(loss / size))

    def finish(self) -> Tensor:
        """Averages over the ranks; returns this rank's totals."""
        if self.slices:
            return self.slices.finish(self.batch, self.state)
        check_used(self.model, self.state)
        average(self.state, self.totals, self.batch, self.world)
        return self.totals


def average(state: TrainState, totals: Tensor, batch: Batch, world: World) -> None:
    """After the backward, on every rank: the mean of all ranks, of buffers and of what a task counts."""
    state.statistics.average(world, len(batch.ids) / batch.size)
    end_mean(state, totals[1], batch.size, world.all_sum)


def check_used(model: nn.Module, state: TrainState) -> None:
    """UserError if a weight had no part in the loss: DDP did not average it, and says so a step later.

    A world of one trains without it, and is warned in its first step: it may grow.
    """
    names = [name for p, name in state.names.items() if p.requires_grad and p.grad is None]
    fact = f"model {state.opts.model}: {', '.join(names[:3]) or 'a weight'} had no part in the loss"
    way_out = "freeze it, or add 0 * weight.sum() to the loss, or train with --virtual-ranks"
    if isinstance(model, DistributedDataParallel):
        with blamed(fact, way_out):
            model._check_reducer_finalized()
    elif names and not state.progress.step:
        warn(f"{fact}: more processes would refuse that\n{way_out}")


def odd_ranks(model: Slices, split: object, state: TrainState, world: World) -> str:
    """The ranks that compute a slice with other bits than most, in words; empty if all bits are the same.

    A device that computes wrong numbers now and then raises no error, and the sum over ranks hides whose
    they are. With --virtual-ranks the gradient of a slice has the same bits on every rank. Call it on every
    rank between backward and update.
    """
    v = model.checked
    mine = v in model.own  # this rank has computed it in this step
    votes = gather(world, model.seen if mine else slice_bits(model, v, split, state))
    if len(set(votes)) == 1:
        return ""
    again = gather(world, slice_bits(model, v, split, state))
    bits, count = Counter(votes + again).most_common(1)[0]
    odd = [rank for rank in range(world.size) if {votes[rank], again[rank]} != {bits}]
    if count <= world.size:  # no majority: it may be any of them
        odd = list(range(world.size))
    hosts = gather(world, socket.gethostname())
    names = " or ".join(f"rank {rank} (host {hosts[rank]})" for rank in odd)
    return f"step {state.progress.step + 1}: {names} computes slice {v} with other bits than another rank"


def slice_bits(slices, v, split, state):
    """The bits of slice v's gradient, computed here; leaves no trace."""
    progress = state.progress
    opts = replace(state.opts, workers=0)
    alone = ElasticSampler(progress.samples, opts.global_batch_size, v, opts.virtual_ranks, opts.seed)
    alone.set_epoch(progress.epoch, progress.position)
    batch = next(batches(split, alone, opts))
    gradients = [torch.full_like(tensor, -0.0) for tensor in slices.tensors]
    if batch.ids:
        state.statistics.reset()
        seed(opts.seed, "step", progress.step, v)
        totals = state.task.zeros(slices.world.output)
        samples = placed(batch.data, slices.world.device, opts, own=True)
        loss = state.scaler.scale(forward(slices.net, samples, state, totals) / batch.size)
        gradients[-1] = slices.measured(v, len(batch.ids) / batch.size, totals)
        for i, gradient in enumerate(torch.autograd.grad(loss, slices.params, allow_unused=True)):
            if gradient is not None:
                gradients[i] = gradient
    slices.move_buffers()
    return fingerprint_of(gradients)


def placed(part: Any, device: torch.device, opts: Options, own: bool = False) -> Any:
    """What collate made, on the device and in the memory layout of --channels-last.

    With `own` each tensor has memory of its own: the order of vector code may depend on the alignment.
    """

    def move(x):
        x = x.to(device, non_blocking=True, copy=own)
        if opts.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    return map_tensors(move, part)


def forward(model, part, state, totals):
    """The summed loss of some samples, or of none; adds all that the task returns to `totals`.

    A task may call the net as it likes, so DDP wraps all of it: it must know when a forward begins and ends.
    """

    weights = [p for p in state.names if p.requires_grad]

    def run(net):
        if part is None:
            return nothing(weights)
        values = state.task(net, part, state)
        state.task.add(totals, values)
        return state.task.minimised(values, weights)

    if not isinstance(model, DistributedDataParallel):
        return run(model)
    with blamed(f"model {state.opts.model}"):
        return model(run)
