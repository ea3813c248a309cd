"""A user's own Datasets: what they may be, and what is told of those that are none."""

import numpy
import pytest
import torch
from ranks import fork_ranks
from refusals import refusal
from test_datasets import load, options

from common.data import batches, load_data
from common.models import build_model
from common.options import Options
from common.sampler import ElasticSampler

HEAD = """
import os
import numpy as np
import torch
from torch.utils.data import *

class Rows(Dataset):
    classes = 3
    def __init__(self, n, **facts): self.n = n; vars(self).update(facts)
    def __len__(self): return self.n
    def __getitem__(self, i): return torch.rand(6, generator=torch.Generator().manual_seed(i)), i % 3

class Dicts(Rows):
    def __getitem__(self, i): return {"x": Rows.__getitem__(self, i)[0], "labels": self.label(i)}

def loss(net, batch): return {"loss": (net(batch[0]).sum(), len(batch[0]))}
def net(data): return torch.nn.Linear(6, 3)
"""


TAKE = "class It(Rows):\n def __getitem__(s, i): return"


def mine(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(f"{HEAD}{text}\n")
    return f"{folder}/mine.py:make"


def both(text):
    """A dataset of such a class, to train on and to test on."""
    return f"{text}\ndef make(): return It(20), It(8)\n"


@pytest.mark.parametrize(
    "text, shape, classes, vocab",
    [
        ("def make(): return tuple(random_split(Rows(9), [6, 3]))", (6,), 3, None),
        ("def make(opts): a = Rows(3); a.classes = opts.seed + 4; return a, a", (6,), 4, None),
        ("def make(): return Rows(9, classes=np.int64(4)), Rows(9)", (6,), 4, None),
        ("def make(): return (torch.zeros(4, 1, 3, 3), torch.arange(4)) * 2", (1, 3, 3), 4, None),
        ("def make(): return (torch.tensor([[1, 7]]), torch.tensor([2])) * 2", (2,), 3, 8),
        ("def make():\n a = Rows(3); del Rows.classes; return a, a", (6,), None, None),
    ],
)
def test_a_users_function_may_return_what_is_at_hand(tmp_path, text, shape, classes, vocab):
    data = load(mine(tmp_path, text))
    assert repr((data.sample_shape, data.known_classes, data.vocab)) == repr((shape, classes, vocab))
    if classes is None:
        with refusal("attribute `classes`"):
            build_model(Options(model="mlp"), data)


@pytest.mark.parametrize("label", ["float(i % 2)", "bool(i % 2)", "np.int32(i % 2)"])
def test_labels_that_are_whole_numbers_of_another_type_count(tmp_path, label):
    data = load(mine(tmp_path, both(f"{TAKE} torch.ones(2), {label}")))
    assert data.train.fetch([0, 1, 2])[1].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "text",
    ["def make(): return (X[None], torch.tensor([0])) * 2", f"{TAKE} X, 0\ndef make(): return It(3), It(3)"],
)
@pytest.mark.parametrize("x, scale", [("[[[0, 51, 255]]]", 255), ("[0, 51, 255]", 1)])
def test_a_users_pictures_in_bytes_are_scaled_to_one_and_other_features_are_not(tmp_path, text, x, scale):
    found = load(mine(tmp_path, f"X = torch.tensor({x}).byte()\n{text}")).train.fetch([0])[0]
    torch.testing.assert_close(found.flatten(), torch.tensor([0.0, 51.0, 255.0]) / scale)


def marks_of(folder, *texts):
    """The fingerprints of these data."""
    return [load(mine(folder / str(number), text)).fingerprint for number, text in enumerate(texts)]


def test_one_changed_bit_of_tensors_changes_the_fingerprint(tmp_path):
    text = (
        "def make():\n x, y, xt = torch.ones(5, 2), torch.arange(5) % 2, torch.zeros(1, 2)\n "
        "{}\n return x, y, xt, torch.tensor([0])"
    )
    changes = "", "", "x[3, 1] += 1e-7", "y[2] ^= 1", "x, y = x[:4], y[:4]", "xt[0] = 1"
    first, *marks = marks_of(tmp_path, *map(text.format, changes))
    assert first == marks[0] and len({*marks}) == 5


def test_the_fingerprint_of_a_users_dataset_sees_other_labels_and_contents_but_no_last_bits(tmp_path):
    """Samples that are others each time they are read are no other data; the rehearsal names them."""
    samples = "float(i)), i % 3", "i * (1 + 1e-6)), i % 3", "i + 1.0), i % 3", "float(i)), (i + 1) % 3"
    fresh = f"{TAKE} np.random.default_rng().random(6), 1"
    part = "def make(): return Subset(Rows(9, fingerprint='{}'), range(9)), Rows(3)"
    plain, near, *others, drawn, again, one, two, own = marks_of(
        tmp_path,
        *(both(f"{TAKE} torch.full((2,), {sample}") for sample in samples),
        both(fresh),
        both(fresh),
        *map(part.format, "ab"),
        "def make(): return Rows(9, fingerprint='a'), Rows(3)",
    )
    assert plain == near and len({plain, *others}) == 3 and drawn == again and one != two and own == "a"


ITERABLE = "class It(IterableDataset):\n def __init__(s, n): pass\n def __iter__(s): return iter([(s, 0)])"
LABEL = "class It(Dicts):\n def label(s, i): return"


@pytest.mark.parametrize(
    "text, said",
    [
        ("def make(): return 5", "TypeError: object of type 'int'"),
        ("def make(): return Rows(3), Rows(0)", "an empty set"),
        ("def make(): raise KeyError('where')", "KeyError"),
        ("def make(): return (torch.zeros(2, 2), torch.zeros(3).long()) * 2", "Size mismatch"),
        ("def make(): return (torch.zeros(3, 2), torch.tensor([0, 1, -1])) * 2", "from -1 to 1"),
        (both(ITERABLE), "no place at which a restart can resume"),
        (both(f"{TAKE} 1 / (i - 7)"), "sample 7: ZeroDivisionError"),
        (both(f"{TAKE} torch.ones(i % 2 + 1), 1"), "are no batch"),
        (both("class It(Rows):\n def collate(s, b): pass"), "collate returned None"),
        (both(f"{LABEL} -100 if i else 1"), "targets for"),
        (both(f"{LABEL} 0.5"), "torch.float64 from 0.5 to 0.5"),
        (both(f"{LABEL} i"), "below 3"),
        (both(f"{TAKE} torch.ones(2), 1.25 if i == 3 else 1.0"), "1.25"),
        (
            both("class It(Rows):\n def collate(s, b): return default_collate([x for x in b if x[1] < 2])"),
            "targets for 4 samples",
        ),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_cannot_be_trained_on_is_told_in_three_lines_at_the_start_or_when_it_comes(
    tmp_path, text, said, workers
):
    opts = options(mine(tmp_path, text), workers=workers)
    with refusal(said):
        data = load_data(opts)
        list(batches(data.train, ElasticSampler(data.train, 4), opts))


# ---- data drawn without a seed ----
DRAWN = "def make():\n x = {draw}\n return x, torch.arange(9) % 3, x, torch.arange(9) % 3"


@pytest.mark.parametrize("draw", ["torch.rand(9, 6)", "torch.tensor(np.random.rand(9, 6)).float()"])
def test_what_a_users_function_draws_is_the_same_on_every_rank_and_at_every_start(tmp_path, draw):
    opts = options(mine(tmp_path, DRAWN.format(draw=draw)))

    def mark(world):
        torch.manual_seed(world.rank)
        numpy.random.seed(world.rank)
        return load_data(opts).fingerprint

    assert len({*fork_ranks(2, mark), *fork_ranks(1, mark)}) == 1
