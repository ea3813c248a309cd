"""--cross-check: every N steps all ranks compute one slice, and vote on its bits.

A device that computes wrong numbers now and then raises no error, and the sum over ranks hides whose they
are. With --virtual-ranks the gradient of a slice has the same bits on every rank, so ranks can compare.
"""
import socket
from collections import Counter
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from common.data import batches
from common.sampler import ElasticSampler
from common.training.bitwise import Tree, checked
from common.training.state import TrainState
from common.training.step import one_slice
from common.world import World, gather_texts


class CrossCheck:
    """Where it is `due`, ask `odd_rank` between backward and update, on every rank."""

    def __init__(self, model: nn.Module, split: Any, order: ElasticSampler, state: TrainState,
                 world: World) -> None:
        self.model = model
        self.split = split
        self.order = order
        self.state = state
        self.world = world

    @property
    def due(self) -> bool:
        return checked(self.state.opts, self.state.step, self.world.size) is not None

    def odd_rank(self) -> str:
        """Empty if all ranks have the same bits; else which rank and host has others, as all ranks find."""
        tree = self.model.tree
        v = tree.checked
        votes = self._gather(tree.seen if v in tree.slices else self._again(v))  # one has it from this step
        if len(set(votes)) == 1:
            return ""
        again = self._gather(self._again(v))
        bits, count = Counter(votes + again).most_common(1)[0]
        odd = [r for r in range(self.world.size) if {votes[r], again[r]} != {bits}]
        if count <= self.world.size:
            odd = [*range(self.world.size)]  # no majority: it may be any of them
        hosts = gather_texts(self.world, socket.gethostname())
        names = " or ".join(f"rank {r} (host {hosts[r]})" for r in odd)
        return f"step {self.state.step + 1}: {names} computes slice {v} with other bits than another rank"

    def _gather(self, number):
        return [int(bits) for bits in self.world.all_gather(torch.tensor([number]))]

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
        alone.checked = v
        alone.buffers.restore()
        one_slice(state.net, alone, v, *batch.parts[0], batch.size, state, self.world)
        for p, gradient in zip(tree.params, gradients, strict=True):
            p.grad = gradient
        with torch.no_grad():
            for buffer, was in zip(state.net.buffers(), buffers, strict=True):
                buffer.copy_(was)
        return alone.seen
