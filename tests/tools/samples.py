"""Given tensors as data; a net's state, its steps."""

from typing import NamedTuple

import torch

from common.data import Batch
from common.data.loading import forward_sizes
from common.data.samples import Samples as Split
from common.sampler import share
from common.training import Called, TrainState, build_optimizer, find_task, gradients_of, on_device
from common.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, (CPU,), "life")


class Facts(NamedTuple):
    """What a net is built for."""

    name: str
    classes: int
    sample_shape: tuple
    vocab: int | None = None


class Samples(Split):
    """Given tensors as a split of a dataset in memory."""

    first = 0
    classes = 0  # evaluation then takes as many samples at once as it likes

    def __init__(self, x, y):
        self.x = x
        self.y = y
        self.shape = tuple(x.shape[1:])
        self.tokens = y.shape[1:].numel()

    def __len__(self):
        return len(self.y)

    def fetch(self, ids, epoch=0, augment=False):
        return self.x[list(ids)], self.y[list(ids)]


def held(state):
    """A copy of all that a checkpoint would hold, by name."""
    return {name: t.clone() for part in state.tensors().values() for name, t in part.items()}


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def state_of(net, opts, samples=100, task=None, **more):
    optimizer = build_optimizer(net, opts)
    return TrainState(net, optimizer, opts, samples, task or find_task(opts), **more)


class Steps:
    """What the loop of elastic.py does with a batch, without data, a store and a rescue.

    `net` is where `place` has put it; `split` has an example for a rank without samples.
    """

    def __init__(self, net, opts, world, place=on_device, split=None, samples=100, **more):
        self.placed = place(net, opts, world)
        self.state = state_of(net, opts, samples, **more)
        (self.gradient,) = gradients_of(net, self.state.optimizer, opts, world)
        self.model = Called(self.placed, self.state)
        self.world = world
        self.split = split

    def batch(self, x, y):
        """This rank's share of a global batch of these tensors, as `batches` would cut it."""
        opts = self.state.opts
        rank = self.world.rank
        size = self.world.size
        parts = []
        at = share(len(x), rank, size, opts.virtual_ranks).start
        for n in forward_sizes(len(x), rank, size, opts):
            ids = list(range(at, at + n))
            parts.append((ids, (x[ids], y[ids]) if n or opts.sync_bn else None))
            at += n
        return Batch(parts, len(x))

    def backward(self, batch, task=None):
        """The gradient of a global batch; returns this rank's totals."""
        task = task or self.state.task
        gradient = self.gradient(batch, self.state, self.world, self.split)
        for samples in gradient.pieces():
            gradient.add(task(self.model, samples))
        return gradient.finish()

    def step(self, batch):
        totals = self.backward(batch)
        self.state.update(batch.size)
        self.state.end_step(self.world, len(batch.ids) / batch.size)
        return totals
