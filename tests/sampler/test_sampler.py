"""The order: a permutation, random enough, cheap at any position, cut into shares that lose and repeat
nothing.
"""

import itertools

import pytest
import torch

from common.extras.datasets import uniforms
from common.sampler import ElasticSampler, hash_seed, permute

POWERS = [2**k + d for k in range(5, 18) for d in (-1, 0, 1)]


# --- a permutation ---
@pytest.mark.parametrize("n", sorted({*range(1, 40), 1000, 59_999, 60_000, *POWERS}))
def test_every_sample_has_exactly_one_position(n):
    for seed, epoch in ((0, 0), (2**63 - 1, 10**6)):
        assert torch.equal(permute(range(n), n, seed, epoch).sort().values, torch.arange(n))


@pytest.mark.parametrize("n", [10**9, 2**31 + 1, 2**32 - 1, 2**40, 2**62])
def test_huge_sizes_stay_in_range_and_never_collide(n):
    ids = permute(torch.cat([torch.arange(50_000), torch.arange(n - 50_000, n)]), n, 0, 0)
    assert 0 <= ids.min() and ids.max() < n
    assert len(ids.unique()) == len(ids)
    # spread over the whole range, not only part of it
    assert abs(float((ids.double() / n).mean()) - 0.5) < 0.005


def test_a_position_alone_gives_the_same_sample_as_the_whole_epoch():
    whole = permute(range(1000), 1000, 5, 2)
    for positions in ([3], torch.tensor([[7, 7], [0, 999]]), []):
        asked = torch.as_tensor(positions, dtype=torch.int64)
        assert torch.equal(permute(positions, 1000, 5, 2), whole[asked])


def test_the_order_never_changes_between_releases_or_machines():
    """A run resumed after an upgrade must meet the order it began with: these numbers are a file format."""
    assert hash_seed("order", 0, 0, 0) == 1891122891
    assert permute(range(12), 12, 0, 0).tolist() == [7, 8, 5, 3, 10, 4, 2, 9, 11, 1, 0, 6]
    assert permute(range(3), 10**9, 7, 3).tolist() == [896347593, 723544756, 153454740]
    assert (uniforms([0, 1, 2**40], 7, 3) * 2**24).tolist() == [7612863, 6007389, 5608119]


# --- randomness that no rank owns ---
def test_uniforms_belong_to_the_sample_and_to_nothing_else():
    whole = uniforms(range(1000), 1, 2)
    assert torch.equal(uniforms([999, 5], 1, 2), whole[[999, 5]])
    assert uniforms([], 1, 2).shape == (0,)
    assert (uniforms(range(2**40, 2**40 + 1000), 1, 2) == whole).float().mean() < 0.01


def test_hash_seed_tells_keys_apart_but_not_kinds_of_integers():
    assert hash_seed(1, 2) == hash_seed(torch.tensor(1), 2) != hash_seed(2, 1)
    assert hash_seed("a", 1) != hash_seed("a1") and hash_seed(11) != hash_seed(1, 1)
    assert len({hash_seed("x", k) for k in range(2000)}) == 2000
    assert 0 <= hash_seed() < 2**32


# --- every sample once ---
def epoch_by_step(n, batch, world, seed=0, epoch=0, position=0):
    """Return for every remaining global batch the ids of all ranks, joined in the order of ranks."""
    orders = [ElasticSampler(n, batch, rank, world, seed) for rank in range(world)]
    for order in orders:
        order.set_epoch(epoch, position)
    steps = list(zip(*orders, strict=True))  # strict: every rank takes part in every step
    for parts in steps:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    joined = [list(itertools.chain(*parts)) for parts in steps]
    assert [*map(len, joined)] == list(orders[0].batch_sizes()) and len(joined) == len(orders[0])
    return joined


@pytest.mark.parametrize("batch", [1, 4, 7, 20])
def test_every_sample_comes_once_per_epoch_at_any_world_size_from_any_position(batch):
    for n in {1, 2, batch - 1, batch, batch + 1, 2 * batch + 1, 100} - {0}:
        whole = permute(range(n), n, 5, 2).tolist()
        for world in {1, 2, 3, batch - 1, batch, batch + 1} - {0}:
            for position in {0, 1, n // 2, n}:  # also in the midst of a batch, as after a change of plan
                wanted = [whole[at : at + batch] for at in range(position, n, batch)]
                assert epoch_by_step(n, batch, world, 5, 2, position) == wanted


def test_fetching_ahead_does_not_move_the_position_and_one_beyond_the_epoch_is_refused():
    order = ElasticSampler(100, 10)
    order.set_epoch(1, 20)
    list(order)
    assert (order.epoch, order.position, len(order)) == (1, 20, 8)
    for position in (-1, 101):
        with pytest.raises(ValueError):
            order.set_epoch(0, position)
