"""Data is opened before the first step; then a Batch a step, by the rank or by processes that read ahead."""

import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

from common.data.samples import Data, Samples, map_tensors
from common.device import gpus
from common.errors import UserError, blamed
from common.options import DATASETS, Options, extra, find_function, kind_of
from common.sampler import ElasticSampler, share

WAY_OUT = (
    "its files are to be in --data-dir {} (of text it is the file itself); "
    "--download fetches mnist, fashion-mnist, cifar10"
)
DECIDING = operator.attrgetter(  # the options from which a dataset of this project follows
    "dataset", "data_dir", "image_size", "augment", "vocab_size", "seed", "task", "bad_samples"
)
PRELOADED: dict[tuple, Data] = {}  # by DECIDING(opts): what a launcher has opened, extras/datasets.py


def load_data(opts: Options, own_sets: tuple[Dataset, Dataset] | None = None) -> Data:
    """Open the dataset that `opts.dataset` names, or that of `own_sets`, (train, test)."""
    if DECIDING(opts) in PRELOADED:
        return PRELOADED[DECIDING(opts)]
    name = kind_of(opts.dataset)
    if own_sets or name not in DATASETS:
        return extra("own_data")(opts, own_sets)
    with blamed(f"dataset {opts.dataset}", WAY_OUT.format(opts.data_dir)):
        return find_function(DATASETS[name][0])(opts)


class Batch(NamedTuple):
    """A rank's share of one global batch, cut into its forwards."""

    parts: list[tuple]  # (ids of the samples, what collate made of them) for each forward
    size: int  # samples of the global batch, over all ranks; in an evaluation, of the block

    @property
    def ids(self) -> list[int]:
        return [id for ids, _ in self.parts for id in ids]

    @property
    def data(self) -> Any:
        """Return what collate made of a share that is one forward."""
        return self.parts[0][1]

    @property
    def x(self) -> Tensor:
        """Return the inputs, of (input, target)."""
        return self._part(0)

    @property
    def y(self) -> Tensor:
        return self._part(1)

    def _part(self, number):
        if isinstance(self.data, (tuple, list)):
            return self.data[number]
        raise UserError(
            f"a batch is a {type(self.data).__name__}, and no pair with batch.x and batch.y\n"
            "take batch.data: what collate has made"
        )


def batches(samples: Samples, order: ElasticSampler, opts: Options) -> Iterator[Batch]:
    """Yield this rank's Batch of every global batch that is left of `order`, on the CPU.

    A share may be empty: every rank yields the same number of batches.
    """
    if samples.set_epoch:
        samples.set_epoch(order.epoch)
    parts_of_all = loaded(samples, cuts(order, opts), opts, order.epoch, opts.augment != "none")
    for parts, size in zip(parts_of_all, order.batch_sizes(), strict=True):
        yield Batch(parts, size)


def cuts(order, opts):
    """Yield every share that is left of `order`, as the lists of ids of its forwards."""
    for mine, size in zip(order, order.batch_sizes(), strict=True):
        ids = iter(mine)
        sizes = forward_sizes(size, order.rank, order.world, opts)
        yield [list(itertools.islice(ids, n)) for n in sizes]


def forward_sizes(n, rank, world, opts):
    """Return how many samples each forward of this rank gets of a global batch of n samples.

    With --sync-bn ranks wait for each other inside a forward: all make as many, if need be of
    no sample. With --virtual-ranks each slice is one forward.
    """
    if opts.virtual_ranks:
        slices = share(opts.virtual_ranks, rank, world)
        return [len(share(n, v, opts.virtual_ranks)) for v in slices]
    mine = len(share(n, rank, world))
    most = -(-n // world)
    size = opts.micro_batch_size or max(1, most)
    end = most if opts.sync_bn else mine
    return [max(0, min(size, mine - at)) for at in range(0, end, size)]


def loaded(
    samples: Samples,
    shares: Iterable,
    opts: Options,
    epoch: int = 0,
    augment: bool = False,
) -> Iterator:
    """Yield [(ids, what `fetch` made of these samples) for each forward] of each share."""

    def load(cut):
        parts = []
        for ids in cut:
            batch = samples.fetch(ids, epoch, augment) if ids else None
            if opts.sync_bn and not ids:  # ranks wait for each other in a forward, so it has an input
                batch = map_tensors(lambda x: x[:0], samples.fetch([0]))
            if pin:  # torch pins no expanded tensor
                batch = map_tensors(lambda x: x.contiguous() if 0 in x.stride() else x, batch)
            parts.append((ids, batch))
        return parts

    pin = bool(gpus()) and "cpu" not in (opts.device, *opts.devices)
    if opts.workers and samples.one_by_one:
        yield from extra("workers")(load, shares, opts.workers, pin)
        return
    for parts in map(load, shares):
        yield map_tensors(Tensor.pin_memory, parts) if pin else parts
