import struct
import threading
import zlib
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from ranks import fork_ranks
from test_datasets import ALONE, load, options, refusal, write_mnist

from common.data import batches, load_data
from common.data.__main__ import main
from common.data.pictures import normalized
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
                size = (260 + number, 240 - number)
                image.new("RGB", size,
                          (60 * label, 30 * number, 200)).save(root / part / name / f"{number}.png")
    return root


def test_a_folder_of_images_gives_the_same_batches_with_workers_and_at_any_world_size(tmp_path):
    pytest.importorskip("torchvision")
    opts = options("imagefolder", write_images(tmp_path), workers=2)
    data = load_data(opts, ALONE)
    assert (data.sample_shape, data.classes) == ((3, 224, 224), 2)
    alone = list(batches(data.train, ElasticSampler(data.train, 4), options("imagefolder")))
    halves = [list(batches(data.train, ElasticSampler(data.train, 4, rank, 2), opts)) for rank in range(2)]
    for whole, left, right in zip(alone, *halves, strict=True):
        assert torch.equal(whole.x, torch.cat([left.x, right.x])) and whole.ids == left.ids + right.ids
        assert torch.equal(whole.y, torch.cat([left.y, right.y])) and whole.size == left.size


def test_images_are_augmented_in_training_alone_and_only_if_asked_for(tmp_path):
    pytest.importorskip("torchvision")
    data = load("imagefolder", write_images(tmp_path))
    assert torch.equal(data.test.fetch([0], 0, True)[0], data.test.fetch([0], 1, True)[0])
    assert torch.equal(data.train.fetch([0], 0, False)[0], data.train.fetch([0], 1, False)[0])


def test_a_link_to_no_file_among_the_images_is_named(tmp_path):
    pytest.importorskip("torchvision")
    (write_images(tmp_path) / "val/cat/7.png").symlink_to("/absent")
    assert "val/cat/7.png is a link to no file" in refusal("imagefolder", tmp_path)


def test_the_fingerprint_of_a_folder_sees_names_and_sizes(tmp_path):
    pytest.importorskip("torchvision")
    marks = [load("imagefolder", write_images(tmp_path)).fingerprint,
             load("imagefolder", tmp_path).fingerprint]
    (tmp_path / "val/cat/2.png").rename(tmp_path / "val/cat/3.png")
    marks.append(load("imagefolder", tmp_path).fingerprint)
    with (tmp_path / "train/dog/1.png").open("ab") as file:
        file.write(b"x")
    marks.append(load("imagefolder", tmp_path).fingerprint)
    assert marks[0] == marks[1] and len(set(marks)) == 3


def test_one_rank_of_each_node_looks_at_the_files_of_a_folder():
    def find(world):
        looked = []
        return world.once_per_node("fingerprint",
                                   lambda: looked.append(1) or f"of node {world.node}"), len(looked)

    assert fork_ranks(4, find, node_size=2) == [("of node 0", 1), ("of node 0", 0), ("of node 1", 1),
                                                ("of node 1", 0)]
    assert fork_ranks(1, find) == [("of node 0", 1)]


def png_that_claims(width, height):
    head = struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(head)) + b"IHDR" + head + struct.pack(">I", zlib.crc32(b"IHDR" + head))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 9) + b"IDAT" + zlib.compress(b"")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("content, said", [
    (b"", "not an image"), (b"<html>", "not an image"), (png_that_claims(10000, 8000), "10000x8000 pixels"),
    (png_that_claims(100000, 100000), "10000000000 pixels"), (png_that_claims(20, 20), "not an image"),
])
def test_a_broken_or_boastful_image_is_named(tmp_path, content, said, workers):
    pytest.importorskip("torchvision")
    opts = options("imagefolder", write_images(tmp_path), workers=workers)
    data = load_data(opts, ALONE)
    (tmp_path / "train/dog/1.png").write_bytes(content)
    with pytest.raises(Exception) as caught:
        list(batches(data.train, ElasticSampler(data.train, 4), opts))
    assert type(caught.value).__name__ == "UserError" and len(str(caught.value).splitlines()) <= 3
    assert "train/dog/1.png" in str(caught.value) and said in str(caught.value)
    assert f"python -m common.data {tmp_path} --check" in str(caught.value)
    assert "--accept-data-change" in str(caught.value)


def test_all_broken_images_of_a_folder_are_found_at_once(tmp_path, capsys):
    pytest.importorskip("torchvision")
    root = write_images(tmp_path / "a")
    assert main([str(root), "--check"]) == 0
    assert capsys.readouterr().out == "12 of 12 images can be read\n"
    whole = (root / "val/cat/0.png").read_bytes()
    broken = {"train/cat/1.png": b"", "train/dog/2.png": whole[:len(whole) // 2],
              "val/cat/2.png": png_that_claims(10000, 8000)}
    for name, content in broken.items():
        (root / name).write_bytes(content)
    assert main([str(root), "--check"]) == 1
    *said, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == [f"{root}/{name}" for name in broken]
    assert last == "9 of 12 images can be read"
    assert main([str(tmp_path / "none"), "--check"]) == 2 and "none" in capsys.readouterr().err
    assert main([str(root)]) == 2 and "usage" in capsys.readouterr().err


@pytest.mark.parametrize("suffix, order", [("png", "<"), ("tif", "<"), ("tif", ">")])
def test_a_picture_of_16_bits_keeps_all_of_them_and_does_not_become_white(tmp_path, suffix, order):
    pytest.importorskip("torchvision")
    from PIL import Image
    write_images(tmp_path)
    grey = numpy.linspace(0, 65535, 240).astype(f"{order}u2").repeat(240).reshape(240, 240)
    Image.fromarray(grey).save(tmp_path / f"val/cat/5.{suffix}")
    x, = load("imagefolder", tmp_path, image_size=64).test.fetch([3])[0]
    std, mean = torch.tensor([0.229, 0.224, 0.225]), torch.tensor([0.485, 0.456, 0.406])
    x = x * std.view(3, 1, 1) + mean.view(3, 1, 1)
    assert x.shape == (3, 64, 64) and torch.allclose(x[0], x[2], atol=1e-6)
    assert x[0, 0, 0] < 0.1 and x[0, -1, -1] > 0.9 and (x[0, 1:, 5] > x[0, :-1, 5]).all()
    assert len(x[0, :, 5].unique()) == 64 and (x[0, :, 5].diff() - 1 / 73).abs().max() < 1e-3


@pytest.mark.parametrize("mode, value, said", [("I", 4095, "from 3 to 4095"), ("F", 4095, "from 3 to 4095"),
                                               ("F", 0.5, "from 0 to 0.5")])
def test_a_picture_of_32_bits_whose_black_and_white_are_not_known_is_refused(tmp_path, mode, value, said):
    pytest.importorskip("torchvision")
    from PIL import Image
    write_images(tmp_path)
    deep = Image.new(mode, (250, 240), 3 if value > 1 else 0)
    deep.putpixel((7, 7), 200)
    deep.save(tmp_path / "train/cat/5.tif")
    load("imagefolder", tmp_path).train.fetch([3])                  # in such a file, but of 8 bits
    deep.putpixel((7, 7), value)
    deep.save(tmp_path / "train/cat/5.tif")
    data = load("imagefolder", tmp_path)
    with pytest.raises(UserError, match=f"holds values of 32 bits {said}") as caught:
        data.train.fetch([3])
    assert caught.value.code == 2 and len(str(caught.value).splitlines()) == 3


def test_an_image_becomes_the_very_numbers_of_torchvisions_transforms(tmp_path):
    transforms = pytest.importorskip("torchvision").transforms
    from PIL import Image
    pixels = torch.randint(0, 256, (50, 60, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    theirs = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])
    image = Image.fromarray(pixels.numpy())
    assert torch.equal(normalized(image), theirs(image)) and normalized(image).is_contiguous()


def test_images_have_the_size_that_is_asked_for_and_folders_the_names(tmp_path):
    pytest.importorskip("torchvision")
    write_images(tmp_path)
    (tmp_path / "train").rename(tmp_path / "learn"), (tmp_path / "val").rename(tmp_path / "exam")
    data = load("imagefolder", tmp_path, image_size=32, train_folder="learn", val_folder="exam")
    assert data.sample_shape == (3, 32, 32) and (len(data.train), len(data.test)) == (6, 6)
    for split in (data.train, data.test):
        assert split.fetch([0, 5], 1, True)[0].shape == (2, 3, 32, 32)


def test_folders_that_are_no_dataset_are_refused(tmp_path):
    pytest.importorskip("torchvision")
    assert f"{tmp_path}/train" in refusal("imagefolder", tmp_path)
    (tmp_path / "train").mkdir()
    assert "class folder" in refusal("imagefolder", tmp_path)
    assert "only in one: cow, dog" in refusal("imagefolder",
                                               write_images(tmp_path / "a", val=("cat", "cow")))
    assert "no valid file" in refusal("imagefolder", write_images(tmp_path / "b", n=0))


# ---- a user's own ----

def mine(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text("import torch\nfrom torch.utils.data import *\n"
                    "class Squares(Dataset):\n"
                    " classes = ['even', 'odd']\n"
                    " def __init__(self, n): self.n = n\n"
                    " def __len__(self): return self.n\n"
                    " def __getitem__(self, i): return torch.full((2,), i * i, dtype=torch.float64), i % 2\n"
                    + text)
    return f"{path}:make"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_datasets_are_trained_on(tmp_path, workers):
    opts = options(mine(tmp_path, "def make(): return Squares(6), Squares(3)\n"), workers=workers)
    data = load_data(opts, ALONE)
    assert (data.classes, data.sample_shape, len(data.test)) == (2, (2,), 3)
    batch, = batches(data.train, ElasticSampler(data.train, 6), opts)
    assert sorted(batch.ids) == list(range(6)) and batch.x.dtype == torch.float32
    assert batch.x[:, 0].tolist() == [i * i for i in batch.ids]
    assert batch.y.tolist() == [i % 2 for i in batch.ids]


def test_the_fingerprint_of_a_users_dataset_sees_other_labels_and_contents_but_no_dice_and_no_last_bits(
        tmp_path):
    def mark(text):
        (folder := tmp_path / str(len(list(tmp_path.iterdir())))).mkdir()
        return load(mine(folder, text + "\ndef make(): return Squares(9), Squares(3)\n")).fingerprint

    plain = mark("")
    assert mark("") == plain != mark("Squares.__getitem__ = lambda self, i: (torch.full((2,), i * i + 1.0), "
                                     "i % 2)")
    assert mark("Squares.__getitem__ = lambda self, i: (torch.full((2,), i * i * (1 + 1e-6)), "
                "i % 2)") == plain
    assert mark("Squares.__getitem__ = lambda self, i: (torch.full((2,), float(i * i)), 1 - i % 2)") != plain
    dice = ("import random; own = random.Random()\nSquares.__getitem__ = lambda self, i: (torch.full((2,), "
            "own.random()), i % 2)")
    assert mark(dice) == mark(dice) != plain
    named = "Squares.fingerprint = 'mine'"
    assert mark(named) == "mine"


@pytest.mark.parametrize("text, shape, classes, vocab", [
    ("def make(): return tuple(random_split(Squares(9), [6, 3]))", (2,), 2, None),
    ("def make(opts): a = Squares(3); a.classes = opts.seed + 4; return a, a", (2,), 4, None),
    ("def make(): return (torch.zeros(4, 1, 3, 3), torch.arange(4)) * 2", (1, 3, 3), 4, None),
    ("def make(): return (torch.zeros(4, 5, requires_grad=True), torch.arange(4)) * 2", (5,), 4, None),
    ("def make(): a = TensorDataset(torch.zeros(4, 5), torch.arange(4)); return a, a", (5,), 4, None),
    ("def make(): return (torch.tensor([[1, 7]]), torch.tensor([2])) * 2", (2,), 3, 8),
    ("def make():\n a = Squares(3); del Squares.classes; a.targets = [0, 1, 6]\n return a, a", (2,), 7, None),
])
def test_a_users_function_may_return_what_is_at_hand(tmp_path, text, shape, classes, vocab):
    data = load(mine(tmp_path, text + "\n"))
    assert (data.sample_shape, data.classes, data.vocab) == (shape, classes, vocab)


def test_a_users_bytes_are_scaled_to_one(tmp_path):
    data = load(mine(tmp_path,
                     "def make(): return (torch.tensor([[0, 51, 255]]).byte(), torch.tensor([0])) * 2\n"))
    torch.testing.assert_close(data.train.fetch([0])[0], torch.tensor([[0, 0.2, 1]]))


ITERABLE = "class It(IterableDataset):\n def __iter__(self): return iter([(torch.ones(2), 0)])\n"


@pytest.mark.parametrize("text, said", [
    ("def make(): return 5", "returned (int)"), ("def make(): return Squares(3)", "returned (Squares)"),
    ("def make(): return Squares(3), Squares(0)", "test set is empty"),
    ("def make(): return Squares(0), Squares(3)", "training set is empty"),
    ("def make(): return iter([1]), iter([2])", "list_iterator"),
    ("def make(): return (torch.ones(0, 4).long(), torch.ones(0).long()) * 2", "training set is empty"),
    ("Squares.weights = [0.0] * 9\ndef make(): return Squares(9), Squares(3)", "not all 0"),
    ("Squares.groups = [4, 4]\ndef make(): return Squares(9), Squares(3)", "add up to that"),
    (ITERABLE + " def __len__(self): return 9\ndef make(): return It(), It()", "`groups`"),
    (ITERABLE + "def make(): return It(), Squares(3)", "__getitem__(i)"),
    ("def make(): raise KeyError('where')", "line 8: KeyError"),
])
def test_what_is_no_dataset_is_refused(tmp_path, text, said):
    assert said in refusal(mine(tmp_path, text + "\n"))


FLOATS = ("Squares.__getitem__ = lambda self, i: (torch.ones(2), {label})\ndef make(): return Squares(9), "
          "Squares(3)")
FETCH = """
class Fetch(Squares):
 in_memory, tokens, shape, vocab, fingerprint = True, 4, (4,), 9, 'mine'
 def fetch(self, ids, epoch=0, augment=False):
  y = torch.ones(len(ids), 4, dtype=torch.{dtype})
  y[[i for i, id in enumerate(ids) if id == {odd}], 2:] = -100
  return torch.ones(len(ids), 4, dtype=torch.int64), y
def make(): return Fetch(9), Fetch(3)
"""


@pytest.mark.parametrize("text, said", [
    (FLOATS.format(label="torch.tensor(3.7)"),
     "sample 0 is (Tensor, Tensor): label 3.7 is not a whole number"),
    (FLOATS.format(label="0.5 if i == 8 else 1.0"), "sample 8 is (Tensor, float): label 0.5"),
    (FLOATS.format(label="float('inf')"), "sample 0 is (Tensor, float)"),
    (FLOATS.format(label="i % 2").replace("torch.ones(2)", "torch.ones(2) * 1j"), "complex64"),
    ("def make():\n a = Squares(3); del Squares.classes; a.targets = [0.0, 1.5, 1.0]\n return a, a",
     "label 1.5"),
    ("def make(): return (torch.ones(4, 5), torch.tensor([0.5, 1, 2, 3])) * 2",
     "labels (4,), torch.float32 and torch.float32"),
    ("def make(): return (torch.ones(4, 5) * 1j, torch.arange(4)) * 2", "torch.complex64 and torch.int64"),
    (FETCH.format(dtype="int64", odd=0), "targets of torch.int64 from -100 on"),
    (FETCH.format(dtype="float32", odd=-1), "targets of torch.float32 from 1 on"),
])
def test_what_would_be_cut_off_or_counted_though_it_is_padding_is_refused_at_the_start(tmp_path, text, said):
    assert said in refusal(mine(tmp_path, text + "\n"))


def test_a_fetch_of_ones_own_needs_a_fingerprint_and_no_other_attribute(tmp_path):
    text = FETCH.format(dtype="int64", odd=-1) + "del Fetch.in_memory, Fetch.tokens, Fetch.shape\n"
    data = load(mine(tmp_path, text))
    assert (data.sample_shape, data.train.tokens, data.train.in_memory) == ((4,), 4, True)
    (folder := tmp_path / "a").mkdir()
    assert len(load(mine(folder, text.replace("(Squares)", "") + "Fetch.__init__ = Squares.__init__\n"
                         "Fetch.__len__ = Squares.__len__\n")).train) == 9, "no __getitem__"
    (folder := tmp_path / "b").mkdir()
    assert "no `fingerprint`" in refusal(mine(folder, text + "del Fetch.fingerprint\n"))


def test_only_a_model_that_needs_the_number_of_classes_asks_for_it(tmp_path):
    data = load(mine(tmp_path, "del Squares.classes\ndef make(): return random_split(Squares(9), [6, 3])\n"))
    assert data.known_classes is None and len(data.train.fetch([0, 1])[1]) == 2
    with pytest.raises(UserError, match="attribute `classes`"):
        build_model(Options(model="mlp"), data)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("text, said", [(FLOATS.format(label="1.25 if i == 3 else 1.0"), "label 1.25"),
                                        (FETCH.format(dtype="int64", odd=5), "-100")])
def test_what_the_first_samples_do_not_show_is_refused_when_it_comes(tmp_path, text, said, workers):
    opts = options(mine(tmp_path, text + "\n"), workers=workers)
    data = load_data(opts, ALONE)
    with pytest.raises(UserError, match=said) as caught:
        list(batches(data.train, ElasticSampler(data.train, 4), opts))
    assert caught.value.code == 2 and len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_of_whole_numbers_and_fractions_loses_none_of_them(tmp_path, workers):
    text = "Squares.__getitem__ = lambda self, i: (torch.tensor([i] if i % 3 else [i + 0.5]), 0)\n"
    opts = options(mine(tmp_path, text + "def make(): return Squares(9), Squares(3)\n"), workers=workers)
    data = load_data(opts, ALONE)
    for batch in batches(data.train, ElasticSampler(data.train, 4), opts):
        assert batch.x.flatten().tolist() == [id + (id % 3 == 0) / 2 for id in batch.ids]


def test_labels_that_are_whole_numbers_of_another_type_count_as_before(tmp_path):
    for number, label in enumerate(("float(i % 2)", "torch.tensor([i % 2])", "str(i % 2)", "bool(i % 2)")):
        (folder := tmp_path / str(number)).mkdir()
        data = load(mine(folder, FLOATS.format(label=label) + "\n"))
        assert data.train.fetch([0, 1, 2])[1].tolist() == [0, 1, 0]
    whole = ("def make():\n a = Squares(3); del Squares.classes; a.targets = torch.tensor([0.0, 4.0])\n "
             "return a, a\n")
    assert load(mine(tmp_path, whole)).classes == 5


# ---- downloads ----

def fake_torchvision(monkeypatch, n=20, error=None):
    datasets = pytest.importorskip("torchvision").datasets
    calls = []

    def download(root, train, download):
        calls.append(root)
        write_mnist(Path(root), n)
        if error and not train:
            raise error

    monkeypatch.setattr(datasets, "MNIST", download)
    return calls


def test_one_rank_of_a_node_downloads_and_the_others_wait_for_it(tmp_path, monkeypatch):
    calls, gate, found = fake_torchvision(monkeypatch), threading.Barrier(3), {}

    @contextmanager
    def all_or_none(name):
        yield
        gate.wait(60)

    def rank(number):
        world = SimpleNamespace(local_rank=number, all_or_none=all_or_none)
        found[number] = load_data(options("mnist", tmp_path / "data", download=True), world)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 2 and len({data.fingerprint for data in found.values()}) == 1 and len(found) == 3
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["MNIST"]  # nothing is left aside


def test_what_is_there_and_whole_is_not_downloaded_and_what_is_broken_is(tmp_path, monkeypatch):
    calls, world = fake_torchvision(monkeypatch), SimpleNamespace(local_rank=0, all_or_none=nullcontext)
    whole = load("mnist", write_mnist(tmp_path)).fingerprint
    assert load_data(options("mnist", tmp_path, download=True), world).fingerprint == whole and not calls
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"half")
    assert load_data(options("mnist", tmp_path, download=True), world).fingerprint == whole and calls


def test_a_failed_download_leaves_nobody_waiting_and_nothing_behind(tmp_path, monkeypatch):
    fake_torchvision(monkeypatch, error=OSError("no route to host"))
    said = fork_ranks(3, lambda world: refusal("mnist", tmp_path, world, download=True))
    assert said == [f"dataset mnist cannot be downloaded to {tmp_path}\nno route to host"] * 3
    assert not list(tmp_path.iterdir())


def test_a_download_of_what_is_drawn_is_refused():
    assert "nothing to download" in refusal("digits", download=True)
