"""Orders that a dataset asks for: shards stay together, weights say how often; each is a formula."""
import itertools
from types import SimpleNamespace

import pytest
import torch
from test_sampler import epoch_by_step
from test_sampler_randomness import odd_statistics

from common import sampler
from common.errors import UserError
from common.sampler import ElasticSampler, Order, permute

SIZES = torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(0))
SIZES[:2] = torch.tensor([0, 5])


class Sized(SimpleNamespace):
    def __len__(self):
        return self.n


def whole(n, epoch=0, seed=0, **facts):
    return Order(n, seed, **facts).ids(torch.arange(n), epoch)


def shards(n, size):
    return [size] * (n // size) + [n % size] * (n % size > 0)


# ---- groups ----

@pytest.mark.parametrize("sizes", [SIZES, [7], [1] * 50, [0, 3, 0], shards(40_001, 100), [30_000, 1, 9] * 9])
def test_every_sample_of_every_group_has_exactly_one_position(sizes):
    n = int(torch.as_tensor(sizes).sum())
    for seed, epoch in ((0, 0), (2**63 - 1, 5)):
        assert torch.equal(whole(n, epoch, seed, groups=sizes).sort().values, torch.arange(n))


def test_few_groups_are_open_at_a_time_and_each_of_them_once_an_epoch():
    n, size = 500_000, 1000
    order = whole(n, groups=shards(n, size)) // size
    assert max(len(order[at:at + 4096].unique()) for at in range(0, n, 4096)) <= 4 * sampler.GROUPS_MIXED
    for group in (0, 250, 499):
        places = (order == group).nonzero()
        assert places.max() - places.min() < 2 * sampler.GROUPS_MIXED * size
    assert len((whole(n)[:4096] // size).unique()) > 490              # as it would be without groups
    assert not torch.equal(order, whole(n, epoch=1, groups=shards(n, size)) // size)


def test_a_window_of_groups_is_as_random_as_a_shuffle_and_groups_shuffled_alone_would_be_noticed():
    def groups_alone(n, seed, epoch):
        return torch.arange(n).view(-1, 100)[permute(range(n // 100), n // 100, seed, epoch)].flatten()

    assert odd_statistics(lambda n, seed, epoch: whole(n, epoch, seed, groups=shards(n, 100))) == []
    assert odd_statistics(groups_alone)


def test_groups_that_follow_each_other_are_strangers_of_each_other():
    n, size = 400_000, 100
    order = whole(n, groups=shards(n, size)).double()
    near = torch.corrcoef(torch.stack([order[:-20_000], order[20_000:]]))[0, 1]
    assert abs(near) < 0.05


# ---- weights ----

def counts(weights, epochs=1, seed=0):
    n = len(weights)
    drawn = [whole(n, epoch, seed, weights=weights) for epoch in range(epochs)]
    return torch.bincount(torch.cat(drawn), minlength=n).double()


def test_a_sample_comes_as_often_as_its_weight_says_in_each_epoch_and_exactly_in_the_mean():
    weights = torch.tensor([1, 2, 0, 4, 0.5]).repeat(400)
    wanted = weights.double() / weights.sum() * len(weights)
    assert (counts(weights) - wanted).abs().max() < 2 and not counts(weights, 20)[weights == 0].any()
    found = counts(weights, 100).view(-1, 5).sum(0) / 100
    assert torch.allclose(found, wanted.view(-1, 5).sum(0), rtol=0.005)
    single = counts(torch.tensor([3.0, 1.0]), 4000) / 4000
    assert abs(single[1] - 0.5) < 0.03


def test_equal_weights_are_a_shuffle_and_tiny_ones_still_come():
    assert torch.equal(whole(999, weights=[0.3] * 999).sort().values, torch.arange(999))
    found = counts(torch.tensor([1.0] + [1e-12] * 99), 10)
    assert found[0] > 900 and found.sum() == 1000


def test_draws_are_the_same_numbers_on_every_machine_and_after_every_release():
    assert whole(8, 3, 1, weights=[1, 2, 3, 4, 5, 6, 7, 8]).tolist() == [7, 6, 5, 7, 0, 4, 5, 3]
    assert whole(8, 3, 1, groups=[3, 1, 4]).tolist() == [2, 3, 4, 0, 1, 6, 7, 5]


def test_a_place_in_the_line_of_weights_is_as_good_as_any_other():
    n = 1000
    order = Order(n, 0, weights=[1.0] * (n - 1) + [1000.0])
    first = [int(order.ids(torch.tensor([7]), epoch) == n - 1) for epoch in range(400)]
    assert 150 < sum(first) < 250  # half of the line is the last sample's


# ---- both, in a sampler ----

@pytest.mark.parametrize("facts", [{"groups": SIZES}, {"weights": torch.rand(int(SIZES.sum()))}])
def test_any_world_and_any_restart_meets_the_same_order(facts):
    data = Sized(n=int(SIZES.sum()), **facts)
    alone = [list(itertools.chain(*parts)) for parts in zip(ElasticSampler(data, 64), strict=True)]
    for world in (2, 3, 7):
        orders = [ElasticSampler(data, 64, rank, world) for rank in range(world)]
        assert [list(itertools.chain(*parts)) for parts in zip(*orders, strict=True)] == alone
    resumed = ElasticSampler(data, 64)
    resumed.set_epoch(0, 640)
    assert list(resumed) == alone[10:] and sum(alone, []) == whole(data.n, **facts).tolist()
    assert alone != epoch_by_step(data.n, 64, 1)


@pytest.mark.parametrize("facts", [
    {"groups": [3, 4]}, {"groups": [-1, 11]}, {"groups": []}, {"groups": [9.5, 0.5]}, {"groups": "ab"},
    {"weights": [1.0] * 9}, {"weights": [0.0] * 10}, {"weights": [1.0] * 9 + [-1e-9]},
    {"weights": [float("nan")] * 10}, {"weights": [float("inf")] + [1.0] * 9},
    {"groups": [10], "weights": [1.0] * 10}])
def test_groups_and_weights_that_do_not_fit_are_refused(facts):
    with pytest.raises(UserError, match="groups|weights") as caught:
        ElasticSampler(Sized(n=10, **facts), 2)
    assert len(str(caught.value).splitlines()) == 2


def test_orders_of_other_groups_or_weights_have_other_names_and_the_plain_one_has_none():
    asked = {"groups": [2, 2]}, {"groups": [1, 3]}, {"weights": [1, 3, 1, 1]}, {"weights": [1, 1, 1, 1]}, {}
    names = [ElasticSampler(Sized(n=4, **facts), 2).name for facts in asked]
    assert len(set(names)) == 5 and names[-1] == ""
