"""All ranks compute one slice, and vote on its bits (--cross-check).

A device that computes wrong numbers now and then raises no error, and the sum over ranks hides whose they
are. With --virtual-ranks the gradient of a slice has the same bits on every rank.
"""

import socket
from collections import Counter
from dataclasses import replace

from common.data import batches
from common.errors import UserError
from common.extras.bits import SliceGradient
from common.sampler import ElasticSampler, hash_seed
from common.world import fingerprint_of, gather


class VotedGradient(SliceGradient):
    """A gradient with two pieces more every so many steps: one slice, twice; nothing of these is added.

    Twice, because of two ranks with other bits it is the one that computes something else the second time.
    """

    def __init__(self, slices, batch, state, world, split):
        super().__init__(slices, batch, state, world, split)
        self.own = sum(bool(ids) for _, ids, _ in self.parts)  # slices that are left to be added
        self.bits = []  # of the slice that all compute
        if (state.progress.step + 1) % state.opts.cross_check == 0:
            part = drawn_slice(split, state)
            if part[1]:
                self.parts += [part, part]

    def add(self, loss, count=None):
        super().add(loss, count)
        if self.is_last and self.bits:
            self.odd = self._vote()

    def _take(self, *how):
        if self.own:
            self.own -= 1
            super()._take(*how)
        else:
            self.bits.append(fingerprint_of(self.slices.gradient(self.number, *how)))

    def _vote(self):
        """Return the ranks with other bits than most, in words; nothing if all have the same."""
        votes = gather(self.world, [self.bits, socket.gethostname()])
        bits, count = Counter(number for own, _ in votes for number in own).most_common(1)[0]
        odd = [rank for rank, (own, _) in enumerate(votes) if {*own} != {bits}]
        if not odd:
            return ""
        if count <= len(votes):  # no majority: it may be any of them
            odd = range(len(votes))
        names = " or ".join(f"rank {rank} (host {votes[rank][1]})" for rank in odd)
        step = self.state.progress.step + 1
        return f"step {step}: {names} computes slice {self.number} with other bits than another rank"


def count_votes(store, odd):
    """Let all ranks agree on this step, or end the run if `odd` names one of them."""
    if odd:
        store.roll_back(
            UserError(
                f"{odd}; going back to step {store.saver.agreed} or before, on which ranks agreed\n"
                "keep the run off that device, then start the same command again",
                code=7,
            )
        )
    store.saver.agreed = store.state.progress.step


def drawn_slice(split, state):
    """Return (v, ids, samples) of a slice v of this step's batch, of whichever rank."""
    progress = state.progress
    opts = replace(state.opts, workers=0)
    v = hash_seed("slice", opts.seed, progress.step) % opts.virtual_ranks
    alone = ElasticSampler(progress.samples, opts.global_batch_size, v, opts.virtual_ranks, progress.order[1])
    alone.set_epoch(progress.epoch, progress.position)
    batch = next(batches(split, alone, opts))
    return v, batch.ids, batch.data if batch.ids else None
