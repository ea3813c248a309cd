"""Pictures in folders, and a user's own Datasets: what they may be, what is said of those that are none."""
import os
import subprocess
import sys

import numpy
import pytest
import torch
from jobs import ROOT
from ranks import fork_ranks
from test_datasets import ALONE, load, options, refusal

from common.data import batches, load_data
from common.data.images import normalized
from common.errors import UserError
from common.models import build_model
from common.options import Options
from common.sampler import ElasticSampler


# ---- a folder of images ----
def write_images(root, train=("cat", "dog"), val=("cat", "dog"), n=3):
    image = pytest.importorskip("PIL.Image")
    for part, classes in (("train", train), ("val", val)):
        for label, name in enumerate(classes):
            (root / part / name).mkdir(parents=True)
            for number in range(n):
                picture = image.new("RGB", (260 + number, 240 - number), (60 * label, 30 * number, 200))
                picture.save(root / part / name / f"{number}.png")
    return root


def test_a_folder_of_images_gives_the_same_batches_with_workers_and_at_any_world_size(tmp_path):
    opts = options("imagefolder", write_images(tmp_path), workers=2, image_size=32)
    data = load_data(opts, ALONE)
    assert (data.sample_shape, data.classes, len(data.test)) == ((3, 32, 32), 2, 6)
    alone = list(batches(data.train, ElasticSampler(data.train, 4), options("imagefolder")))
    halves = [list(batches(data.train, ElasticSampler(data.train, 4, rank, 2), opts)) for rank in range(2)]
    for whole, left, right in zip(alone, *halves, strict=True):
        assert torch.equal(whole.x, torch.cat([left.x, right.x])) and whole.ids == left.ids + right.ids
        assert torch.equal(whole.y, torch.cat([left.y, right.y])) and whole.size == left.size


def test_images_are_augmented_in_training_alone_and_only_if_asked_for(tmp_path):
    from PIL import Image
    write_images(tmp_path)
    grey = numpy.arange(62500, dtype=numpy.uint32).astype("u1").reshape(250, 250)
    Image.fromarray(grey).save(tmp_path / "train/cat/0.png")
    data = load("imagefolder", tmp_path)
    assert not torch.equal(data.train.fetch([0], 0)[0], data.train.fetch([0], 1)[0])
    assert torch.equal(data.test.fetch([0], 0)[0], data.test.fetch([0], 1)[0])
    plain = load("imagefolder", tmp_path, augment="none")
    assert torch.equal(plain.train.fetch([0], 0)[0], plain.train.fetch([0], 1)[0])


def test_the_fingerprint_of_a_folder_sees_names_and_sizes(tmp_path):
    marks = [load("imagefolder", write_images(tmp_path)).fingerprint]
    marks.append(load("imagefolder", tmp_path).fingerprint)
    (tmp_path / "val/cat/2.png").rename(tmp_path / "val/cat/3.png")
    marks.append(load("imagefolder", tmp_path).fingerprint)
    with (tmp_path / "train/dog/1.png").open("ab") as file:
        file.write(b"x")
    os.link(tmp_path / "val/cat/0.png", os.fsencode(tmp_path / "val/cat") + b"/\xe9t\xe9.png")  # any bytes
    marks.append(load("imagefolder", tmp_path).fingerprint)
    assert marks[0] == marks[1] and len(set(marks)) == 3


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("content", [b"", b"<html>", b"half"])
def test_a_broken_image_is_named_with_the_way_out(tmp_path, content, workers):
    opts = options("imagefolder", write_images(tmp_path), workers=workers)
    path = tmp_path / "train/dog/1.png"
    data = load_data(opts, ALONE)
    path.write_bytes(path.read_bytes()[:300] if content == b"half" else content)
    with pytest.raises(UserError, match=f"{path} is not an image") as caught:
        list(batches(data.train, ElasticSampler(data.train, 4), opts))
    assert "--accept-data-change" in str(caught.value) and len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("suffix, order", [("png", "<"), ("tif", "<"), ("tif", ">")])
def test_a_picture_of_16_bits_keeps_all_of_them_and_does_not_become_white(tmp_path, suffix, order):
    from PIL import Image
    write_images(tmp_path)
    grey = numpy.linspace(0, 65535, 240).astype(f"{order}u2").repeat(240).reshape(240, 240)
    Image.fromarray(grey).save(tmp_path / f"val/cat/5.{suffix}")
    x, = load("imagefolder", tmp_path, image_size=64).test.fetch([3])[0]
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    x = x * std + torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    assert x.shape == (3, 64, 64) and torch.allclose(x[0], x[2], atol=1e-6)
    assert len(x[0, :, 5].unique()) == 64 and (x[0, :, 5].diff() - 1 / 73).abs().max() < 1e-3


def test_an_image_becomes_the_very_numbers_of_torchvisions_transforms():
    transforms = pytest.importorskip("torchvision").transforms
    from PIL import Image
    pixels = torch.randint(0, 256, (50, 60, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    theirs = transforms.Compose([transforms.ToTensor(),
                                 transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    image = Image.fromarray(pixels.numpy())
    assert torch.equal(normalized(image), theirs(image)) and normalized(image).is_contiguous()


def test_folders_that_are_no_dataset_are_refused(tmp_path):
    pytest.importorskip("torchvision")
    assert f"{tmp_path}/train" in refusal("imagefolder", tmp_path)
    folder = write_images(tmp_path / "a", val=("cat", "cow"))
    assert "only in one: cow, dog" in refusal("imagefolder", folder)
    assert "no valid file" in refusal("imagefolder", write_images(tmp_path / "b", n=0))


# ---- a user's own ----
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


def mine(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(f"{HEAD}{text}\n")
    return f"{folder}/mine.py:make"


def both(text):
    """A dataset of such a class, to train on and to test on."""
    return f"{text}\ndef make(): return It(20), It(8)\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_datasets_are_trained_on(tmp_path, workers):
    opts = options(mine(tmp_path, "def make(): return Rows(6), Rows(3)"), workers=workers)
    data = load_data(opts, ALONE)
    assert (data.classes, data.sample_shape, len(data.test)) == (3, (6,), 3)
    batch, = batches(data.train, ElasticSampler(data.train, 6), opts)
    assert sorted(batch.ids) == list(range(6)) and batch.x.dtype == torch.float32
    for id, x, y in zip(batch.ids, batch.x, batch.y, strict=True):
        assert torch.equal(x, torch.rand(6, generator=torch.Generator().manual_seed(id))) and y == id % 3


@pytest.mark.parametrize("text, shape, classes, vocab", [
    ("def make(): return tuple(random_split(Rows(9), [6, 3]))", (6,), 3, None),
    ("def make(opts): a = Rows(3); a.classes = opts.seed + 4; return a, a", (6,), 4, None),
    ("def make(): return Rows(9, classes=np.int64(4)), Rows(9)", (6,), 4, None),
    ("def make(): return (torch.zeros(4, 1, 3, 3), torch.arange(4)) * 2", (1, 3, 3), 4, None),
    ("def make(): return (torch.zeros(4, 5, requires_grad=True), torch.arange(4)) * 2", (5,), 4, None),
    ("def make(): a = TensorDataset(torch.zeros(4, 5), torch.arange(4)); return a, a", (5,), 4, None),
    ("def make(): return (torch.tensor([[1, 7]]), torch.tensor([2])) * 2", (2,), 3, 8),
    ("def make():\n a = Rows(3); del Rows.classes; a.targets = [0, 1, 6]\n return a, a", (6,), 7, None),
    ("def make():\n a = Rows(3); del Rows.classes; return a, a", (6,), None, None),
])
def test_a_users_function_may_return_what_is_at_hand(tmp_path, text, shape, classes, vocab):
    data = load(mine(tmp_path, text))
    assert (data.sample_shape, data.known_classes, data.vocab) == (shape, classes, vocab)


@pytest.mark.parametrize("label", ["float(i % 2)", "torch.tensor([i % 2])", "bool(i % 2)", "np.int32(i % 2)"])
def test_labels_that_are_whole_numbers_of_another_type_count(tmp_path, label):
    text = f"class It(Rows):\n def __getitem__(s, i): return torch.ones(2), {label}"
    assert load(mine(tmp_path, both(text))).train.fetch([0, 1, 2])[1].tolist() == [0, 1, 0]


def test_a_users_bytes_are_scaled_to_one(tmp_path):
    text = "def make(): return (torch.tensor([[0, 51, 255]]).byte(), torch.tensor([0])) * 2"
    torch.testing.assert_close(load(mine(tmp_path, text)).train.fetch([0])[0], torch.tensor([[0, 0.2, 1]]))


def test_the_fingerprint_of_a_users_dataset_sees_other_labels_and_contents_but_no_last_bits(tmp_path):
    def mark(change):
        text = f"class It(Rows):\n def __getitem__(s, i): return torch.full((2,), {change}"
        return load(mine(tmp_path / str(len(list(tmp_path.iterdir()))), both(text))).fingerprint

    plain = mark("float(i)), i % 3")
    assert mark("float(i)), i % 3") == mark("i * (1 + 1e-6)), i % 3") == plain
    assert len({plain, mark("i + 1.0), i % 3"), mark("float(i)), (i + 1) % 3")}) == 3
    named = mine(tmp_path / "x", "def make(): return Rows(9, fingerprint='a'), Rows(3)")
    assert load(named).fingerprint == "a"


ITERABLE = "class It(IterableDataset):\n def __init__(s, n): pass\n def __iter__(s): return iter([(s, 0)])"
LABEL = "class It(Dicts):\n def label(s, i): return"
TAKE = "class It(Rows):\n def __getitem__(s, i): return"


@pytest.mark.parametrize("task", ["classify", "loss"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("text, of, said", [
    ("def make(): return 5", "both", "returned int: TypeError"),
    ("def make(): return Rows(3)", "both", "returned Rows: ValueError"),
    ("def make(): return Rows(3), Rows(0)", "both", "an empty set"),
    ("def make(): return iter([1]), iter([2])", "both", "list_iterator"),
    ("def make(): raise KeyError('where')", "both", "KeyError"),
    (both(ITERABLE), "both", "no place at which a restart can resume"),
    (both(f"{TAKE} {{'a': 1}}['b']"), "both", "sample 0: KeyError"),
    (both(f"{TAKE} 1 / (i - 7)"), "both", "sample 7: ZeroDivisionError"),
    (both(f"{TAKE} torch.ones(i % 2 + 1), 1"), "both", "are no batch"),
    (both("class It(Rows):\n def collate(s, b): pass"), "both", "became None"),
    (both("class It(Rows):\n def collate(s, b): return {'x': default_collate(b), 'f': lambda: 1}"), "loss",
     "cannot leave its loading process"),
    (both(f"{LABEL} -100 if i else 1"), "classify", "targets for"),
    (both(f"{LABEL} 0.5"), "classify", "torch.float32 from 0.5 to 0.5"),
    (both(f"{LABEL} i"), "classify", "from 0 to 2"),
    (both(f"{TAKE} torch.ones(2), 1.25 if i == 3 else 1.0"), "classify", "1.25"),
    (both("class It(Rows):\n def collate(s, b): return default_collate([x for x in b if x[1] < 2])"),
     "classify", "targets for 4 samples"),
])
def test_what_cannot_be_trained_on_is_said_in_three_lines_at_the_start_or_when_it_comes(
        tmp_path, text, of, said, task, workers):
    if of not in ("both", task) or "leave" in said and not workers:
        pytest.skip("no error of this task")
    name = task if task == "classify" else f"{tmp_path}/mine.py:{task}"
    opts = options(mine(tmp_path, text), workers=workers, task=name)

    def find(world):
        with pytest.raises(UserError) as caught:
            data = load_data(opts, ALONE)
            list(batches(data.train, ElasticSampler(data.train, 4), opts))
        assert caught.value.code == 2
        return str(caught.value)

    words, = fork_ranks(1, find, deadline=60)
    assert said in words and len(words.splitlines()) <= 3


def test_a_dataset_that_fails_on_its_first_sample_ends_the_job_with_three_lines_and_exit_code_2(tmp_path):
    name = mine(tmp_path, both(f"{TAKE} {{'a': 1}}['b']"))
    done = subprocess.run([sys.executable, ROOT / "train_ddp.py", "--model=mlp", f"--dataset={name}",
                           f"--run-dir={tmp_path}/run"], capture_output=True, text=True)
    assert done.returncode == 2 and "mine.py, line" in done.stderr
    assert len(done.stderr.splitlines()) == 3 and "KeyError" in done.stderr, done.stderr


def test_with_bad_samples_skip_a_collate_may_leave_samples_out(tmp_path):
    text = "class It(Rows):\n def collate(s, b): return default_collate([x for x in b if x[1] < 2] or b[:1])"
    data = load(mine(tmp_path, both(text)), bad_samples="skip")
    assert len(data.train.fetch([0, 1, 2, 3])[1]) == 3


def test_only_a_model_that_needs_the_number_of_classes_asks_for_it(tmp_path):
    data = load(mine(tmp_path, "del Rows.classes\ndef make(): return random_split(Rows(9), [6, 3])"))
    with pytest.raises(UserError, match="attribute `classes`"):
        build_model(Options(model="mlp"), data)


def test_the_length_of_a_dataset_is_asked_for_once(tmp_path):
    data = load(mine(tmp_path, "class It(Rows):\n def __len__(s): s.n -= 1; return s.n\n"
                     "def make(): return It(40), It(40)"))
    assert len({len(data.train) for _ in range(5)}) == 1 == len({len(data.test) for _ in range(5)})


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_with_a_gradient_lose_it(tmp_path, workers):
    text = f"{TAKE} torch.ones(2, requires_grad=True) * 2, 1"
    opts = options(mine(tmp_path, both(text)), workers=workers)

    def find(world):
        data = load_data(opts, ALONE)
        return [batch.x.requires_grad for batch in batches(data.train, ElasticSampler(data.train, 8), opts)]

    assert fork_ranks(1, find, deadline=60) == [[False] * 3]


# ---- data drawn without a seed ----
DRAWN = "def make():\n x = {draw}\n return x, torch.arange(9) % 3, x, torch.arange(9) % 3"


@pytest.mark.parametrize("draw", ["torch.rand(9, 6)", "torch.tensor(np.random.rand(9, 6)).float()"])
def test_what_a_users_function_draws_is_the_same_on_every_rank_and_at_every_start(tmp_path, draw):
    opts = options(mine(tmp_path, DRAWN.format(draw=draw)))

    def mark(world):
        torch.manual_seed(world.rank)
        numpy.random.seed(world.rank)
        return load_data(opts, world).fingerprint

    assert len({*fork_ranks(2, mark), *fork_ranks(1, mark)}) == 1


def test_data_that_differs_between_ranks_is_refused_at_the_first_start_with_the_advice_to_seed_it(tmp_path):
    name = mine(tmp_path, DRAWN.format(draw="torch.tensor(np.random.default_rng().random((9, 6))).float()"))
    for launcher in (["-m", "torch.distributed.run"], [ROOT / "launch/torchrun.py"]):
        words = ["--nproc_per_node=2", ROOT / "train_ddp.py", "--model=mlp", f"--dataset={name}"]
        done = subprocess.run([sys.executable, *launcher, *words, f"--run-dir={tmp_path}/run"],
                              capture_output=True, text=True)
        assert done.returncode and "rank 0 has data" in done.stderr, done.stderr
        assert "seed what is drawn" in done.stderr and "numpy.random.default_rng(0)" in done.stderr


def test_a_sample_that_is_another_one_each_time_is_told(tmp_path, capfd):
    load(mine(tmp_path / "a", both("class It(Rows):\n draw = np.random.default_rng()\n"
                                   " def __getitem__(s, i): return s.draw.random(6), 1")))
    assert "sample 0 is another one each time it is read" in capfd.readouterr().err
    load(mine(tmp_path / "b", both(f"{TAKE} np.random.rand(6), 1")))
    assert not capfd.readouterr().err
