"""A batch is a function of (seed, epoch, ids), in any process and at any world size."""

import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from test_datasets import options
from torch.utils.data import Dataset

from common.data import batches, loaded, loading
from common.data.samples import TensorSamples
from common.extras.datasets import crop_flip
from common.extras.own_data import DatasetSamples
from common.sampler import ElasticSampler


class Noisy(Dataset):
    """Samples with a little of every generator in them."""

    classes = 3

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([float(i), torch.rand(()), random.random(), numpy.random.rand()]), i % 3


def noisy(n):
    return DatasetSamples(Noisy(n), options("noisy"), 3)


def pictures(n, augment=crop_flip):
    x = torch.randint(0, 256, (n, 3, 12, 10), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
    tensors = (x, torch.arange(n) % 3)
    return TensorSamples(tensors, options("x"), 3, mean=(0.5, 0.4, 0.3), std=0.2, augment=augment)


def epoch_of(split, world, position=0, **flags):
    """The epoch's global batches of seven, put together from the shares of all ranks."""
    ranks = []
    for rank in range(world):
        order = ElasticSampler(len(split), 7, rank, world)
        order.set_epoch(1, position)
        ranks.append(list(batches(split, order, options("noisy", **flags))))
    whole = []
    for shares in zip(*ranks, strict=True):
        ids = sum((share.ids for share in shares), [])
        assert {share.size for share in shares} == {len(ids)}
        x, y = zip(*(part for share in shares for n, part in share.parts if n), strict=True)
        whole.append((torch.cat(x), torch.cat(y), ids))
    return whole


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) and i == j for (x, y, i), (u, v, j) in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("n", [1, 6, 7, 8, 20])
@pytest.mark.parametrize("split", [pictures, noisy])
def test_a_global_batch_is_the_same_at_any_world_size_and_from_any_place_of_the_epoch(split, n):
    alone = epoch_of(split(n), 1)
    assert sorted(i for _, _, ids in alone for i in ids) == list(range(n))
    for world in (2, 3, 9):
        assert same(epoch_of(split(n), world), alone)
    assert same(epoch_of(split(n), 3, position=min(n, 7)), alone[1:])


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_processes_change_no_number_and_no_generator_of_the_training(workers):
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    found = epoch_of(noisy(15), 2, workers=workers)  # the last batch leaves a rank without a sample
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]
    assert same(found, epoch_of(noisy(15), 1))


@pytest.mark.parametrize("split", [pictures(3), noisy(3)])
def test_a_forward_without_samples_has_the_shape_and_type_of_a_full_one(split):
    (((ids, empty),),) = loaded(split, [[[]]], options("noisy", sync_bn=True))
    assert ids == []
    for some, none in zip(split.fetch([0, 2], 0, True), empty, strict=True):
        assert len(none) == 0 and none.shape[1:] == some.shape[1:] and none.dtype == some.dtype


@pytest.mark.parametrize("split", [pictures(9), noisy(9)])
def test_what_is_random_about_a_sample_depends_on_seed_epoch_and_id_alone(split):
    x, _ = split.fetch([4, 7, 1], 2, True)
    assert torch.equal(split.fetch([7], 2, True)[0][0], x[1])
    assert not torch.equal(split.fetch([4, 7, 1], 3, True)[0], x)
    split.seed = 1
    assert not torch.equal(split.fetch([4, 7, 1], 2, True)[0], x)


def test_pixels_are_normalised_per_channel_and_augmented_in_training_alone():
    split = pictures(9)
    mean = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
    plain = split.fetch([3, 1])[0]
    torch.testing.assert_close(plain, (split.x[[3, 1]].float() / 255 - mean) / 0.2)
    assert torch.equal(pictures(9, None).fetch([3, 1], 5, True)[0], plain)
    assert same(epoch_of(split, 1, augment="none"), epoch_of(pictures(9, None), 1))
    assert not same(epoch_of(split, 1), epoch_of(pictures(9, None), 1))


def test_crops_move_by_up_to_four_pixels_each_way_and_half_are_mirrored():
    x = torch.zeros(162, 2, 13, 13, dtype=torch.uint8)
    x[:, :, 6, 6] = 100  # a bright pixel with a dim one to its right
    x[:, :, 6, 7] = 50
    moved = crop_flip(x.clone(), (torch.arange(162) + 0.5) / 162)
    assert torch.equal(moved[:, 0], moved[:, 1])
    found = set()
    for picture in moved[:, 0]:
        ((row, column),) = (picture == 100).nonzero().tolist()
        mirrored = bool(picture[row, column - 1] == 50)
        assert mirrored or picture[row, column + 1] == 50
        found.add((row, column, mirrored))
    assert {place[:2] for place in found} == {(r, c) for r in range(2, 11) for c in range(2, 11)}
    assert len(found) == 162


def test_a_tensor_that_is_expanded_is_pinned_like_others(monkeypatch):
    """A dataset of boxes may give one; torch would raise."""
    monkeypatch.setattr(loading, "gpus", lambda: ("a GPU",))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: torch.tensor(x.stride()))
    samples = SimpleNamespace(fetch=lambda ids, *_: torch.ones(2).expand(3, 2))
    (parts,) = loaded(samples, [[[0]]], options("x", device="auto"))
    assert parts[0][1].tolist() == [2, 1]
