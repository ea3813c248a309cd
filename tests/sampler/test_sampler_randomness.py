"""The order is as random as torch.randperm, by statistics that notice an order which is not.

Each statistic is a z-score: mean 0 and variance 1 for a random permutation. Over many keys their mean and
spread are tested. Fewer rounds or a weaker hash fail, so the check can fail. All seeds are fixed: the tests
cannot pass today and fail tomorrow.
"""

import math

import pytest
import torch

from common import sampler
from common.extras.datasets import uniforms
from common.sampler import permute

SAMPLES = 10_000
KEYS = 40


def z_of_counts(counts, freedom):
    expected = counts.double().mean()
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def z_of_table(a, b, k):  # rows and columns of the table have fixed sums, hence the freedom
    return z_of_counts(torch.bincount(a * k + b, minlength=k * k), (k - 1) ** 2)


def statistics(ids, other):
    """Return the z-scores of one order, and of its relation to an `other` (another epoch's, or another
    seed's).
    """
    root = math.isqrt(SAMPLES)
    places = torch.arange(SAMPLES)
    z = {
        "same place in other order": float((ids == other).sum() - 1),
        "block of sample in block of position": z_of_table(places * 16 // SAMPLES, ids * 16 // SAMPLES, 16),
        "low bits": z_of_table(places % 16, ids % 16, 16),
        "block in other order": z_of_table(other * 16 // SAMPLES, ids * 16 // SAMPLES, 16),
    }
    for lag in (1, 2, 64, root):  # a Feistel network with too few rounds keeps differences in a row or column
        for name, part in (("row", ids // root), ("column", ids % root)):
            steps = (part[lag:] - part[:-lag]) % root
            z[f"{name} steps {lag} apart"] = z_of_counts(torch.bincount(steps, minlength=root), root - 1)
    return z


def odd_statistics():
    """Return (name, mean, spread) of the statistics that random orders would not show once in a thousand such
    tests.
    """
    found = {}
    for key in range(KEYS):
        order = permute(range(SAMPLES), SAMPLES, key, 0)
        other_seed, other_epoch = (key, 1) if key % 2 else (key + 1, 0)
        other = permute(range(SAMPLES), SAMPLES, other_seed, other_epoch)
        for name, z in statistics(order, other).items():
            found.setdefault(name, []).append(z)
    odd = []
    for name, zs in found.items():
        mean = sum(zs) / math.sqrt(KEYS)
        spread = sum(z * z for z in zs) / KEYS
        if abs(mean) > 4.5 or not 0.2 < spread < 2.2:
            odd.append((name, mean, spread))
    return odd


def test_the_order_is_as_random_as_a_random_permutation():
    assert odd_statistics() == []


WEAKER = {
    "two rounds": ("ROUNDS", 2),
    "four rounds": ("ROUNDS", 4),
    "a weaker hash": ("mix", lambda x: x.mul_(0x21F0AAAD).bitwise_and_(sampler.MASK32)),
}


@pytest.mark.parametrize("name", WEAKER)
def test_fewer_rounds_or_a_weaker_hash_would_be_noticed(monkeypatch, name):
    monkeypatch.setattr(sampler, *WEAKER[name])
    assert odd_statistics()


def test_uniforms_are_uniform_and_independent_of_other_epochs_seeds_and_neighbours():
    n = 100_000
    a, epoch, seed = (uniforms(range(n), *key) for key in ((0, 0), (0, 1), (1, 0)))
    assert 0 <= a.min() and a.max() < 1
    assert abs(z_of_counts(torch.bincount((a * 1000).long(), minlength=1000), 999)) < 4.5
    apart = torch.corrcoef(torch.stack([a, epoch, seed, a.roll(1)])) - torch.eye(4)
    assert apart.abs().max() < 4.5 / math.sqrt(n)
