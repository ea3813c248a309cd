"""The datasets of this project: their bits, their files, what is told of files that are none."""

import math
import os
import tracemalloc
from types import SimpleNamespace
from unittest import mock

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


def test_random_has_the_sizes_that_are_asked_for():
    data = load("random:40x10")
    assert (*data.sample_shape, len(data.train), len(data.test), data.classes) == (10, 40, 40, 2)


# ---- MNIST, Fashion-MNIST, CIFAR-10 ----
@pytest.mark.parametrize(
    "name, reader, shape",
    [
        ("mnist", "MNIST", (28, 28)),
        ("fashion-mnist", "FashionMNIST", (28, 28)),
        ("cifar10", "CIFAR10", (32, 32, 3)),
    ],
)
def test_small_pictures_are_what_torchvision_reads_and_those_of_things_are_augmented(
    tmp_path, monkeypatch, name, reader, shape
):
    datasets = pytest.importorskip("torchvision.datasets")
    pixels = np.arange(3 * math.prod(shape)).astype(np.uint8).reshape(3, *shape)

    def read(folder, train, download):
        count = 3 if train else 1
        return SimpleNamespace(data=pixels[:count], targets=[7, 3, 0][:count])

    monkeypatch.setattr(datasets, reader, read)
    data = load(name, tmp_path)
    assert (data.train.y.tolist(), data.test.y.tolist(), data.classes) == ([7, 3, 0], [7], 10)
    assert data.train.x[1, -1].tolist() == pixels.reshape(3, *shape[:2], -1)[1, :, :, -1].tolist()
    plain, moved = (data.train.fetch([0, 1, 2], 0, augment)[0] for augment in (False, True))
    assert torch.equal(plain, moved) == (name == "mnist")


def test_a_pickled_cifar_that_is_not_the_published_one_is_never_opened(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_text(f"cos\nsystem\n(S'touch {tmp_path}/canary'\ntR.")
    with refusal("corrupted"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "canary").exists()


def test_one_rank_at_a_time_downloads_what_is_not_there_and_a_failed_download_is_told(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr(datasets, "MNIST", mock.Mock(side_effect=TypeError))
    with refusal("TypeError"):
        load("mnist", tmp_path, download=True)

    def read(folder, train, download):
        (tmp_path / "busy").touch(exist_ok=False)
        pixels = torch.zeros(2, 28, 28).byte()
        (tmp_path / "busy").unlink()
        return SimpleNamespace(data=pixels, targets=[0, 1])

    monkeypatch.setattr(datasets, "MNIST", read)
    fork_ranks(3, lambda world: load("mnist", tmp_path, download=True).fingerprint)


# ---- pictures in folders ----
def write_images(root, n=3):
    image = pytest.importorskip("PIL.Image")
    for name, red in (("train/cat", 0), ("train/dog", 60), ("val/cat", 0), ("val/dog", 60)):
        (root / name).mkdir(parents=True)
        for number in range(n):
            picture = image.new("RGB", (260 + number, 240 - number), (red, 30 * number, 200))
            picture.paste(image.linear_gradient("L"))
            picture.save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize("augment, moves", [("auto", True), ("none", False)])
def test_images_are_augmented_in_training_alone_and_only_if_asked_for(tmp_path, augment, moves):
    data = load("imagefolder", write_images(tmp_path), augment=augment, image_size=32)
    assert (*data.sample_shape, data.classes, len(data.test)) == (3, 32, 32, 2, 6)
    for split, is_changed in ((data.train, moves), (data.test, False)):
        assert torch.equal(split.fetch([0], 0)[0], split.fetch([0], 1)[0]) != is_changed


def test_the_fingerprint_of_a_folder_sees_names_and_sizes(tmp_path):
    write_images(tmp_path)
    marks = []

    def mark():
        marks.append(load("imagefolder", tmp_path).fingerprint)

    mark()
    mark()
    (tmp_path / "val/cat/2.png").rename(tmp_path / "val/cat/3.png")
    mark()
    with (tmp_path / "train/dog/1.png").open("ab") as file:
        file.write(b"x")
    os.link(tmp_path / "val/cat/0.png", os.fsencode(tmp_path / "val/cat") + b"/\xe9t\xe9.png")  # any bytes
    mark()
    assert marks[0] == marks[1] and len({*marks}) == 3


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


@pytest.mark.parametrize(
    "size, vocab, dtype",
    [*((size, 2000, "<u2") for size in (9, 200, 1000, 1001, 1007)), (1008, 2**16 + 1, "<u4")],
)
def test_an_epoch_reads_every_token_once_but_for_fewer_than_a_window_and_its_label_is_the_next_one(
    tmp_path, size, vocab, dtype
):
    data = tokens(write_tokens(tmp_path, train=size, val=size, vocab=2000, dtype=dtype), vocab)
    for epoch, augment in ((0, False), (0, True), (7, True)):
        x, y = data.train.fetch(range(len(data.train)), epoch, augment)
        counts = x.flatten().bincount(minlength=size)
        assert counts.min() == 1 and counts.max() <= 2 and (counts == 2).sum() == -size % 8
        assert torch.equal(y, (x + 1) % size)
    x, y = data.test.fetch(range(len(data.test)))  # no ring: what is left is left out
    assert x.flatten().tolist() == [*range((size - 1) // 8 * 8)] and torch.equal(y, x + 1)
    x[:] = 0  # a task may mask words in place
    assert y.all() and data.vocab == data.classes == vocab


def test_in_training_the_windows_begin_elsewhere_in_each_epoch(tmp_path):
    def begin(split, epoch):
        return int(split.fetch([0], epoch, True)[0][0, 0])

    data = tokens(write_tokens(tmp_path, train=1001, vocab=2000), 2000)
    begins = [begin(data.train, epoch) for epoch in range(40)]
    assert {place % 8 for place in begins} == {*range(8)} and len({*begins}) > 30
    assert begin(tokens(tmp_path, 2000).train, 7) == begins[7] and begin(data.test, 7) == 0


def test_a_file_of_tokens_is_never_copied_into_memory(tmp_path):
    folder = write_tokens(tmp_path)
    os.truncate(folder / "train.bin", 2**33)  # 8 GiB of zeros, and a hole on the disk
    tracemalloc.start()
    try:
        data = tokens(folder)
        data.train.fetch([0, len(data.train) - 1, len(data.train) // 2], 3, True)
        assert tracemalloc.get_traced_memory()[1] < 2**27 and len(data.train) == 2**32 // 8
    finally:
        tracemalloc.stop()


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


# ---- several kinds ----
@pytest.fixture
def files(tmp_path):
    """What each kind of files is read from."""
    (tmp_path / "text").write_bytes(bytes(range(200)))
    return write_images(write_tokens(tmp_path))


def test_a_text_is_its_bytes_of_which_the_last_tenth_is_the_test_set(files):
    data = load("text:8", files / "text")
    assert {*range(180)} == {*data.train.fetch(range(len(data.train)))[0].flatten().tolist()}
    assert data.test.fetch([0, 1])[0].flatten().tolist() == [*range(180, 196)] and data.vocab == 256


@pytest.mark.parametrize(
    "name, spoil, said",
    [
        ("imagefolder", lambda at: (at / "train").rename(at / "other"), "/train"),
        ("imagefolder", lambda at: (at / "val/dog").rename(at / "val/cow"), "only in one: cow, dog"),
        ("tokens:8", lambda at: write_tokens(at, val=8), "empty set"),
        ("tokens:8", lambda at: (at / "val.bin").unlink(), "val.bin"),
        ("text:8", id, "Is a directory: .*\n.*of text it is the file itself"),
        ("mnist", id, "its files are to be in --data-dir /(.|\n)*--download"),
    ],
)
def test_files_that_cannot_be_read_are_told_in_three_lines(files, name, spoil, said):
    spoil(files)
    with refusal(said):
        load(name, files, vocab_size=300)


@pytest.mark.parametrize("name", ["digits", "random:40x3", "text:16", "tokens:8", "imagefolder"])
def test_what_is_opened_before_a_fork_is_the_same_data_and_is_not_opened_again(files, monkeypatch, name):
    opts = options(name, files / "text" if name == "text:16" else files, vocab_size=300)
    fresh = load_data(opts)
    with mock.patch.dict(PRELOADED):
        preload(opts)
        monkeypatch.setattr("common.data.loading.DATASETS", {})  # opened again, it would not be found
        assert load_data(opts).fingerprint == fresh.fingerprint
