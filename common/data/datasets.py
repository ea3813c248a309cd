"""Registry of datasets: those read from files, and users' own.

    python -m common.data DIR --check       # names every image of a folder that cannot be read

To add one: write a function of the options that returns a Source, add a line to DATASETS below, and a line to
DATASET_FLAGS in common/options/rules.py. Code that lives elsewhere needs no edit here: use `--dataset
path/to/file.py:function`. Files are not trusted: their sizes are checked before memory is taken, and nothing
in them is ever executed.
"""
import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch.utils.data import IterableDataset, TensorDataset

from common.data.pictures import imagefolder
from common.data.shards import tar
from common.data.synthetic import Source, digits, random_numbers, sentiment, sentiment_large
from common.data.text import text
from common.data.tokens import tokens
from common.errors import UserError, did_you_mean, one_line
from common.options import call_user

LARGEST_BYTES = 2**31  # that an IDX file may unpack to


# ---- MNIST and its relatives: IDX files ----
def mnist(opts):
    """Handwritten digits, 60,000 to train and 10,000 to test, from DATA_DIR/MNIST/raw."""
    return read_mnist(opts, "MNIST", tuple("0123456789"), mean=(0.1307,), std=(0.3081,))


def fashion_mnist(opts):
    """Pictures of clothes in the format of MNIST, from DATA_DIR/FashionMNIST/raw."""
    names = "T-shirt,trouser,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot".split(",")
    return read_mnist(opts, "FashionMNIST", tuple(names), mean=(0.2860,), std=(0.3530,), augment="flip")


def read_mnist(opts, name, class_names, **facts):
    folder = Path(opts.data_dir) / name / "raw"
    pairs = []
    for part in ("train", "t10k"):
        images = read_idx(opts, folder / f"{part}-images-idx3-ubyte", 3)
        labels = read_idx(opts, folder / f"{part}-labels-idx1-ubyte", 1)
        pairs.append((images.unsqueeze(1), labels.long()))
    return Source(*pairs, classes=10, class_names=class_names, **facts)


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
            shape = struct.unpack(f">{dims}I", head[4:])
            claimed, size = math.prod(shape), path.stat().st_size
            most = size - len(head) if not packed else min(LARGEST_BYTES, size * 1032)  # deflate's best
            if claimed > most or (not packed and claimed != most):
                holds = "unpacks to less" if packed else f"holds {most:,}"
                raise UserError(f"{path}: the header claims {'x'.join(map(str, shape))} = {claimed:,} bytes, "
                                f"the file {holds}\nfetch it again")
            content = bytearray(claimed)
            count = file.readinto(content)
            if count != claimed or file.read(1):
                more = "fewer" if count != claimed else "more"
                raise UserError(f"{path} holds {more} bytes than the {claimed:,} its header claims\n"
                                "fetch it again")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read\n{one_line(error)}") from error
    if not claimed:  # frombuffer refuses an empty buffer; load_data has a clearer error for an empty dataset
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(content, dtype=torch.uint8).view(shape)


def missing(opts, path):
    return UserError(f"dataset {opts.dataset}: {path} does not exist\n"
                     f"--data-dir names the folder of the data (now {opts.data_dir}), --download fetches it\n"
                     "--dataset digits needs no files")


# ---- CIFAR-10 ----
def cifar10(opts):
    """Colour photographs of 32x32 pixels, 50,000 to train, 10,000 to test; binary files or torchvision's."""
    folder = Path(opts.data_dir) / "cifar-10-batches-bin"
    if folder.is_dir():
        files = [[folder / f"data_batch_{n}.bin" for n in range(1, 6)], [folder / "test_batch.bin"]]
        pairs = [tuple(map(torch.cat, zip(*(read_cifar(opts, path) for path in paths), strict=True)))
                 for paths in files]
    elif (folder.parent / "cifar-10-batches-py").is_dir():
        pairs = [unpickle_cifar(opts, train) for train in (True, False)]
    else:
        raise missing(opts, folder)
    names = "airplane automobile bird cat deer dog frog horse ship truck"
    return Source(*pairs, classes=10, class_names=tuple(names.split()), augment="crop_flip",
                  mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


def read_cifar(opts, path):
    if not path.is_file():
        raise missing(opts, path)
    count, rest = divmod(path.stat().st_size, 3073)
    if rest or not 1 <= count <= 10000:
        raise UserError(f"{path} has {path.stat().st_size:,} bytes: not 1 to 10,000 records of 3,073\n"
                        "fetch it again")
    records = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).view(count, 3073)
    return records[:, 1:].reshape(count, 3, 32, 32), records[:, 0].long()


def unpickle_cifar(opts, train):
    from torchvision.datasets import CIFAR10
    try:  # these are pickles, but torchvision opens only those with the published checksum
        dataset = CIFAR10(opts.data_dir, train=train)
    except RuntimeError as error:
        raise UserError(f"dataset cifar10: {opts.data_dir}/cifar-10-batches-py is damaged or changed\n"
                        "remove it and use --download") from error
    return torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(dataset.targets)


# ---- a user's own ----
def user_dataset(opts):
    """What a user's function returns: (x, y, x_test, y_test) tensors, or (train, test) map-style Datasets.

    The number of classes is a Dataset's attribute `classes` (a number, or the names), or it has `targets`.
    """
    found, name, labels = call_user(opts.dataset, opts), opts.dataset, opts.task == "classify"
    found = found if isinstance(found, (tuple, list)) else (found,)
    kinds = "".join("t" if isinstance(part, torch.Tensor) else "d" for part in found)
    if any(isinstance(part, IterableDataset) for part in found):
        raise UserError(f"dataset {name} is an iterable: a restart could not find its place in it again\n"
                        "give it an index, __len__ and __getitem__(i); an attribute `groups`, the sizes of "
                        "shards or row groups, keeps neighbours together\nfor tar shards: --dataset tar")
    if kinds == "tttt":
        parts = [(found[0], found[1]), (found[2], found[3])]
    elif kinds == "dd" and all(isinstance(part, TensorDataset) and len(part.tensors) == 2 for part in found):
        parts = [part.tensors for part in found]
    elif kinds == "dd" and all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in found):
        try:
            known = [fact for part in found for fact in [count_classes(part)] if fact]
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            if labels:
                raise UserError(f"dataset {name}: its `targets` are no classes: {one_line(error)}\n"
                                "wanted: a whole number for each sample, 0 or more") from error
            known = []
        names = getattr(found[0], "classes", None)
        vocab = getattr(found[0], "vocab", None)
        return Source(*found, classes=max(known, default=None),
                      vocab=len(vocab) if hasattr(vocab, "__len__") else vocab,
                      class_names=tuple(map(str, names)) if isinstance(names, (list, tuple)) else None,
                      fingerprint=getattr(found[0], "fingerprint", None))
    else:
        types = ", ".join(type(part).__name__ for part in found)
        raise UserError(f"dataset {name} returned ({types})\n"
                        "wanted: (train, test), two Datasets with __len__ and __getitem__, "
                        "or (x, y, x_test, y_test), four tensors")
    parts = [(x.detach().cpu(), y.detach().cpu()) for x, y in parts]
    for x, y in parts:
        lost = x.is_complex() or y.is_complex() or y.is_floating_point() or y.dim() != 1
        if not x.numel() or not y.numel() or labels and (x.dim() < 2 or lost):
            raise UserError(f"dataset {name}: samples {tuple(x.shape)} with labels {tuple(y.shape)}, "
                            f"{x.dtype} and {y.dtype}\n"
                            "wanted: at least one sample, of one dimension or more, with a whole number\n"
                            "for other targets write a task: --task path/to/file.py:function")
    words = any(x.dtype in (torch.int16, torch.int32, torch.int64) for x, _ in parts)
    classed = all(y.dim() == 1 and not y.is_floating_point() for _, y in parts)
    return Source(*parts, classes=max(int(y.max()) for _, y in parts) + 1 if classed else None,
                  vocab=max(int(x.max()) for x, _ in parts) + 1 if words else None)


def whole(label):
    """The number of a class; a ValueError if int() would round it."""
    if float(label) != int(label):
        raise ValueError(f"label {float(label):g} is not a whole number")
    return int(label)


def count_classes(dataset):
    while dataset is not None:
        classes = getattr(dataset, "classes", None)
        if classes is not None:
            return classes if isinstance(classes, int) else len(classes)
        targets = getattr(dataset, "targets", None)
        if targets is not None and len(targets):
            labels = torch.as_tensor(targets if torch.is_tensor(targets) else list(targets))
            return max(map(whole, [labels.max(), *labels[labels != labels.long()][:1]])) + 1
        dataset = getattr(dataset, "dataset", None)  # of a Subset, which random_split makes
    return None


# ---- all of them ----
DATASETS = {"digits": digits, "mnist": mnist, "fashion-mnist": fashion_mnist, "cifar10": cifar10,
            "imagefolder": imagefolder, "sentiment": sentiment, "sentiment-large": sentiment_large,
            "random": random_numbers, "text": text, "tokens": tokens, "tar": tar}


def find_source(opts):
    """The Source that `opts.dataset` names."""
    name, _, size = opts.dataset.partition(":")
    if ".py" in opts.dataset:
        return user_dataset(opts)
    if name not in DATASETS or (size and name not in ("random", "text", "tokens")):
        raise UserError(f"unknown dataset {opts.dataset!r}{did_you_mean(opts.dataset, DATASETS, 3)}\n"
                        f"there are {', '.join(DATASETS)}, and path/to/file.py:function")
    return DATASETS[name](opts)
