"""The datasets of this project: their bits, their files, what is told of files that are none."""

import os
import struct
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import fork_ranks
from refusals import refusal

from common.data import PRELOADED, load_data
from common.extras.datasets import preload
from common.options import Options


def options(dataset, data_dir="nowhere", **changed):
    return Options(dataset=dataset, data_dir=str(data_dir), **{"workers": 0, "device": "cpu"} | changed)


def load(dataset, data_dir="nowhere", **changed):
    return load_data(options(dataset, data_dir, **changed))


# ---- drawn by a program ----
def test_digits_are_the_same_to_the_bit_on_every_machine():
    data = load("digits")
    assert (len(data.train), len(data.test), data.classes) == (12000, 2000, 10)
    assert data.fingerprint.startswith("2bae5bbeef22")  # a SHA-256 of all its bits
    assert data.train.y.bincount().tolist() == [1200] * 10 and data.test.y.bincount().tolist() == [200] * 10
    x, _ = data.train.fetch(range(2000))
    assert abs(x.mean()) < 0.05 and 0.95 < x.std() < 1.05


@pytest.mark.parametrize(
    "name, shape, n", [("random", (5,), 100), ("random:100x10", (10,), 100), ("random:1x1", (1,), 1)]
)
def test_random_has_the_tutorials_sizes_or_those_asked_for(name, shape, n):
    data = load(name)
    assert data.sample_shape == shape and len(data.train) == len(data.test) == n and data.classes == 2


# ---- MNIST, Fashion-MNIST, CIFAR-10 ----
LABELS = "MNIST/raw/train-labels-idx1-ubyte"


def idx(*shape):
    content = bytes(i % 10 for i in range(int(np.prod(shape))))
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + content


def write_mnist(root, folder="MNIST"):
    raw = root / folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, n in (("train", 20), ("t10k", 5)):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx(n, 28, 28))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(n))
    return root


@pytest.mark.parametrize("name, folder", [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files_are_read(tmp_path, name, folder):
    data = load(name, write_mnist(tmp_path, folder))
    assert data.sample_shape == (1, 28, 28) and data.classes == 10
    assert data.train.x.flatten()[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (len(data.train), len(data.test)) == (20, 5)


def test_cifar_is_what_torchvision_reads_and_is_augmented(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    pixels = np.arange(6 * 32 * 32 * 3, dtype=np.uint8).reshape(6, 32, 32, 3)
    monkeypatch.setattr(
        datasets,
        "CIFAR10",
        lambda root, train, download: SimpleNamespace(
            data=pixels[:4] if train else pixels[4:], targets=[7, 7, 3, 0] if train else [9, 1]
        ),
    )
    data = load("cifar10", tmp_path)
    assert data.train.y.tolist() == [7, 7, 3, 0] and data.test.y.tolist() == [9, 1] and data.classes == 10
    assert data.train.x[1, 2].tolist() == pixels[1, :, :, 2].tolist()
    assert not torch.equal(data.train.fetch([1], 0, True)[0], data.train.fetch([1], 0, False)[0])


def test_a_pickled_cifar_that_is_not_the_published_one_is_never_opened(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "cifar-10-batches-py").mkdir()
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]:
        command = f"cos\nsystem\n(S'touch {canary}'\ntR."
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(command.encode())
    with refusal("corrupted"):
        load("cifar10", tmp_path)
    assert not canary.exists()


def test_one_rank_at_a_time_downloads_what_is_not_there_and_a_failed_download_is_told(tmp_path, monkeypatch):
    mnist = pytest.importorskip("torchvision.datasets.mnist")
    monkeypatch.setattr(mnist, "download_and_extract_archive", None)
    with refusal("--download"):
        load("mnist", tmp_path)
    with refusal("TypeError"):
        load("mnist", tmp_path, download=True)
    marks = tmp_path / "marks"
    marks.mkdir()

    def fetch(url, download_root, filename, **_):
        (marks / filename).touch(exist_ok=False)
        write_mnist(Path(download_root).parents[1])

    monkeypatch.setattr(mnist, "download_and_extract_archive", fetch)

    def rank(world):
        return load("mnist", tmp_path, download=True).fingerprint

    assert len({*fork_ranks(3, rank), *fork_ranks(1, rank)}) == 1 and len(list(marks.iterdir())) == 4


# ---- pictures in folders ----
def write_images(root, n=3):
    image = pytest.importorskip("PIL.Image")
    for name, red in (("train/cat", 0), ("train/dog", 60), ("val/cat", 0), ("val/dog", 60)):
        (root / name).mkdir(parents=True)
        for number in range(n):
            picture = image.new("RGB", (260 + number, 240 - number), (red, 30 * number, 200))
            picture.save(root / name / f"{number}.png")
    return root


def test_images_are_augmented_in_training_alone_and_only_if_asked_for(tmp_path):
    from PIL import Image

    write_images(tmp_path)
    grey = np.arange(62500, dtype=np.uint32).astype("u1").reshape(250, 250)
    Image.fromarray(grey).save(tmp_path / "train/cat/0.png")
    for augment, changed in (("auto", True), ("none", False)):
        data = load("imagefolder", tmp_path, augment=augment, image_size=32)
        assert (data.sample_shape, data.classes, len(data.test)) == ((3, 32, 32), 2, 6)
        for split, moves in ((data.train, changed), (data.test, False)):
            assert torch.equal(split.fetch([0], 0)[0], split.fetch([0], 1)[0]) is not moves


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


def test_a_picture_of_16_bits_is_refused_because_in_8_it_would_be_white(tmp_path):
    from PIL import Image

    data = load("imagefolder", write_images(tmp_path))
    Image.fromarray(np.full((9, 9), 999, "u2")).save(tmp_path / "train/cat/0.png")
    with refusal("0.png is not an image .*mode I"):
        data.train.fetch([0])


# ---- tokens and text ----
def write_tokens(folder, train=1000, val=100, vocab=300, dtype="<u2"):
    """Tokens that count up from 0, modulo the vocabulary."""
    folder.mkdir(exist_ok=True)
    for name, size in (("train", train), ("val", val)):
        (np.arange(size) % vocab).astype(dtype).tofile(folder / f"{name}.bin")
    return folder


def tokens(folder, vocab=300, length=8):
    return load(f"tokens:{length}", folder, vocab_size=vocab)


@pytest.mark.parametrize("vocab, dtype", [(5000, "<u2"), (2**16 + 1, "<u4")])
def test_windows_follow_each_other_and_each_label_is_the_token_that_comes_next(tmp_path, vocab, dtype):
    data = tokens(write_tokens(tmp_path, train=1000, val=101, vocab=5000, dtype=dtype), vocab)
    for split, count in ((data.train, 1000), (data.test, 96)):
        x, y = split.fetch(range(len(split)))
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape
        assert x.flatten().tolist() == list(range(count)) and torch.equal(y, (x + 1) % 1000)
        x[:] = 0  # a task may mask words in place
        assert y.any()
    assert (data.vocab, data.classes, data.sample_shape, len(data.test)) == (vocab, vocab, (8,), 12)


@pytest.mark.parametrize("size", [9, 200, 1000, 1001, 1007, 1008])
def test_an_epoch_reads_every_token_once_but_for_fewer_than_a_window_that_it_reads_twice(tmp_path, size):
    data = tokens(write_tokens(tmp_path, train=size, vocab=2000), 2000)
    for epoch, augment in ((0, False), (0, True), (7, True)):
        x, y = data.train.fetch(range(len(data.train)), epoch, augment)
        counts = x.flatten().bincount(minlength=size)
        assert counts.min() == 1 and counts.max() <= 2 and (counts == 2).sum() == -size % 8
        assert torch.equal(y, (x + 1) % size)


def test_in_training_the_windows_begin_elsewhere_in_each_epoch(tmp_path):
    data = tokens(write_tokens(tmp_path, train=1001, vocab=2000), 2000)
    begins = {int(data.train.fetch([0], epoch, True)[0][0, 0]) for epoch in range(40)}
    assert {begin % 8 for begin in begins} == set(range(8)) and len(begins) > 30
    assert torch.equal(data.train.fetch([3], 7, True)[0], tokens(tmp_path, 2000).train.fetch([3], 7, True)[0])
    assert torch.equal(data.test.fetch([3], 7, False)[0], data.test.fetch([3], 8, False)[0])


def test_a_file_of_tokens_is_never_copied_into_memory(tmp_path):
    folder = write_tokens(tmp_path, val=2000)
    with open(folder / "train.bin", "r+b") as file:
        file.truncate(2**33)  # 8 GiB of zeros, and a hole on the disk
    tracemalloc.start()
    try:
        data = tokens(folder, length=1024)
        x, _ = data.train.fetch([0, len(data.train) - 1, len(data.train) // 2], 3, True)
        assert tracemalloc.get_traced_memory()[1] < 2**27 and len(data.train) == 2**32 // 1024
    finally:
        tracemalloc.stop()
    assert x.shape == (3, 1024)


def test_a_token_beyond_the_vocabulary_is_named_when_it_is_read(tmp_path):
    with refusal("--vocab-size"):
        load("tokens:8", write_tokens(tmp_path))
    data = tokens(tmp_path, 299)
    with refusal("holds token 299"):
        data.train.fetch([299 // 8])


def test_a_changed_token_or_length_changes_the_fingerprint_and_another_folder_does_not(tmp_path):
    marks = {tokens(write_tokens(tmp_path / name, train=90_000)).fingerprint for name in ("a", "b")}
    assert len(marks) == 1
    marks.add(tokens(tmp_path / "a", length=9).fingerprint)
    np.memmap(tmp_path / "a/train.bin", "<u2", "r+")[44_444] ^= 1
    marks.add(tokens(tmp_path / "a").fingerprint)
    assert len(marks) == 3


def test_a_text_is_its_bytes_of_which_the_last_tenth_is_the_test_set(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    data = load("text:8", tmp_path / "text")
    trained, tested = (
        split.fetch(range(len(split)))[0].unique().tolist() for split in (data.train, data.test)
    )
    assert trained == [*range(180)] and tested == [*range(180, 196)]
    assert data.classes == data.vocab == 256 and data.sample_shape == (8,)


# ---- all kinds ----
@pytest.fixture
def files(tmp_path):
    """What each kind of files is read from."""
    (tmp_path / "text").write_bytes(bytes(range(200)))
    return write_images(write_tokens(write_mnist(tmp_path)))


@pytest.mark.parametrize(
    "name, spoil, said",
    [
        ("mnist", lambda at: (at / LABELS).write_bytes(b""), "dataset mnist"),
        ("mnist", lambda at: (at / LABELS).write_bytes(idx(19)), "dataset mnist"),
        ("imagefolder", lambda at: (at / "train").rename(at / "other"), "/train"),
        ("imagefolder", lambda at: (at / "val/dog").rename(at / "val/cow"), "only in one: cow, dog"),
        ("tokens:8", lambda at: write_tokens(at, val=8), "empty set"),
        ("tokens:8", lambda at: (at / "train.bin").write_bytes(b"123"), "multiple of the data-type size"),
        ("tokens:8", lambda at: (at / "val.bin").unlink(), "val.bin"),
        ("text:8", id, "Is a directory: .*\n.*of text it is the file itself"),
        ("mnist", lambda at: (at / "MNIST").rename(at / "other"), "its files are to be in --data-dir /"),
    ],
)
def test_files_that_cannot_be_read_are_told_in_three_lines(files, name, spoil, said):
    spoil(files)
    with refusal(said):
        load(name, files, vocab_size=300)


@pytest.mark.parametrize("name", ["digits", "mnist", "random:40x3", "text:16", "tokens:8", "imagefolder"])
def test_what_is_opened_before_a_fork_is_the_same_data_and_is_not_opened_again(files, monkeypatch, name):
    opts = options(name, files / "text" if name == "text:16" else files, vocab_size=300)
    fresh = load_data(opts)
    preload(opts)
    try:
        monkeypatch.setattr("common.data.loading.DATASETS", {})  # opened again, it would not be found
        data = load_data(opts)
    finally:
        PRELOADED.clear()
    assert data.fingerprint == fresh.fingerprint and len(data.train) == len(fresh.train)
    assert all(map(torch.equal, data.train.fetch([0, 3], 1, True), fresh.train.fetch([0, 3], 1, True)))


def test_a_fork_makes_its_threads_before_two_ask_for_them(monkeypatch):
    """Torch makes their pool anew without a lock: ranks of stages aborted now and then."""
    made = []

    def made_in_a_fork():
        child = os.fork()
        if not child:
            os._exit(len(made))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", made.append)
        before = made_in_a_fork()
    preload(Options(dataset="random:8x2"))
    PRELOADED.clear()
    made.clear()
    monkeypatch.setattr(torch, "set_num_threads", made.append)
    assert made_in_a_fork() == before + 1
