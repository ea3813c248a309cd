"""--cross-check: every N steps a second rank computes one slice of another rank again.

A device that computes wrong numbers now and then raises no error, and the sum over ranks hides whose they
are. With --virtual-ranks the gradient of a slice has the same bits on every rank, so two ranks can compare.
"""
import socket
import time
from collections import Counter
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from common.data import batches
from common.errors import say
from common.sampler import ElasticSampler
from common.training.backward import one_slice, seed
from common.training.bitwise.sums import Tree, checked
from common.training.state import TrainState
from common.world import World, fingerprint_of, gather_texts


class CrossCheck:
    """Where it is `due`, ask `odd_rank` between backward and update, on every rank."""

    def __init__(self, model: nn.Module, split: Any, order: ElasticSampler, state: TrainState,
                 world: World) -> None:
        self.model, self.split, self.order, self.state, self.world = model, split, order, state, world
        self.ended, self.told = 0.0, False  # the moment of the last comparison; whether its cost was printed

    @property
    def due(self) -> bool:
        return checked(self.state.opts, self.state.step, self.world.size) is not None

    def odd_rank(self) -> str:
        """Empty if both ranks have the same bits; else which rank and host has others, as all ranks find."""
        began, (rank, v, second) = time.monotonic(), self.model.tree.checked
        first = self._gather(self._again(v) if self.world.rank == second else self.model.tree.seen)
        if first[rank] == first[second]:
            self._tell_cost(began)
            return ""
        again = self._gather(self._again(v))
        bits, count = Counter(again).most_common(1)[0]
        odd = {r for r in range(self.world.size) if again[r] != bits} | {
            r for r in (rank, second) if first[r] != bits}
        if 2 * count <= self.world.size:
            odd = {rank, second}  # no majority: it may be either
        hosts = gather_texts(self.world, socket.gethostname())
        names = " or ".join(f"rank {r} (host {hosts[r]})" for r in sorted(odd))
        return f"step {self.state.step + 1}: {names} computes slice {v} with other bits than another rank"

    def _tell_cost(self, began):
        last, self.ended = self.ended, time.monotonic()
        if last and not self.told and self.world.rank == 0:
            cost, self.told = self.ended - began, True
            say(f"--cross-check: {1e3 * cost:.1f} ms every {self.state.opts.cross_check} steps, "
                f"{cost / (self.ended - last):.2%} of the time")

    def _gather(self, number):
        return [int(told) for told in self.world.all_gather(torch.tensor([number]))]

    def _again(self, v):
        """The sum over the bits of slice v's gradient, computed here; leaves no trace."""
        state, tree = self.state, self.model.tree
        order, opts = copy(self.order), state.opts
        order.rank, order.world = v, opts.virtual_ranks  # a rank that has this slice alone
        order.set_epoch(state.epoch, state.position)
        batch = next(iter(batches(self.split, order, replace(opts, workers=0))))
        gradients, buffers = [p.grad for p in tree.params], [b.clone() for b in state.net.buffers()]
        alone = Tree(state.net, replace(self.world, rank=0, size=1), opts.virtual_ranks, range(v, v + 1))
        alone.begin(state)
        alone.buffers.restore()
        seed(self.world, opts.seed, "step", state.step, v)
        one_slice(state.net, alone, v, *batch.parts[0], batch.size, state, self.world)
        for p, gradient in zip(tree.params, gradients, strict=True):
            p.grad = gradient
        with torch.no_grad():
            for buffer, was in zip(state.net.buffers(), buffers, strict=True):
                buffer.copy_(was)
        return fingerprint_of(dict(enumerate(alone.rows[-1])))
