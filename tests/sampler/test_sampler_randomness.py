"""The order is as random as torch.randperm, by statistics that notice an order which is not.

Each statistic is a z-score: mean 0 and variance 1 for a random permutation. Over many keys their mean and
spread are tested. torch.randperm passes, so the scale is right; fewer rounds or a weaker hash fail, so the
check can fail. All seeds are fixed: the tests cannot pass today and fail tomorrow.
"""

import itertools
import math

import pytest
import torch

from common import sampler
from common.extras.datasets import uniforms
from common.sampler import hash_seed, permute


def z_of_counts(counts, freedom=None):
    counts = counts.double().flatten()
    freedom = freedom or len(counts) - 1
    expected = counts.mean()
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def z_of_table(a, b, k):  # rows and columns of the table have fixed sums, hence the freedom
    return z_of_counts(torch.bincount(a * k + b, minlength=k * k), (k - 1) ** 2)


def statistics(ids, other):
    """Return the z-scores of one order, and of its relation to an `other` (another epoch's, or another
    seed's).
    """
    n = len(ids)
    root = math.isqrt(len(ids))
    places = torch.arange(n)
    z = {
        "same place in other order": float((ids == other).sum() - 1),
        "block of sample in block of position": z_of_table(places * 16 // n, ids * 16 // n, 16),
        "low bits": z_of_table(places % 16, ids % 16, 16),
        "remainders": z_of_table(places % 25, ids % 25, 25),
        "block in other order": z_of_table(other * 16 // n, ids * 16 // n, 16),
    }
    for lag in (1, 2, 64, root):  # a Feistel network with too few rounds keeps differences in a row or column
        for name, part in (("row", ids // root), ("column", ids % root)):
            steps = (part[lag:] - part[:-lag]) % root
            z[f"{name} steps {lag} apart"] = z_of_counts(torch.bincount(steps, minlength=root))
    return z


def odd_statistics(make_order, keys=40, n=10_000):
    """Return (name, mean, spread) of the statistics that random orders would not show once in a thousand such
    tests.
    """
    found = {}
    for key in range(keys):
        other = make_order(n, key, 1) if key % 2 else make_order(n, key + 1, 0)
        for name, z in statistics(make_order(n, key, 0), other).items():
            found.setdefault(name, []).append(z)
    odd = []
    for name, zs in found.items():
        mean = sum(zs) / keys * math.sqrt(keys)
        spread = sum(z * z for z in zs) / keys
        if abs(mean) > 4.5 or not 0.2 < spread < 2.2:
            odd.append((name, round(mean, 1), round(spread, 2)))
    return odd


def torch_order(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(hash_seed(seed, epoch)))


def our_order(n, seed, epoch):
    return permute(range(n), n, seed, epoch)


def test_the_order_is_as_random_as_torch_randperm():
    assert odd_statistics(torch_order) == []
    assert odd_statistics(our_order) == []


@pytest.mark.parametrize("rounds", [2, 4])
def test_fewer_rounds_would_be_noticed(monkeypatch, rounds):
    monkeypatch.setattr(sampler, "ROUNDS", rounds)
    assert odd_statistics(our_order)


def test_a_weaker_hash_would_be_noticed(monkeypatch):
    monkeypatch.setattr(sampler, "mix", lambda x: x.mul_(0x21F0AAAD).bitwise_and_(sampler.MASK32))
    assert odd_statistics(our_order)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_orders_of_a_tiny_dataset_are_equally_likely(n):
    seen = dict.fromkeys(itertools.permutations(range(n)), 0)
    for epoch in range(20 * len(seen)):
        seen[tuple(permute(range(n), n, 0, epoch).tolist())] += 1
    assert abs(z_of_counts(torch.tensor(list(seen.values())))) < 4.5


def test_uniforms_are_uniform_and_independent():
    n = 100_000
    a = torch.stack([uniforms(range(n), 0, epoch) for epoch in range(4)], 1)
    assert a.dtype == torch.float32 and 0 <= a.min() and a.max() < 1
    for column in a.T:
        assert abs(z_of_counts(torch.bincount((column * 1000).long(), minlength=1000))) < 4.5
    b = uniforms(range(n), 1, 0).unsqueeze(1)
    columns = torch.cat([a, b, a[:, :1].roll(1, 0)], 1)  # other epochs, another seed, the neighbour
    off_diagonal = torch.corrcoef(columns.T) - torch.eye(6)
    assert off_diagonal.abs().max() < 4.5 / math.sqrt(n)
