"""Which sample, when: the order of an epoch as a formula, and its split over ranks.

A shuffled list of a billion indices takes minutes and gigabytes, and a restart must know how far down it a
dead process was. Here `permute(position, n, seed, epoch)` computes the sample at any position directly, so
one integer is the whole data state of a training: the number of samples of this epoch it has trained on. A
restart at another world size continues at that integer and sees exactly the samples that are left.
"""
import contextlib
import hashlib
import math
import operator
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from common.errors import UserError

MASK32 = 0xFFFFFFFF
ROUNDS = 6               # fewer are visibly not random (a test shows it); 6 look like torch.randperm
WINDOW = 8192            # positions per call of permute: hides torch's cost per call, fits the L2 cache
LARGEST = 1 << 62        # samples: both halves of a position are below 2**31, so products fit in int64


def hash_seed(*key: Any) -> int:
    """Return 32 bits that depend on every part of the key, the same on every machine.

    numpy's and torch's integers count as Python's. 32 bits, because torch's CPU generator ignores the upper
    half of a seed.
    """
    plain = tuple(operator.index(part) if hasattr(part, "__index__") else part for part in key)
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=4).digest(), "little")


def mix(x: Tensor) -> Tensor:
    """Scramble the 32-bit numbers in an int64 tensor, in place and one to one: each bit changes all others.

    The integer hash "lowbias32" with later constants (C. Wellons, T. Iron Born: hash-prospector). Both
    constants are below 2**31, so that their product with a 32-bit number fits in int64.
    """
    x.bitwise_xor_(x >> 16).mul_(0x21F0AAAD).bitwise_and_(MASK32)
    x.bitwise_xor_(x >> 15).mul_(0x735A2D97).bitwise_and_(MASK32)
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


def permute(positions: range | list[int] | Tensor, n: int, seed: int, epoch: int) -> Tensor:
    """Return the ids at these positions of the shuffled epoch: a permutation of 0..n-1 without a list.

    Memory and time depend on the number of positions, never on n.
    """
    if not 0 < n <= LARGEST:
        raise ValueError(f"cannot permute {n} samples: 1 to 2**62 are possible")
    if isinstance(positions, range):
        positions = torch.arange(positions.start, positions.stop, positions.step)
    x = torch.as_tensor(positions, dtype=torch.int64)
    if not x.numel():
        return x.clone()
    if x.min() < 0 or x.max() >= n:
        raise ValueError(f"positions {int(x.min())}..{int(x.max())} are not all within 0..{n - 1}")
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


def uniforms(ids: list[int] | Tensor, seed: int, epoch: int, count: int) -> Tensor:
    """Return float32 [len(ids), count] in [0, 1): a pure function of (seed, epoch, id, column).

    Augmentation drawn from it is the same at any world size, batch size and number of workers.
    """
    ids = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
    out = torch.empty(len(ids), count)
    for column in range(count):
        low, high = (hash_seed("uniform", seed, epoch, column, half) for half in range(2))
        bits = mix(mix((ids & MASK32) ^ low) ^ (ids >> 32) ^ high)
        out[:, column] = (bits >> 8) * 2.0**-24  # a float32 holds 24 bits: all 32 could round up to 1
    return out


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
        loader = DataLoader(dataset, batch_sampler=order, num_workers=2)
        order.set_epoch(epoch, position)  # position: samples of this epoch that all ranks have trained on

    Global batches do not depend on the world; the world only cuts them into shares. No sample is padded or
    dropped: the last global batch may be short, and a list is empty where a batch has fewer samples than
    there are ranks. Iterating never moves `position`, because samples fetched ahead are not trained on yet:
    the training loop counts, and passes its count to set_epoch. (torch's default collate_fn cannot make a
    batch of an empty list; common/data has one that can.)
    """

    def __init__(self, length_or_dataset: Any, global_batch_size: int, rank: int = 0, world: int = 1,
                 seed: int = 0, shuffle: bool = True, slices: int = 0) -> None:
        sized = hasattr(length_or_dataset, "__len__")
        self.length = len(length_or_dataset) if sized else operator.index(length_or_dataset)
        self.global_batch_size, self.rank, self.world = global_batch_size, rank, world
        self.seed, self.shuffle, self.slices = seed, shuffle, slices
        if not 0 < self.length <= LARGEST:
            raise UserError(f"the dataset has {self.length} samples\nat least one is needed to train on")
        if global_batch_size < 1:
            raise UserError(f"the global batch size is {global_batch_size}\nit must be at least 1")
        if not 0 <= rank < world:
            raise UserError(f"there is no rank {rank} in a world of {world}\nranks go from 0 to world - 1")
        if slices and world > slices:
            raise UserError(f"{world} processes, but each global batch has {slices} slices "
                            f"(--virtual-ranks {slices})\nstart at most {slices} processes")
        self.set_epoch(0)

    def set_epoch(self, epoch: int, position: int = 0) -> None:
        """Make the next iter() continue `epoch` after its first `position` samples."""
        if not 0 <= position <= self.length:
            raise ValueError(f"position {position} is not within 0..{self.length}")
        self.epoch, self.position = epoch, position

    def __len__(self) -> int:
        return -(-(self.length - self.position) // self.global_batch_size)

    def batch_sizes(self) -> Iterator[int]:
        """Yield the size of each remaining global batch, over all ranks: a mean divides by it."""
        for start in range(self.position, self.length, self.global_batch_size):
            yield min(self.global_batch_size, self.length - start)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start, size = self.epoch, self.position, self.global_batch_size
        mine = share(size, self.rank, self.world, self.slices)
        most = max(1, WINDOW // max(1, len(mine)))
        count = 1  # global batches per window: the first one comes at once, then the windows double
        while start < self.length:
            count = min(count, most, (self.length - start) // size)
            if count == 0:  # fewer samples are left than a global batch has: one short batch
                count, size = 1, self.length - start
                mine = share(size, self.rank, self.world, self.slices)
            starts = torch.arange(start, start + count * size, size)
            positions = starts[:, None] + torch.arange(mine.start, mine.stop)
            ids = permute(positions.flatten(), self.length, self.seed, epoch) if self.shuffle else positions
            yield from ids.reshape(count, len(mine)).tolist()
            start, count = start + count * size, count * 2


@contextlib.contextmanager
def seeded(*key: Any) -> Iterator[None]:
    """Inside the block, the CPU generators of torch, random and numpy are seeded by `key`; then restored."""
    try:
        import numpy
        arrays: Any = numpy.random
    except ImportError:  # torch works without numpy, and so does this
        arrays = None
    saved = torch.get_rng_state(), random.getstate(), arrays and arrays.get_state()
    seed = hash_seed(*key)
    try:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would move the GPUs' generators too
        random.seed(seed)
        if arrays:
            arrays.seed(seed)
        yield
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        if arrays:
            arrays.set_state(saved[2])
