"""All ranks compute one slice, and vote on its bits (--cross-check).

A device that computes wrong numbers now and then raises no error, and the sum over ranks hides whose they
are. With --virtual-ranks the gradient of a slice has the same bits on every rank.
"""

import socket
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.data import Batch, batches
from common.errors import UserError
from common.extras.bits import SliceGradient, Slices, gradient_of
from common.extras.differ import roll_back
from common.sampler import ElasticSampler, hash_seed, share
from common.training import TrainState
from common.world import World, fingerprint_of, gather


class VotedGradient(SliceGradient):
    """A gradient with one piece more on ranks that do not own the slice; if votes differ, all repeat it."""

    def __init__(self, slices: Slices, batch: Batch, state: TrainState, world: World, split: Any) -> None:
        super().__init__(slices, batch, state, world, split)
        self.votes: list[list[int]] = []
        self.bits = 0  # of the slice
        self.checked = checked(state.opts, state.progress.step, world.size)
        self.split = split
        if self.checked is not None:
            part = slice_of(self.checked, split, state)
            if not part[1]:  # nothing to vote on
                self.checked = None
            elif self.checked not in slices.own:
                self.parts.append(part)

    def add(self, loss: Tensor | dict, count: float | Tensor | None = None) -> None:
        super().add(loss, count)
        if self.is_last and self.checked is not None:
            self._vote()

    def _backward(self, loss, totals):
        slices = self.slices
        if self.number in slices.own and not self.votes or not self.ids:
            super()._backward(loss, totals)
            if self.ids and self.number == self.checked:
                self.bits = fingerprint_of(map(gradient_of, slices.tensors))
        else:
            size = self.batch.size
            tail = slices.measured(self.number, len(self.ids) / size, totals)
            self.bits = bits_of(slices, self.state.scaler.scale(loss / size), tail)

    def _vote(self):
        """Compare the bits of all ranks; if they differ, all compute the slice once more."""
        self.votes.append(gather(self.world, self.bits))
        if len(set(self.votes[0])) == 1:
            self.odd = ""
        elif len(self.votes) == 1:
            self.parts.append(slice_of(self.checked, self.split, self.state))
        else:
            self.odd = odd_ranks(*self.votes, self.checked, self.state, self.world)


def count_votes(store, odd):
    """Let all ranks agree on this step, or end the run if `odd` names one of them."""
    if odd:
        roll_back(
            store,
            UserError(
                f"{odd}; going back to step {store.saver.agreed} or before, on which ranks agreed\n"
                "keep the run off that device, then start the same command again",
                code=7,
            ),
        )
    store.saver.agreed = store.state.progress.step


def bits_of(slices, output, tail):
    """Return the bits of a slice's gradient, which is not added."""
    gradients = [torch.full_like(tensor, -0.0) for tensor in slices.params]
    for i, gradient in enumerate(torch.autograd.grad(output, slices.params, allow_unused=True)):
        if gradient is not None:
            gradients[i] = gradient
    return fingerprint_of([*gradients, tail])


def checked(opts, step, world):
    """Return the slice that all ranks compute after `step` steps, or None."""
    if world == 1 or (step + 1) % opts.cross_check:
        return None
    rank = hash_seed("rank", opts.seed, step) % world
    return share(opts.virtual_ranks, rank, world).start  # its gradient is not added to another's at once


def slice_of(v, split, state):
    """Return (v, ids, samples) of slice v of this step's batch, of whichever rank."""
    progress = state.progress
    opts = replace(state.opts, workers=0)
    alone = ElasticSampler(progress.samples, opts.global_batch_size, v, opts.virtual_ranks, progress.order[1])
    alone.set_epoch(progress.epoch, progress.position)
    batch = next(batches(split, alone, opts))
    return v, batch.ids, batch.data if batch.ids else None


def odd_ranks(votes, again, v, state, world):
    """Return the ranks that compute slice v with other bits than most, in words."""
    bits, count = Counter(votes + again).most_common(1)[0]
    odd = [rank for rank in range(world.size) if {votes[rank], again[rank]} != {bits}]
    if count <= world.size:  # no majority: it may be any of them
        odd = list(range(world.size))
    hosts = gather(world, socket.gethostname())
    names = " or ".join(f"rank {rank} (host {hosts[rank]})" for rank in odd)
    return f"step {state.progress.step + 1}: {names} computes slice {v} with other bits than another rank"
