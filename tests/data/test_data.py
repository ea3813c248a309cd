import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from common.data import Data, Shares, batches, load_data
from common.data.images import crop_flip
from common.data.splits import DatasetSplit, TensorSplit
from common.errors import UserError
from common.options import Options
from common.sampler import ElasticSampler

ALONE = SimpleNamespace(rank=0, size=1, local_rank=0, local_size=1)


def options(**changed):
    return Options(**{"data_dir": "nowhere", "workers": 0, "device": "cpu"} | changed)


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
    return DatasetSplit(Noisy(n), Data(None, None, 3), options(dataset="noisy"))


def pictures(n, augment=crop_flip, channels=3):
    x = torch.randint(0, 256, (n, channels, 12, 10), generator=torch.Generator().manual_seed(n),
                      dtype=torch.uint8)
    source = Data(None, None, 3, mean=(0.5, 0.4, 0.3)[:channels], std=(0.2, 0.3, 0.4)[:channels])
    return TensorSplit(x, torch.arange(n) % 3, source, 0, augment)


def epoch_of(split, world, opts, size=7, position=0, epoch=1):
    """The epoch's global batches, put together from the shares of all ranks."""
    ranks = []
    for rank in range(world):
        order = ElasticSampler(len(split), size, rank, world)
        order.set_epoch(epoch, position)
        ranks.append(list(batches(split, order, opts)))
    assert len({len(found) for found in ranks}) == 1
    whole = []
    for shares in zip(*ranks, strict=True):
        assert all(sum(n for n, _ in share.parts) == len(share.ids) for share in shares)
        assert {share.size for share in shares} == {sum(len(share.ids) for share in shares)}
        x, y = zip(*(part for share in shares for n, part in share.parts if len(part[0]) == n), strict=True)
        whole.append((torch.cat(x), torch.cat(y), sum((share.ids for share in shares), [])))
    return whole


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, u) and torch.equal(y, v) and i == j
                                    for (x, y, i), (u, v, j) in zip(a, b, strict=True))


@pytest.mark.parametrize("n", [1, 6, 7, 8, 20])
@pytest.mark.parametrize("split", [pictures, noisy])
def test_a_global_batch_is_the_same_at_any_world_size(split, n):
    alone = epoch_of(split(n), 1, options())
    assert sorted(i for _, _, ids in alone for i in ids) == list(range(n))
    for world in (2, 3, 5, 9):
        assert same(epoch_of(split(n), world, options()), alone)


def test_workers_change_no_number_and_survive_empty_shares():
    split = noisy(15)
    assert same(epoch_of(split, 2, options(workers=2)), epoch_of(split, 1, options()))


@pytest.mark.parametrize("split", [pictures(3), noisy(3)])
def test_an_empty_share_has_the_shape_and_type_of_a_full_one(split):
    full, empty = split.fetch([0, 2], 0, True), Shares(split, 0, True, hollow=True).nothing()
    for some, none in zip(full, empty, strict=True):
        assert len(none) == 0 and none.shape[1:] == some.shape[1:] and none.dtype == some.dtype


@pytest.mark.parametrize("split", [pictures(20), noisy(20)])
def test_an_epoch_continues_where_it_was_left(split):
    assert same(epoch_of(split, 3, options(), position=7), epoch_of(split, 1, options())[1:])


@pytest.mark.parametrize("workers", [0, 2])
def test_fetching_moves_no_generator_of_the_training(workers):
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    epoch_of(noisy(8), 1, options(workers=workers))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]


@pytest.mark.parametrize("split", [pictures(9), noisy(9)])
def test_what_is_random_about_a_sample_depends_on_seed_epoch_and_id_alone(split):
    x, _ = split.fetch([4, 7, 1], 2, True)
    assert torch.equal(split.fetch([7], 2, True)[0][0], x[1])
    assert not torch.equal(split.fetch([4, 7, 1], 3, True)[0], x)
    split.seed = 1
    assert not torch.equal(split.fetch([4, 7, 1], 2, True)[0], x)


def test_without_augmentation_and_in_tests_pictures_stay_as_they_are():
    split, still = pictures(9), pictures(9, augment=None)
    assert torch.equal(split.fetch([1, 2], 0, False)[0], still.fetch([1, 2], 5, True)[0])
    assert same(epoch_of(split, 1, options(augment="none")), epoch_of(still, 1, options()))
    assert not same(epoch_of(split, 1, options()), epoch_of(still, 1, options()))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_scaled_and_normalised_per_channel(channels):
    split = pictures(5, None, channels)
    mean, std = (torch.tensor(v[:channels]).view(-1, 1, 1) for v in ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4]))
    torch.testing.assert_close(split.fetch([3, 1])[0], (split.x[[3, 1]].float() / 255 - mean) / std)


def test_crops_move_by_up_to_four_pixels_each_way_and_half_are_mirrored():
    x = torch.zeros(162, 2, 13, 13, dtype=torch.uint8)
    x[:, :, 6, 6], x[:, :, 6, 7] = 100, 50  # a bright pixel with a dim one to its right
    moved = crop_flip(x.clone(), (torch.arange(162) + 0.5) / 162)
    assert torch.equal(moved[:, 0], moved[:, 1])
    found = set()
    for picture in moved[:, 0]:
        (row, column), = (picture == 100).nonzero().tolist()
        mirrored = picture[row, column - 1] == 50
        assert mirrored or picture[row, column + 1] == 50
        found.add((row, column, bool(mirrored)))
    assert {(r, c) for r, c,
            _ in found} == {(r, c) for r in range(2, 11) for c in range(2, 11)} and len(found) == 162


# ---- loading: empty, wrong, changed ----

def load(tmp_path, text, **changed):
    path = tmp_path / "mine.py"
    path.write_text("import torch\nfrom torch.utils.data import Dataset, TensorDataset\n" + text)
    return load_data(options(dataset=f"{path}:make", **changed), ALONE)


@pytest.mark.parametrize("x, y, said", [
    ("torch.zeros(0, 2)", "torch.zeros(0).long()", "an empty set"),
    ("torch.zeros(3, 2)", "torch.tensor([0, 1, -1])", "from -1 to 1"),
    ("torch.zeros(3, 2)", "torch.tensor([0, 1])", "a label for each sample"),
    ("torch.zeros(3, 2)", "torch.tensor([0.5, 1, 2])", "torch.float32 from 0.5 to 2"),
    ("torch.zeros(())", "torch.tensor([0])", "0-d tensor"),
])
def test_tensors_that_are_no_dataset_are_refused(tmp_path, x, y, said):
    with pytest.raises(UserError) as caught:
        load(tmp_path, f"def make(): return {x}, {y}, torch.ones(1, 2), torch.tensor([1])\n")
    assert said in str(caught.value) and len(str(caught.value).splitlines()) <= 3


def test_one_changed_bit_changes_the_fingerprint(tmp_path):
    marks = set()
    for number, change in enumerate(("", "x[3, 1] += 1e-7", "y[2] ^= 1", "x, y = x[:4], y[:4]",
                                     "xt[0, 0] = 1")):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = ("def make():\n x, y, xt, yt = torch.ones(5, 2), torch.tensor([1, 0, 1, 0, 1]), "
                "torch.zeros(1, 2), "
                f"torch.tensor([0])\n {change}\n return x, y, xt, yt\n")
        marks.add(load(folder, text).fingerprint)
        assert load(folder, text).fingerprint in marks
    assert len(marks) == 5
