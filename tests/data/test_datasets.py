import gzip
import hashlib
import struct
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import fork_ranks

from common.data import batches, load_data, preload
from common.data.datasets import PRELOADED
from common.errors import UserError
from common.models import build_model
from common.options import Options
from common.sampler import ElasticSampler

ALONE = SimpleNamespace(rank=0, size=1, local_rank=0, local_size=1, all_or_none=nullcontext,
                        once_per_node=lambda name, find: find())


def options(dataset, data_dir="nowhere", **changed):
    return Options(dataset=dataset, data_dir=str(data_dir), **{"workers": 0, "device": "cpu"} | changed)


def load(dataset, data_dir="nowhere", **changed):
    return load_data(options(dataset, data_dir, **changed), ALONE)


def refusal(dataset, data_dir="nowhere", world=ALONE, **changed):
    with pytest.raises(UserError) as caught:
        load_data(options(dataset, data_dir, **changed), world)
    assert caught.value.code == 2 and len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def accuracy_after_each_epoch(dataset, model, epochs, data_dir="nowhere", most=None):
    """Trains as train_ddp.py does; stops after `most` steps, if given."""
    opts = options(dataset, data_dir, model=model)
    data = load_data(opts, ALONE)
    net, order, found, steps = build_model(opts, data), ElasticSampler(data.train, 64), [], 0
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for epoch in range(epochs):
            order.set_epoch(epoch)
            for batch in batches(data.train, order, opts):
                if steps == most:
                    break
                loss = F.cross_entropy(net.train()(batch.x), batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1
            x, y = data.test.fetch(range(len(data.test)))
            with torch.no_grad():
                found.append((net.eval()(x).argmax(1) == y).float().mean().item())
    return found


# ---- drawn by a program ----

def test_digits_are_the_same_to_the_bit_on_every_machine():
    data = load("digits")
    assert (len(data.train), len(data.test), data.classes, data.sample_shape) == (12000, 2000, 10,
                                                                                  (1, 28, 28))
    digest = hashlib.sha256(repr((10, (1, 28, 28), 12000, 2000)).encode())
    for tensor in (data.train.x, data.train.y, data.test.x, data.test.y):
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest().startswith("4528a280dc34")
    assert data.train.y.bincount().tolist() == [1200] * 10 and data.test.y.bincount().tolist() == [200] * 10
    x, _ = data.train.fetch(range(2000))
    assert abs(x.mean()) < 0.05 and 0.95 < x.std() < 1.05


def test_net_learns_digits_in_two_epochs_but_not_in_a_hundred_steps():
    assert accuracy_after_each_epoch("digits", "net", 2)[-1] > 0.97
    assert 0.5 < accuracy_after_each_epoch("digits", "net", 1, most=100)[-1] < 0.95


def test_sentiment_is_the_tutorials_two_sentences():
    data = load("sentiment")
    for split in (data.train, data.test):
        x, y = split.fetch([0, 1], 0, True)
        # "This" is not "this": <UNK>
        assert x.tolist() == [[2, 3, 4, 5], [1, 5, 6, 7]] and y.tolist() == [1, 0]
    assert (data.vocab, data.classes, data.sample_shape) == (8, 2, (4,))


@pytest.mark.parametrize("name, shape, n", [("random", (5,), 100), ("random:100x10", (10,), 100),
                                            ("random:1x1", (1,), 1)])
def test_random_has_the_tutorials_sizes_or_those_asked_for(name, shape, n):
    data = load(name)
    assert data.sample_shape == shape and len(data.train) == len(data.test) == n and data.classes == 2


# ---- IDX files ----

def idx(*shape, fill=None, kind=8):
    count = 1
    for side in shape:
        count *= side
    content = bytes(i % 10 for i in range(count)) if fill is None else fill
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + content


def write_mnist(root, n=20, folder="MNIST", packed=False, **changed):
    raw = root / folder / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    files = {"train-images-idx3-ubyte": idx(n, 28, 28), "train-labels-idx1-ubyte": idx(n),
             "t10k-images-idx3-ubyte": idx(5, 28, 28), "t10k-labels-idx1-ubyte": idx(5)}
    for name, content in files.items():
        content = changed.get(name.replace("-", "_"), content)
        if content is not None:
            (raw / (name + packed * ".gz")).write_bytes(gzip.compress(content) if packed else content)
    return root


@pytest.mark.parametrize("name, folder", [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files_are_read_packed_or_not_to_the_same_data(tmp_path, name, folder):
    plain = load(name, write_mnist(tmp_path / "a", folder=folder))
    packed = load(name, write_mnist(tmp_path / "b", folder=folder, packed=True))
    assert plain.fingerprint == packed.fingerprint and plain.sample_shape == (1, 28,
                                                                              28) and plain.classes == 10
    assert plain.train.x.flatten()[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (len(plain.train), len(plain.test)) == (20, 5)


@pytest.mark.parametrize("content, said", [
    (None, "No such file"), (b"", "struct.error"), (idx(20, 28, 28)[:-1], "is invalid for input"),
    (idx(19, 28, 28), "a label for each sample"), (idx(0, 28, 28), "a label for each sample")])
def test_files_that_are_no_mnist_are_said_in_three_lines(tmp_path, content, said):
    write_mnist(tmp_path, train_images_idx3_ubyte=content)
    assert said.removeprefix("struct.") in refusal("mnist", tmp_path)


# ---- CIFAR-10 ----

def test_cifar_is_what_torchvision_reads_and_is_augmented(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    assert "not found" in refusal("cifar10", tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    pixels = np.arange(6 * 32 * 32 * 3, dtype=np.uint8).reshape(6, 32, 32, 3)
    monkeypatch.setattr(datasets, "CIFAR10", lambda root, train: SimpleNamespace(
        data=pixels[:4] if train else pixels[4:], targets=[7, 7, 3, 0] if train else [9, 1]))
    data = load("cifar10", tmp_path)
    assert data.train.y.tolist() == [7, 7, 3, 0] and data.test.y.tolist() == [9, 1] and data.classes == 10
    assert data.train.x[1, 2].tolist() == pixels[1, :, :, 2].tolist()
    assert not torch.equal(data.train.fetch([1], 0, True)[0], data.train.fetch([1], 0, False)[0])


def test_a_pickled_cifar_that_is_not_the_published_one_is_never_opened(tmp_path):
    pytest.importorskip("torchvision")
    folder, canary = tmp_path / "cifar-10-batches-py", tmp_path / "canary"
    folder.mkdir()
    for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(f"cos\nsystem\n(S'touch {canary}'\ntR.".encode())
    assert "corrupted" in refusal("cifar10", tmp_path) and not canary.exists()


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
    calls = fake_torchvision(monkeypatch)
    gate = threading.Barrier(3)
    marks = {}

    @contextmanager
    def all_or_none(name):
        yield
        gate.wait(60)

    def rank(number):
        world = SimpleNamespace(local_rank=number, all_or_none=all_or_none, size=1)
        marks[number] = load_data(options("mnist", tmp_path / "data", download=True), world).fingerprint

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(calls) == 2 and len(set(marks.values())) == 1 and len(marks) == 3
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["MNIST"]  # nothing is left aside


def test_what_is_there_and_whole_is_not_downloaded_and_what_is_broken_is(tmp_path, monkeypatch):
    calls = fake_torchvision(monkeypatch)
    whole = load("mnist", write_mnist(tmp_path)).fingerprint
    assert load("mnist", tmp_path, download=True).fingerprint == whole and not calls
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"half")
    assert load("mnist", tmp_path, download=True).fingerprint == whole and calls


def test_a_failed_download_leaves_nobody_waiting_and_nothing_behind(tmp_path, monkeypatch):
    fake_torchvision(monkeypatch, error=ValueError("no such mirror"))
    for words in fork_ranks(3, lambda world: refusal("mnist", tmp_path, world, download=True)):
        assert f"cannot be downloaded to {tmp_path}" in words and "no such mirror" in words
    assert not list(tmp_path.iterdir())


# ---- opened before the processes are forked ----
@pytest.mark.parametrize("name", ["digits", "mnist", "random:40x3", "text:16", "tokens:8", "imagefolder"])
def test_what_is_opened_before_a_fork_is_the_same_data_and_is_not_opened_again(tmp_path, monkeypatch, name):
    from test_own_data import write_images
    from test_tokens import write
    write_mnist(tmp_path)
    write_images(tmp_path)
    write(tmp_path)
    (tmp_path / "text").write_bytes(bytes(range(200)))
    folder = tmp_path / "text" if name == "text:16" else tmp_path
    fresh = load(name, folder)
    preload(options(name, folder))
    try:
        monkeypatch.setattr("common.data.datasets.DATASETS", {})
        data = load(name, folder)
    finally:
        PRELOADED.clear()
    assert data.fingerprint == fresh.fingerprint and len(data.train) == len(fresh.train)
    ours = data.train.fetch([0, 3], 1, True)
    assert all(map(torch.equal, ours, fresh.train.fetch([0, 3], 1, True)))


def test_drawn_data_is_known_by_its_formula():
    marks = [load(name).fingerprint for name in ("digits", "digits", "random:9x2", "random:9x3", "sentiment")]
    assert len(set(marks)) == 4 and marks[0] == marks[1]
