"""Registry of datasets: those read from files, and users' own.

    python -m common.data DIR --check       # names every image of a folder that cannot be read

To add one: write a function of the options that returns a Data, add a line to DATASETS below, and a line to
DATASET_FLAGS in common/options/rules.py. Code that lives elsewhere needs no edit here: use `--dataset
path/to/file.py:function`. Files are not trusted: sizes are checked, and nothing in them is ever executed.
"""
import contextlib
import gzip
import math
import operator
import os
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from common.data.pictures import crop_flip, flip, imagefolder
from common.data.samples import inherited, whole
from common.data.shards import tar
from common.data.synthetic import Data, digits, random_numbers, sentiment, sentiment_large
from common.data.tokens import text, tokens
from common.errors import UserError, one_line
from common.options import call_user

LARGEST_BYTES = 2**31  # that an IDX file may unpack to
DOWNLOADS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}  # of torchvision


# ---- MNIST and its relatives: IDX files ----
IDX = {"mnist": {"mean": (0.1307,), "std": (0.3081,)},
       "fashion-mnist": {"mean": (0.2860,), "std": (0.3530,), "augment": flip}}


def mnist(opts):
    """Handwritten digits, or pictures of clothes: 60,000 to train, 10,000 to test, in DATA_DIR/NAME/raw."""
    folder, pairs = Path(opts.data_dir, DOWNLOADS[opts.dataset], "raw"), []
    for part in ("train", "t10k"):
        images = read_idx(opts, folder / f"{part}-images-idx3-ubyte", 3)
        pairs.append((images.unsqueeze(1), read_idx(opts, folder / f"{part}-labels-idx1-ubyte", 1).long()))
    return Data(*pairs, known_classes=10, **IDX[opts.dataset])


def read_idx(opts, path, dims):
    """The bytes of an IDX file, or of the .gz beside it; a false header is refused before memory is taken."""
    packed = not path.is_file()
    path = path.with_name(path.name + ".gz") if packed else path
    if not path.is_file():
        raise missing(opts, path.with_suffix(""))
    try:
        with (gzip.open if packed else open)(path, "rb") as file:
            head = file.read(4 + 4 * dims)
            if len(head) < 4 + 4 * dims or head[:4] != bytes((0, 0, 8, dims)):
                raise UserError(f"{path} is no IDX file of bytes in {dims} dimensions\n"
                                f"it begins with {head[:4]!r}")
            shape, size = struct.unpack(f">{dims}I", head[4:]), path.stat().st_size
            claimed = math.prod(shape)
            most = min(LARGEST_BYTES, size * 1032) if packed else size  # deflate packs no better
            content = bytearray(file.read(claimed + 1) if claimed <= most else b"")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read\n{one_line(error)}") from error
    if len(content) != claimed:
        raise UserError(f"{path}: the header claims {'x'.join(map(str, shape))} = {claimed:,} bytes, "
                        f"the file holds {'more' if len(content) > claimed else 'fewer'}\nfetch it again")
    return torch.from_numpy(np.frombuffer(content, np.uint8)).view(shape)


def missing(opts, path):
    return UserError(f"dataset {opts.dataset}: {path} does not exist\n"
                     f"--data-dir names the folder of the data (now {opts.data_dir}), --download fetches it\n"
                     "--dataset digits needs no files")


# ---- CIFAR-10 ----
def cifar10(opts):
    """Colour photographs of 32x32 pixels, 50,000 to train, 10,000 to test."""
    from torchvision.datasets import CIFAR10
    folder = Path(opts.data_dir, "cifar-10-batches-py")
    if not folder.is_dir():
        raise missing(opts, folder)
    try:  # these are pickles, but torchvision opens only those with the published checksum
        parts = [CIFAR10(opts.data_dir, train=train) for train in (True, False)]
    except RuntimeError as error:
        raise UserError(f"dataset cifar10: {folder} is damaged or changed\n"
                        "remove it and use --download") from error
    pairs = [(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
             for part in parts]
    return Data(*pairs, known_classes=10, augment=crop_flip,
                mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


# ---- a user's own ----
def user_dataset(opts):
    """What a user's function returns: (x, y, x_test, y_test) tensors, or (train, test) map-style Datasets.

    The number of classes is a Dataset's attribute `classes` (a number, or the names), or it has `targets`.
    """
    found, name = call_user(opts.dataset, opts), opts.dataset
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    if all(type(part) is TensorDataset and [*vars(part)] == ["tensors"] and len(part.tensors) == 2
           for part in found):  # nothing of the user's own
        found = [tensor for part in found for tensor in part.tensors]
    if len(found) == 4 and all(map(torch.is_tensor, found)):
        found = [tensor.detach().cpu() for tensor in found]
        inputs, targets = found[::2], found[1::2]
        words = any(x.dtype in (torch.int16, torch.int32, torch.int64) for x in inputs)
        classed = all(y.dim() == 1 and y.numel() and not y.is_floating_point() for y in targets)
        return Data(*zip(inputs, targets, strict=True), vocab=kinds_in(inputs) if words else None,
                    known_classes=kinds_in(targets) if classed else None)
    if len(found) != 2:
        raise UserError(f"dataset {name} returned ({', '.join(type(part).__name__ for part in found)})\n"
                        "wanted: (train, test), two Datasets with __len__ and __getitem__, "
                        "or (x, y, x_test, y_test), four tensors")
    try:
        classes = max(filter(None, map(count_classes, found)), default=None)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        if opts.task == "classify":
            raise UserError(f"dataset {name}: its `classes` or `targets` are none: {one_line(error)}\n"
                            "wanted: a whole number for each sample, 0 or more") from error
        classes = None
    vocab = getattr(found[0], "vocab", None)
    return Data(*found, known_classes=classes, vocab=len(vocab) if hasattr(vocab, "__len__") else vocab,
                fingerprint=getattr(found[0], "fingerprint", None))


def kinds_in(tensors):
    """How many classes or words the numbers in these tensors need: one more than the largest."""
    return max((int(tensor.max()) for tensor in tensors if tensor.numel()), default=0) + 1


def count_classes(dataset):
    classes, targets = inherited(dataset, "classes"), inherited(dataset, "targets")
    if classes is None and targets is not None and len(targets):
        labels = torch.as_tensor(targets if torch.is_tensor(targets) else list(targets))
        classes = max(map(whole, [labels.max(), *labels[labels != labels.long()][:1]])) + 1
    return len(classes) if hasattr(classes, "__len__") else classes and operator.index(classes)


# ---- all of them ----
DATASETS = {"digits": digits, "mnist": mnist, "fashion-mnist": mnist, "cifar10": cifar10,
            "imagefolder": imagefolder, "sentiment": sentiment, "sentiment-large": sentiment_large,
            "random": random_numbers, "text": text, "tokens": tokens, "tar": tar}


def find_source(opts):
    """The Data that `opts.dataset` names."""
    if ".py" in opts.dataset:
        return user_dataset(opts)
    return DATASETS[opts.dataset.partition(":")[0]](opts)  # options know the names, and refuse others


def make_ready(opts, world):
    """--download, or the index of tar shards: one rank of each node makes what is missing, all wait."""
    if opts.dataset != "tar" and opts.dataset not in DOWNLOADS:
        raise UserError(f"dataset {opts.dataset} has nothing to download\n"
                        f"leave --download out, it is for {', '.join(DOWNLOADS)}")
    with world.all_or_none("download"):
        try:
            if world.local_rank == 0:
                (find_source if opts.dataset == "tar" else download)(opts)
        except UserError:
            raise
        except Exception as error:  # of any kind: the other ranks wait
            raise UserError(f"dataset {opts.dataset} cannot be downloaded to {opts.data_dir}\n"
                            f"{one_line(error)}") from error


def download(opts):
    """Fetches a dataset through torchvision, which knows its checksum, unless it exists and is whole."""
    with contextlib.suppress(UserError):  # missing or damaged
        find_source(opts)
        return
    from torchvision import datasets
    # Into a folder aside, and each file is renamed when all are whole: neither a later start nor another node
    # that shares the folder can take half a download for data.
    os.makedirs(opts.data_dir, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=opts.data_dir) as aside:
        for train in (True, False):
            getattr(datasets, DOWNLOADS[opts.dataset])(aside, train=train, download=True)
        for path in sorted(Path(aside).rglob("*")):
            if path.is_file() and path.suffix != ".gz":
                target = Path(opts.data_dir, path.relative_to(aside))
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
