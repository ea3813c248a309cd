"""The order: a permutation, random enough, cheap at any position, cut into shares that lose and repeat
nothing.
"""

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from common.extras.datasets import uniforms
from common.sampler import ElasticSampler, hash_seed, permute

HOUSE = Path(__file__).parents[2]
POWERS = [2**k + d for k in range(5, 18) for d in (-1, 0, 1)]


# --- a permutation ---
@pytest.mark.parametrize("n", sorted({*range(1, 40), 100, 999, 1000, 1001, 59_999, 60_000, 60_001, *POWERS}))
def test_every_sample_has_exactly_one_position(n):
    for seed, epoch in ((0, 0), (2**63 - 1, 10**6)):
        assert torch.equal(permute(range(n), n, seed, epoch).sort().values, torch.arange(n))


@pytest.mark.parametrize("n", [10**9, 2**31 + 1, 2**32 - 1, 2**40, 2**62])
def test_huge_sizes_stay_in_range_and_never_collide(n):
    edges = torch.cat(
        [torch.arange(50_000), torch.arange(n // 2, n // 2 + 50_000), torch.arange(n - 50_000, n)]
    )
    ids = permute(edges, n, 0, 0)
    assert 0 <= ids.min() and ids.max() < n
    assert len(ids.unique()) == len(ids)
    # spread over the whole range, not only part of it
    assert abs(float((ids.double() / n).mean()) - 0.5) < 0.005


def test_a_position_alone_gives_the_same_sample_as_the_whole_epoch():
    whole = permute(range(1000), 1000, 5, 2)
    for order in (range(999, -1, -1), [3], torch.tensor([[7, 7], [0, 999]]), []):
        asked = torch.as_tensor(list(order) if isinstance(order, range) else order, dtype=torch.int64)
        assert torch.equal(permute(order, 1000, 5, 2), whole[asked])


def test_the_order_never_changes_between_releases_or_machines():
    """A run resumed after an upgrade must meet the order it began with: these numbers are a file format."""
    assert hash_seed("order", 0, 0, 0) == 1891122891
    assert permute(range(12), 12, 0, 0).tolist() == [7, 8, 5, 3, 10, 4, 2, 9, 11, 1, 0, 6]
    assert permute(range(5), 10**9, 7, 3).tolist() == [896347593, 723544756, 153454740, 104443561, 213890358]
    bits = (uniforms([0, 1, 2**40], 7, 3) * 2**24).tolist()
    assert bits == [7612863, 6007389, 5608119]


# --- randomness that no rank owns ---


def test_uniforms_belong_to_the_sample_and_to_nothing_else():
    whole = uniforms(range(1000), 1, 2)
    assert torch.equal(uniforms([999, 5], 1, 2), whole[[999, 5]])
    assert uniforms([], 1, 2).shape == (0,)
    for ids, seed, epoch in ((range(1000), 1, 3), (range(1000), 2, 2), (range(2**40, 2**40 + 1000), 1, 2)):
        assert (uniforms(ids, seed, epoch) == whole).float().mean() < 0.01


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
    assert len({len(order) for order in orders}) == 1
    steps = list(zip(*orders, strict=True))  # strict: every rank takes part in every step
    sizes = list(orders[0].batch_sizes())
    assert [sum(map(len, parts)) for parts in steps] == sizes and len(steps) == len(orders[0])
    for parts in steps:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    return [list(itertools.chain(*parts)) for parts in steps]


@pytest.mark.parametrize("batch", [1, 4, 7, 64])
def test_every_sample_comes_once_per_epoch_at_any_world_size(batch):
    for n in {1, 2, batch - 1, batch, batch + 1, 2 * batch + 1, 100} - {0}:
        alone = epoch_by_step(n, batch, 1)
        assert sorted(itertools.chain(*alone)) == list(range(n))
        assert all(len(step) == batch for step in alone[:-1]) and len(alone) == -(-n // batch)
        for world in {2, 3, batch - 1, batch, batch + 1} - {0, 1}:
            assert epoch_by_step(n, batch, world) == alone


@pytest.mark.parametrize("n, batch", [(5_003, 2_000), (403, 100)])
def test_1024_ranks_see_every_sample_once(n, batch):
    assert epoch_by_step(n, batch, 1024) == epoch_by_step(n, batch, 1)
    assert sorted(itertools.chain(*epoch_by_step(n, batch, 1))) == list(range(n))


def test_a_training_resized_at_random_places_sees_the_epoch_of_an_unbroken_one():
    dice = random.Random(0)
    for _ in range(15):
        n = dice.randint(1, 150)
        batch = dice.randint(1, 40)
        position = 0
        steps = []
        while position < n:
            rest = epoch_by_step(n, batch, dice.randint(1, 9), seed=1, epoch=4, position=position)
            done = rest[: dice.randint(0, len(rest))]
            steps += done
            position += sum(map(len, done))
        assert steps == epoch_by_step(n, batch, 1, seed=1, epoch=4)


def test_any_position_is_a_good_place_to_resume():
    whole = permute(range(43), 43, 5, 2).tolist()
    for position in range(44):  # also in the middle of what used to be a batch, as after a change of plan
        rest = epoch_by_step(43, 8, 3, seed=5, epoch=2, position=position)
        assert list(itertools.chain(*rest)) == whole[position:]


def test_fetching_ahead_does_not_move_the_position_and_one_beyond_the_epoch_is_refused():
    order = ElasticSampler(100, 10)
    order.set_epoch(1, 20)
    list(order)
    assert (order.epoch, order.position, len(order)) == (1, 20, 8)
    for position in (-1, 101):
        with pytest.raises(ValueError):
            order.set_epoch(0, position)


class Ids(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_dataloader_takes_it_as_batch_sampler(workers):
    orders = [ElasticSampler(Ids(), 8, rank, 2, seed=1) for rank in range(2)]
    loaders = [DataLoader(Ids(), batch_sampler=order, num_workers=workers) for order in orders]
    for epoch, position in ((0, 0), (1, 16), (0, 0)):
        for order in orders:
            order.set_epoch(epoch, position)
        steps = [torch.cat(parts).tolist() for parts in zip(*loaders, strict=True)]
        assert steps == epoch_by_step(50, 8, 1, seed=1, epoch=epoch, position=position)
        assert len(loaders[0]) == len(steps)
