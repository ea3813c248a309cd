import gzip
import struct
import tracemalloc
import zlib
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.data import batches, load_data
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
    assert data.fingerprint.startswith("4528a280dc34")
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


def test_lstm_learns_the_large_sentiment():
    assert accuracy_after_each_epoch("sentiment-large", "lstm", 4)[-1] > 0.95
    data = load("sentiment-large")
    lengths = (data.train.x > 0).sum(1)
    assert lengths.min() <= 4 and lengths.max() >= 11 and (data.train.x[:, -1] > 0).all()


@pytest.mark.parametrize("name, shape, n", [("random", (5,), 100), ("random:100x10", (10,), 100),
                                            ("random:1x1", (1,), 1)])
def test_random_has_the_tutorials_sizes_or_those_asked_for(name, shape, n):
    data = load(name)
    assert data.sample_shape == shape and len(data.train) == len(data.test) == n and data.classes == 2


@pytest.mark.parametrize("size", ["0x5", "5", "5x0", "-1x5", "axb", "1x2x3", "99999999x99999999"])
def test_a_size_that_is_none_is_refused(size):
    assert "random:100x10" in refusal(f"random:{size}")


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


IMAGES, LABELS = "train_images_idx3_ubyte", "train_labels_idx1_ubyte"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name, content, said", [
    (IMAGES, None, "does not exist"), (IMAGES, b"", "no IDX"), (IMAGES, idx(20, 28, 28)[:15], "no IDX"),
    (IMAGES, idx(20), "no IDX"), (IMAGES, idx(20, 28, 28, kind=13), "no IDX"),
    (IMAGES, b"<html>no</html>", "no IDX"),
    (IMAGES, idx(20, 28, 28)[:-1], "bytes"), (IMAGES, idx(20, 28, 28) + b"x", "bytes"),
    (IMAGES, idx(2**31, 28, 28, fill=b"12"), "claims 2147483648x28x28"),
    (IMAGES, idx(2**32 - 1, 2**32 - 1, 2**32 - 1, fill=b""), "claims 4294967295x4294967295x4294967295"),
    (IMAGES, idx(0, 28, 28), "labels (20,)"), (IMAGES, idx(19, 28, 28), "labels (20,)"),
    (LABELS, idx(20, fill=bytes([10] * 20)), "labels from 10 to 10"),
])
def test_files_that_lie_are_refused_and_no_memory_is_taken(tmp_path, name, content, said, packed):
    write_mnist(tmp_path, packed=packed, **{name: content})
    tracemalloc.start()
    try:
        assert said in refusal("mnist", tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_gz_bomb_is_refused_unread(tmp_path):
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz"
    packer = zlib.compressobj(9, wbits=31)
    parts = [packer.compress(idx(100, 28, 28, fill=b"")), *(packer.compress(bytes(2**20)) for _ in range(64))]
    path.write_bytes(b"".join(parts) + packer.flush())
    assert "78,400 bytes, the file holds more" in refusal("mnist", tmp_path)


@pytest.mark.parametrize("cut", [5, 40, -4])
def test_a_broken_gz_is_refused(tmp_path, cut):
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:cut])
    assert "cannot be read" in refusal("mnist", tmp_path)


def test_empty_sets_are_refused(tmp_path):
    write_mnist(tmp_path, train_images_idx3_ubyte=idx(0, 28, 28), train_labels_idx1_ubyte=idx(0))
    assert "training set is empty" in refusal("mnist", tmp_path)


# ---- CIFAR-10 ----

def test_cifar_is_what_torchvision_reads_and_is_augmented(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")
    assert "cifar-10-batches-py does not exist" in refusal("cifar10", tmp_path)
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
    assert "damaged" in refusal("cifar10", tmp_path) and not canary.exists()
