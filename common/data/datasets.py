"""The datasets: this project's by name, and a user's own from a file.

To add one: write a function of the options that returns a Data, add a line to DATASETS below, and a line to
DATASETS in common/options/rules.py. Code that lives elsewhere needs no edit here: use `--dataset
path/to/file.py:function`. Nothing in a file is ever executed.
"""
import contextlib
import gzip
import operator
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from common.data.drawn import digits, random_numbers, sentiment
from common.data.images import crop_flip, flip, imagefolder
from common.data.splits import Data, inherited
from common.data.tokens import text, tokens
from common.errors import UserError, blamed
from common.options import Options, call_user
from common.sampler import seeded

TORCHVISION = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}  # can be downloaded


# ---- MNIST and its relatives: IDX files ----
IDX = {"mnist": {"mean": (0.1307,), "std": (0.3081,)},
       "fashion-mnist": {"mean": (0.2860,), "std": (0.3530,), "augment": flip}}


def mnist(opts):
    """Handwritten digits, or pictures of clothes: 60,000 to train, 10,000 to test, in DATA_DIR/NAME/raw."""
    folder = Path(opts.data_dir, TORCHVISION[opts.dataset], "raw")
    pairs = []
    for name in ("train", "t10k"):
        images = read_idx(folder / f"{name}-images-idx3-ubyte")
        labels = read_idx(folder / f"{name}-labels-idx1-ubyte")
        pairs.append((images.unsqueeze(1), labels))
    return Data(*pairs, known_classes=10, **IDX[opts.dataset])


def read_idx(path):
    """The bytes of an IDX file, or of the .gz beside it."""
    packed = path.with_name(path.name + ".gz")
    with gzip.open(packed) if packed.is_file() and not path.is_file() else open(path, "rb") as file:
        _, _, dims = struct.unpack(">HBB", file.read(4))
        shape = struct.unpack(f">{dims}I", file.read(4 * dims))
        return torch.from_numpy(np.frombuffer(bytearray(file.read()), np.uint8)).view(shape)


def cifar10(opts):
    """Colour photographs of 32x32 pixels, 50,000 to train, 10,000 to test.

    These are pickles, but torchvision opens only those with the published checksum.
    """
    from torchvision.datasets import CIFAR10
    pairs = []
    for train in (True, False):
        photographs = CIFAR10(opts.data_dir, train=train)
        x = torch.from_numpy(photographs.data).permute(0, 3, 1, 2).contiguous()
        pairs.append((x, torch.tensor(photographs.targets)))
    return Data(*pairs, known_classes=10, augment=crop_flip,
                mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


# ---- a user's own ----
WANTED = "wanted: (train, test), Datasets with __len__ and __getitem__, or (x, y, x_test, y_test), tensors"


def user_dataset(opts):
    """What a user's function returns: (x, y, x_test, y_test) tensors, or (train, test) map-style Datasets."""
    with seeded("dataset"):  # what it draws without a seed is the same on every rank, at every start
        returned = call_user(opts.dataset, opts)
    with blamed(f"dataset {opts.dataset} returned {type(returned).__name__}", WANTED):
        if len(returned) == 4:
            return _of_tensors(*returned)
        train, test = returned
    if type(train) is type(test) is TensorDataset and len(train.tensors) == 2:
        return _of_tensors(*train.tensors, *test.tensors)
    vocab = getattr(train, "vocab", None)
    classes = [count for count in (count_classes(train), count_classes(test)) if count]
    return Data(train, test, known_classes=max(classes, default=None),
                vocab=len(vocab) if hasattr(vocab, "__len__") else vocab,
                fingerprint=getattr(train, "fingerprint", None))


def _of_tensors(*tensors):
    x, y, x_test, y_test = [tensor.detach().cpu() for tensor in tensors]
    words = any(inputs.dtype in (torch.int16, torch.int32, torch.int64) for inputs in (x, x_test))
    classed = all(targets.dim() == 1 and not targets.is_floating_point() for targets in (y, y_test))
    return Data((x, y), (x_test, y_test), vocab=kinds_in(x, x_test) if words else None,
                known_classes=kinds_in(y, y_test) if classed else None)


def kinds_in(*tensors):
    """How many classes or words the numbers in these tensors need: one more than the largest."""
    return max((int(tensor.max()) for tensor in tensors if tensor.numel()), default=0) + 1


def count_classes(dataset):
    """How many classes a Dataset names, or its `targets` need if they are whole numbers; else None."""
    classes = inherited(dataset, "classes")
    if classes is not None:
        return len(classes) if hasattr(classes, "__len__") else operator.index(classes)
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        labels = torch.as_tensor(inherited(dataset, "targets"))
        return kinds_in(labels) if labels.numel() and torch.equal(labels, labels.long()) else None


# ---- all of them ----
DATASETS = {"digits": digits, "mnist": mnist, "fashion-mnist": mnist, "cifar10": cifar10,
            "imagefolder": imagefolder, "sentiment": sentiment,
            "random": random_numbers, "text": text, "tokens": tokens}
PRELOADED: dict[tuple, Data] = {}  # by `facts_of`


def facts_of(opts):
    """The options from which a dataset of this project follows."""
    return opts.dataset, opts.data_dir, opts.image_size, opts.augment, opts.vocab_size, opts.seed


def find_source(opts: Options) -> Data:
    """The Data that `opts.dataset` names."""
    if facts_of(opts) in PRELOADED:
        return PRELOADED[facts_of(opts)]
    with blamed(f"dataset {opts.dataset}", "--data-dir names the folder of a dataset's files; "
                   f"--download fetches {', '.join(TORCHVISION)}"):
        if ".py" in opts.dataset:
            return user_dataset(opts)
        return DATASETS[opts.dataset.partition(":")[0]](opts)  # options know the names, and refuse others


def download(opts: Options) -> None:
    """Fetches a dataset through torchvision, which knows its checksum, unless it exists and is whole."""
    with contextlib.suppress(UserError):  # missing or damaged
        find_source(opts)
        return
    from torchvision import datasets
    # Into a folder aside, which is renamed when all files are whole: no start takes half a download for data.
    os.makedirs(opts.data_dir, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=opts.data_dir) as aside:
        for train in (True, False):
            getattr(datasets, TORCHVISION[opts.dataset])(aside, train=train, download=True)
        for path in Path(aside).iterdir():
            target = Path(opts.data_dir, path.name)
            shutil.rmtree(target, ignore_errors=True)  # damaged
            shutil.move(path, target)
