"""A rank's share of a global batch of given tensors, as `batches` would cut it; the state of a net."""

from typing import NamedTuple

import torch

from common.data import Batch
from common.data.loading import forward_sizes
from common.data.samples import Samples as Split
from common.sampler import share
from common.training import TrainState, build_optimizer, find_task
from common.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, (CPU,), "life")


class Facts(NamedTuple):
    """What a net is built for."""

    name: str
    classes: int
    sample_shape: tuple
    vocab: int | None = None


def share_of(x, y, opts, rank=0, world=1):
    mine = share(len(x), rank, world, opts.virtual_ranks)
    parts = []
    at = mine.start
    for n in forward_sizes(len(x), rank, world, opts):
        ids = list(range(at, at + n))
        parts.append((ids, (x[ids], y[ids]) if n or opts.sync_bn else None))
        at += n
    return Batch(parts, len(x))


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


def state_of(net, opts, samples=100, **more):
    more = {"task": find_task(opts)} | more
    return TrainState(net, build_optimizer(net, opts), opts, samples, **more)
