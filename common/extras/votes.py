"""All ranks compute one slice, and vote on its bits (--cross-check).

A device that computes wrong numbers now and then raises no error, and the sum over ranks hides whose they
are. With --virtual-ranks the gradient of a slice has the same bits on every rank.
"""

import socket
from collections import Counter
from dataclasses import replace

import torch

from common.data import batches
from common.errors import UserError
from common.extras.bits import SliceGradient
from common.extras.differ import roll_back
from common.sampler import ElasticSampler, hash_seed
from common.world import fingerprint_of, gather


class VotedGradient(SliceGradient):
    """A gradient with one piece more on each rank, which is not added; if votes differ, all repeat it."""

    def __init__(self, slices, batch, state, world, split):
        super().__init__(slices, batch, state, world, split)
        self.votes: list[list[int]] = []
        self.piece = None  # that all vote on
        if not (state.progress.step + 1) % state.opts.cross_check:
            self.piece = voted_piece(split, state)
        if self.piece:
            self.parts.append(self.piece)

    def add(self, loss, count=None):
        super().add(loss, count)
        if not self.piece or not self.is_last:
            return
        self.votes.append(gather(self.world, self.bits))
        if len(set(self.votes[0])) == 1:
            self.odd = ""
        elif len(self.votes) == 1:
            self.parts.append(self.piece)
        else:
            self.odd = self._odd_ranks()

    def _backward(self, loss, totals):
        if not self.piece or not self.is_last:
            super()._backward(loss, totals)
            return
        size = self.batch.size
        tail = self.slices.measured(self.number, len(self.ids) / size, totals)
        output = self.state.scaler.scale(loss / size)
        gradients = torch.autograd.grad(output, self.slices.params, materialize_grads=True)
        self.bits = fingerprint_of([*gradients, tail])

    def _odd_ranks(self):
        """Say which ranks compute the slice with other bits than most."""
        votes, again = self.votes
        bits, count = Counter(votes + again).most_common(1)[0]
        ranks = range(self.world.size)
        odd = [rank for rank in ranks if {votes[rank], again[rank]} != {bits}]
        if count <= len(ranks):  # no majority: it may be any of them
            odd = ranks
        hosts = gather(self.world, socket.gethostname())
        names = " or ".join(f"rank {rank} (host {hosts[rank]})" for rank in odd)
        step = self.state.progress.step + 1
        return f"step {step}: {names} computes slice {self.number} with other bits than another rank"


def count_votes(store, odd):
    """Note that all ranks agree up to the last step, or end the run if `odd` names one of them."""
    if odd:
        error = UserError(
            f"{odd}; going back to step {store.saver.agreed} or before, on which ranks agreed\n"
            "keep the run off that device, then start the same command again",
            code=7,
        )
        roll_back(store, error)
    store.saver.agreed = store.state.progress.step


def voted_slice(opts, step):
    """Return the slice of the next step that all ranks compute."""
    return hash_seed("slice", opts.seed, step) % opts.virtual_ranks


def voted_piece(split, state):
    """Return (v, ids, samples) of the same slice v of a step on all ranks; None if it has none to read."""
    progress = state.progress
    opts = replace(state.opts, workers=0)
    v = voted_slice(opts, progress.step)
    alone = ElasticSampler(progress.samples, opts.global_batch_size, v, opts.virtual_ranks, progress.order[1])
    alone.set_epoch(progress.epoch, progress.position)
    batch = next(batches(split, alone, opts))
    return (v, batch.ids, batch.data) if batch.data is not None else None
