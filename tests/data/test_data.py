"""A batch is a function of (seed, epoch, ids), in any process and at any world size."""

import random

import numpy
import pytest
import torch
from test_datasets import options
from torch.utils.data import Dataset

from common.data import batches, loaded
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


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("n", [1, 6, 7, 8, 20])
@pytest.mark.parametrize("split", [pictures, noisy])
def test_a_global_batch_is_the_same_at_any_world_size_and_from_any_place_of_the_epoch(split, n):
    alone = epoch_of(split(n), 1)
    assert sorted(i for _, _, ids in alone for i in ids) == list(range(n))
    for world in (2, 3, 9):
        assert_same(epoch_of(split(n), world), alone)
    assert_same(epoch_of(split(n), 3, position=min(n, 7)), alone[1:])


def generators():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_processes_change_no_number_and_no_generator_of_the_training(workers):
    before = generators()
    found = epoch_of(noisy(15), 2, workers=workers)  # the last batch leaves a rank without a sample
    assert generators() == before
    assert_same(found, epoch_of(noisy(15), 1))


@pytest.mark.parametrize("split", [pictures(3), noisy(3)])
def test_a_forward_without_samples_has_the_shape_and_type_of_a_full_one(split):
    (((ids, empty),),) = loaded(split, [[[]]], options("noisy", sync_bn=True))
    assert ids == []
    assert_same(empty, tuple(part[:0] for part in split.fetch([0, 2], 0, True)))


@pytest.mark.parametrize("split", [pictures(9), noisy(9)])
def test_what_is_random_about_a_sample_depends_on_seed_epoch_and_id_alone(split):
    def fetch(*ids, epoch=2):
        return split.fetch(list(ids), epoch, True)[0]

    x = fetch(4, 7, 1)
    assert torch.equal(fetch(7)[0], x[1]) and not torch.equal(fetch(4, 7, 1, epoch=3), x)
    split.seed = 1
    assert not torch.equal(fetch(4, 7, 1), x)


def test_pixels_are_normalised_per_channel_and_augmented_in_training_alone():
    split, plain = pictures(9), pictures(9, None)
    mean = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
    x, _ = split.fetch([3, 1])
    torch.testing.assert_close(x, (split.x[[3, 1]].float() / 255 - mean) / 0.2)
    assert torch.equal(plain.fetch([3, 1], 5, True)[0], x)
    assert_same(epoch_of(split, 1, augment="none"), epoch_of(plain, 1))
    assert not torch.equal(epoch_of(split, 1)[0][0], epoch_of(plain, 1)[0][0])


def test_crops_move_by_up_to_four_pixels_each_way_and_half_are_mirrored():
    x = torch.zeros(162, 2, 13, 13, dtype=torch.uint8)
    x[:, :, 6, 6] = 100  # a bright pixel with a dim one to its right
    x[:, :, 6, 7] = 50
    moved = crop_flip(x, (torch.arange(162) + 0.5) / 162)
    assert torch.equal(moved[:, 0], moved[:, 1])
    # where the bright pixel is, and on which side of it the dim one
    bright, dim = ((moved[:, 0] == value).flatten(1).nonzero()[:, 1].tolist() for value in (100, 50))
    found = {(*divmod(at, 13), beside - at) for at, beside in zip(bright, dim, strict=True)}
    places = range(2, 11)
    assert found == {(row, column, side) for row in places for column in places for side in (-1, 1)}
