"""Which sample, when: the order of an epoch as a formula, and its split over ranks.

A shuffled list of a billion indices takes minutes and gigabytes. Here `permute(position, n, seed, epoch)`
computes the sample at any position, so one integer is the whole data state of a training: the number of
samples of this epoch it has trained on. A restart at another world size continues at that integer.
"""

import hashlib
import math
import operator
import random
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import SupportsIndex

import numpy
import torch
from torch import Tensor
from torch.utils.data import Sampler

from common.device import seed_gpus

MASK32 = 0xFFFFFFFF
ROUNDS = 6  # fewer are visibly not random (a test shows it); 6 look like torch.randperm
WINDOW_POSITIONS = 8192  # per call of permute: hides torch's cost per call, fits the L2 cache


def hash_seed(*key: SupportsIndex | str) -> int:
    """Return 32 bits that depend on every part of the key, the same on every machine.

    numpy's and torch's integers count as Python's. torch's CPU generator ignores the upper half of a seed.
    """
    plain = tuple(part if isinstance(part, str) else operator.index(part) for part in key)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def mix(x: Tensor) -> Tensor:
    """Scramble the 32-bit numbers in an int64 tensor, in place and one to one: each bit changes all others.

    The hash "lowbias32" (hash-prospector) with constants below 2**31: their products fit in int64.
    """
    x.bitwise_xor_(x >> 16)
    x.mul_(0x21F0AAAD).bitwise_and_(MASK32)
    x.bitwise_xor_(x >> 15)
    x.mul_(0x735A2D97).bitwise_and_(MASK32)
    return x.bitwise_xor_(x >> 15)


def _rotate(x, amount, modulus):
    """Return (x + amount) mod modulus, amount scaled from 32 bits to below it; without a slow division."""
    total = amount.mul_(modulus).bitwise_right_shift_(32).add_(x)
    return total.sub_((total >= modulus) * modulus)


def _permute_grid(x, rows, columns, keys):
    """Permute 0..rows*columns-1, a Feistel network: see x as (row, column), rotate each by the other's hash.

    The keys can undo each turn, so no two x become equal: this is a permutation, whatever the hash does.
    """
    row = torch.div(x, columns, rounding_mode="floor")
    column = x - row * columns
    for turn, key in enumerate(keys):
        if turn % 2 == 0:
            row = _rotate(row, mix(column ^ key), rows)
        else:
            column = _rotate(column, mix(row ^ key), columns)
    return row.mul_(columns).add_(column)


def permute(positions: range | list[int] | Tensor, n: int, seed: int | None, epoch: int) -> Tensor:
    """Return the ids at these positions of the shuffled epoch; n costs neither memory nor time.

    Without a seed samples come in the order of the dataset. n is at most 2**62: then both halves of a
    position are below 2**31, and their products fit in int64.
    """
    x = torch.as_tensor(positions, dtype=torch.int64)
    if seed is None:
        return x
    rounds = ROUNDS if n > 1000 else 4 * ROUNDS  # in a tiny grid each turn moves little
    keys = [hash_seed("order", seed, epoch, turn) for turn in range(rounds)]
    rows = math.isqrt(n - 1) + 1  # any number gives a permutation; near the root both halves are mixed well
    columns = -(-n // rows)
    x = _permute_grid(x, rows, columns, keys)
    # The grid may have a few cells too many (fewer than `rows`). A position that lands on one of those is
    # permuted again. This follows a cycle of the grid's permutation that began below n, so it comes back
    # below n; and the permutation can be run backwards, so no two positions end on the same id.
    while (outside := (x >= n).nonzero(as_tuple=True)[0]).numel():
        x[outside] = _permute_grid(x[outside], rows, columns, keys)
    return x


def share(n: int, rank: int, world: int, slices: int = 0) -> range:
    """Return this rank's contiguous part of range(n); all parts make up range(n), their sizes differ by one.

    With `slices`, range(n) is first cut into that many parts, and each rank gets its share of whole parts.
    """
    if slices:
        mine = share(slices, rank, world)
        return range(n * mine.start // slices, n * mine.stop // slices)
    return range(n * rank // world, n * (rank + 1) // world)


class ElasticSampler(Sampler):
    """Yield, for each global batch left of this epoch, the list of ids that this rank trains on.

        order = ElasticSampler(dataset, global_batch_size=64, rank=rank, world=world)
        loader = DataLoader(dataset, batch_sampler=order)
        while samples < epochs * len(dataset):  # this integer is all that there is to save of the order
            order.set_epoch(*divmod(samples, len(dataset)))
            for size, (x, y) in zip(order.batch_sizes(), loader):  # this rank's share of `size` samples
                train(x, y, size)  # a mean divides the sum over all ranks by `size`
                samples += size

    The world only cuts global batches into shares. No sample is padded or dropped: the last global batch may
    be short, and a list is empty where a batch has fewer samples than there are ranks. Iterating never moves
    `position`: samples fetched ahead are not trained on yet.
    """

    def __init__(
        self,
        length_or_dataset: int | Sized,
        global_batch_size: int,
        rank: int = 0,
        world: int = 1,
        seed: int | None = 0,
        slices: int = 0,
    ) -> None:
        if isinstance(length_or_dataset, Sized):
            length_or_dataset = len(length_or_dataset)
        self.length = length_or_dataset
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.world = world
        self.seed = seed
        self.slices = slices
        self.set_epoch(0)

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Make the next iter() continue `epoch` after its first `position` samples."""
        if not 0 <= position <= self.length:
            raise ValueError(f"position {position} is not within 0..{self.length}")
        self.epoch = epoch
        self.position = position

    def __len__(self) -> int:
        return -(-(self.length - self.position) // self.global_batch_size)

    def batch_sizes(self) -> Iterator[int]:
        """Yield the size of each remaining global batch, over all ranks: a mean divides by it."""
        for start in range(self.position, self.length, self.global_batch_size):
            yield min(self.global_batch_size, self.length - start)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        start = self.position
        size = self.global_batch_size
        mine = share(size, self.rank, self.world, self.slices)
        most = max(1, WINDOW_POSITIONS // max(1, len(mine)))
        count = 1  # global batches per call of permute: the first one comes at once, then the calls double
        while start < self.length:
            count = min(count, most, (self.length - start) // size)
            if count == 0:  # fewer samples are left than a global batch has: one short batch
                count = 1
                size = self.length - start
                mine = share(size, self.rank, self.world, self.slices)
            starts = torch.arange(start, start + count * size, size)
            positions = starts[:, None] + torch.arange(mine.start, mine.stop)
            ids = permute(positions.flatten(), self.length, self.seed, epoch)
            yield from ids.reshape(count, len(mine)).tolist()
            start += count * size
            count *= 2


def seed_cpu(*key: SupportsIndex | str) -> int:
    """Seed the CPU generators of torch, random and numpy by `key`; return the seed."""
    seed = hash_seed(*key)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would move the GPUs' generators too
    random.seed(seed)
    numpy.random.seed(seed)
    return seed


def seed(*key: SupportsIndex | str) -> None:
    """Seed the generators in use from a key; torch.manual_seed would take 0.3 ms for absent devices."""
    number = seed_cpu(*key)
    seed_gpus(number)


@contextmanager
def seeded(*key: SupportsIndex | str) -> Iterator[None]:
    """Seed the CPU generators of torch, random and numpy by `key` for the block; then restore them."""
    of_torch = torch.get_rng_state()
    of_python = random.getstate()
    of_numpy = numpy.random.get_state()
    try:
        seed_cpu(*key)
        yield
    finally:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
