"""Which sample, when: the order of an epoch as a formula, and its split over ranks.

A shuffled list of a billion indices takes minutes and gigabytes to make, and somebody has to remember how far
down the list a dead process was. Here `permute(position, n, seed, epoch)` computes the sample at any position
directly, so the only data state of a training is one integer: how many samples of this epoch have been
trained on. A restart at another world size continues at that integer and sees exactly the samples that are
left.
"""
import contextlib
import hashlib
import math
import operator
import random

import torch
from torch.utils.data import Sampler

from common.errors import UserError

MASK32 = 0xFFFFFFFF
# fewer are visibly not random (tests/sampler/test_sampler.py shows it); 6 cannot be told from torch.randperm
ROUNDS = 6
# positions per call of permute: enough to hide torch's cost per call, few enough for the L2 cache
WINDOW = 8192
LARGEST = 1 << 62  # both halves of a position are then below 2**31, and no product below leaves int64


def hash_seed(*key):
    """Return 32 bits that depend on every part of the key, the same on every machine and for numpy's and
    torch's ints.

    32 and not 64, because torch's CPU generator ignores the upper half of a seed.
    """
    plain = tuple(operator.index(part) if hasattr(part, "__index__") else part for part in key)
    return int.from_bytes(hashlib.blake2b(repr(plain).encode(), digest_size=4).digest(), "little")


def mix(x):
    """Scramble, in place and one to one, the 32-bit numbers in an int64 tensor: each bit moves all the
    others.

    The integer hash "lowbias32" with later constants (C. Wellons, T. Iron Born: hash-prospector). Both
    constants are below 2**31, so that their product with a 32-bit number fits in int64.
    """
    x.bitwise_xor_(x >> 16).mul_(0x21F0AAAD).bitwise_and_(MASK32)
    x.bitwise_xor_(x >> 15).mul_(0x735A2D97).bitwise_and_(MASK32)
    return x.bitwise_xor_(x >> 15)


def _rotate(x, amount, modulus):
    """Return (x + amount) mod modulus, amount first scaled down from 32 bits to 0..modulus-1; no slow
    division.
    """
    total = amount.mul_(modulus).bitwise_right_shift_(32).add_(x)
    return total.sub_((total >= modulus) * modulus)


def _permute_grid(x, rows, columns, keys):
    """Permute 0..rows*columns-1 (a Feistel network): see x as (row, column), rotate each by the hash of the
    other.

    Whoever knows the keys can undo each turn, so no two x ever meet: a permutation, whatever the hash is
    like.
    """
    row = torch.div(x, columns, rounding_mode="floor")
    column = x - row * columns
    for turn, key in enumerate(keys):
        if turn % 2 == 0:
            row = _rotate(row, mix(column ^ key), rows)
        else:
            column = _rotate(column, mix(row ^ key), columns)
    return row.mul_(columns).add_(column)


def permute(positions, n, seed, epoch):
    """Return the ids of the samples at these positions of the shuffled epoch: a permutation of 0..n-1 without
    a list.

    Memory and time follow the number of positions asked for, never n.
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
    rounds = ROUNDS if n > 1000 else 4 * ROUNDS  # a tiny grid has so few cells that each turn can move little
    keys = [hash_seed("order", seed, epoch, turn) for turn in range(rounds)]
    # any number gives a permutation; near the square root both halves are mixed well
    rows = math.isqrt(n - 1) + 1
    columns = -(-n // rows)
    x = _permute_grid(x, rows, columns, keys)
    # The grid may have a few cells more than there are samples (fewer than `rows`). Whoever lands on one of
    # those walks
    # on from there. The walk follows a cycle of the grid's permutation that began below n, so it comes back
    # below n;
    # and the permutation can be run backwards, so no two walks end on the same id.
    while (outside := (x >= n).nonzero(as_tuple=True)[0]).numel():
        x[outside] = _permute_grid(x[outside], rows, columns, keys)
    return x


def uniforms(ids, seed, epoch, count):
    """Return float32 [len(ids), count] in [0, 1): a pure function of (seed, epoch, id, column) that no rank
    owns.

    Augmentation drawn from it is the same at any world size, batch size and number of workers.
    """
    ids = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
    out = torch.empty(len(ids), count)
    for column in range(count):
        low, high = (hash_seed("uniform", seed, epoch, column, half) for half in range(2))
        bits = mix(mix((ids & MASK32) ^ low) ^ (ids >> 32) ^ high)
        # a float32 holds 24 bits: with all 32 the largest would round up to 1
        out[:, column] = (bits >> 8) * 2.0**-24
    return out


def share(n, rank, world, slices=0):
    """Return this rank's part of range(n): contiguous; all ranks together have exactly range(n), sizes one
    apart.

    With `slices`, range(n) is cut into so many parts first, and a rank gets whole ones: its share of them.
    """
    if slices:
        mine = share(slices, rank, world)
        return range(n * mine.start // slices, n * mine.stop // slices)
    return range(n * rank // world, n * (rank + 1) // world)


class ElasticSampler(Sampler):
    """Yield, for every global batch that is left of this epoch, the list of ids that this rank trains on.

        order = ElasticSampler(dataset, global_batch_size=64, rank=rank, world=world)
        loader = DataLoader(dataset, batch_sampler=order, num_workers=2)
        order.set_epoch(epoch, position)  # position = samples of this epoch trained on so far, by all ranks together

    Global batches do not depend on the world; the world only cuts them into shares. No sample is padded or
    dropped: the last global batch may be short, and a list is empty where a batch has fewer samples than
    there are ranks. Iterating never moves `position`: what was fetched ahead has not been trained on. Whoever
    updates the model keeps count, and says so through set_epoch. (torch's default collate_fn cannot make a
    batch of an empty list: give the DataLoader one that can where lists may be empty, as common/data.py
    does.)
    """

    def __init__(self, length_or_dataset, global_batch_size, rank=0, world=1, seed=0, shuffle=True, slices=0):
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
            raise UserError(f"{world} processes, but each global batch has {slices} slices (--virtual-ranks {slices})\n"
                            f"start at most {slices} processes")
        self.set_epoch(0)

    def set_epoch(self, epoch, position=0):
        """Make the next iter() continue `epoch` after its first `position` samples."""
        if not 0 <= position <= self.length:
            raise ValueError(f"position {position} is not within 0..{self.length}")
        self.epoch, self.position = epoch, position

    def __len__(self):
        return -(-(self.length - self.position) // self.global_batch_size)

    def batch_sizes(self):
        """Yield the size of each remaining global batch, all ranks together: what a mean over the batch
        divides by.
        """
        for start in range(self.position, self.length, self.global_batch_size):
            yield min(self.global_batch_size, self.length - start)

    def __iter__(self):
        epoch, start, size = self.epoch, self.position, self.global_batch_size
        mine = share(size, self.rank, self.world, self.slices)
        most = max(1, WINDOW // max(1, len(mine)))
        count = 1  # global batches per window: the first one is wanted at once, then the windows double
        while start < self.length:
            count = min(count, most, (self.length - start) // size)
            # fewer samples are left than a global batch has: one short batch, split like any other
            if count == 0:
                count, size = 1, self.length - start
                mine = share(size, self.rank, self.world, self.slices)
            starts = torch.arange(start, start + count * size, size)
            positions = starts[:, None] + torch.arange(mine.start, mine.stop)
            ids = permute(positions.flatten(), self.length, self.seed, epoch) if self.shuffle else positions
            yield from ids.reshape(count, len(mine)).tolist()
            start, count = start + count * size, count * 2


@contextlib.contextmanager
def seeded(*key):
    """Inside, the CPU generators of torch, random and numpy are a function of `key`; outside, they never
    moved.
    """
    try:
        from numpy import random as numpy_random
    except ImportError:  # torch works without numpy, and so does this
        numpy_random = None
    saved = torch.get_rng_state(), random.getstate(), numpy_random and numpy_random.get_state()
    seed = hash_seed(*key)
    try:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would move the GPUs' generators too
        random.seed(seed)
        if numpy_random:
            numpy_random.seed(seed)
        yield
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        if numpy_random:
            numpy_random.set_state(saved[2])
