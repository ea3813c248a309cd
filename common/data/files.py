"""Datasets that are read from files below --data-dir: pictures, text, tokens as nanoGPT writes them.

--dataset imagefolder --data-dir DIR                       # DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg
--dataset text:128 --data-dir FILE                         # each byte is a token; the last tenth tests
--dataset tokens:1024 --data-dir DIR --vocab-size 50304    # DIR/train.bin and DIR/val.bin, on disk
"""

import contextlib
import hashlib
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common.data.splits import Data, Windows
from common.errors import UserError, blamed


# ---- augmentation: x is a copy of the images, u a uniform number in [0, 1) for each ----
def flip(x, u):
    """Mirror half of the images."""
    mirrored = u < 0.5
    x[mirrored] = x[mirrored].flip(3)
    return x


def crop_flip(x, u):
    """Move each image by up to 4 pixels in both directions (zeros come in), and mirror half of them."""
    height, width = x.shape[2:]
    choice = (u * (9 * 9 * 2)).long()
    places = F.pad(x, (4, 4, 4, 4))
    places = places.unfold(2, height, 1).unfold(3, width, 1)
    down = choice // 2 % 9
    right = choice // 18
    moved = places[torch.arange(len(x)), :, down, right]
    return flip(moved, 1 - choice % 2)


# ---- small pictures, by torchvision ----
PUBLISHED = {
    "mnist": ("MNIST", {"mean": 0.1307, "std": 0.3081}),
    "fashion-mnist": ("FashionMNIST", {"mean": 0.2860, "std": 0.3530, "augment": flip}),
    "cifar10": (
        "CIFAR10",
        {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616), "augment": crop_flip},
    ),
}


def published(opts):
    """MNIST and Fashion-MNIST from IDX files, CIFAR-10 from pickles of the published checksum alone."""
    from filelock import FileLock
    from torchvision import datasets

    name, facts = PUBLISHED[opts.dataset]
    one_rank = contextlib.nullcontext()
    if opts.download:
        one_rank = FileLock(Path(opts.data_dir, ".download"))
    pairs = []
    for train in (True, False):
        with one_rank:
            pictures = getattr(datasets, name)(opts.data_dir, train=train, download=opts.download)
        x = torch.as_tensor(pictures.data)
        x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
        pairs.append((x, torch.as_tensor(pictures.targets)))
    return Data(*pairs, known_classes=10, **facts)


# ---- a folder of images ----
def imagefolder(opts):
    """DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg, ImageNet's layout."""
    from torchvision import datasets, transforms

    size = opts.image_size
    plain = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    changed = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    numbers = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]

    def pictures(name, steps):
        transform = transforms.Compose(steps + numbers)
        return datasets.ImageFolder(Path(opts.data_dir, name), transform, loader=decode)

    train = pictures("train", plain if opts.augment == "none" else changed)
    val = pictures("val", plain)
    if train.classes != val.classes:
        raise UserError(
            f"dataset imagefolder: train and val of {opts.data_dir} have different classes\n"
            f"only in one: {', '.join(sorted({*train.classes} ^ {*val.classes})[:5])}"
        )
    return Data(train, val, known_classes=len(train.classes), fingerprint=hash_files(opts, train, val))


def decode(path):
    """The image in a file, in RGB."""
    from PIL import Image

    way_out = "replace or remove it, then resume with --accept-data-change; or use --bad-samples skip"
    with blamed(f"{path} is not an image that can be read", way_out), Image.open(path) as image:
        if image.mode[0] in "IF":
            raise ValueError(f"mode {image.mode}: in RGB, of 8 bits, it would be white")
        return image.convert("RGB")


def hash_files(opts, train, val):
    """A hash of names and sizes: reading all of ImageNet would take longer than the rest of a restart."""
    digest = hashlib.sha256()
    for path, label in train.samples + val.samples:
        name = os.path.relpath(path, opts.data_dir)
        digest.update(repr((name, label, os.path.getsize(path))).encode())
    return digest.hexdigest()


# ---- samples for a language model ----
def text(opts):
    """The file that --data-dir names: each byte is a token; the last tenth is the test set."""
    numbers = np.frombuffer(Path(opts.data_dir).read_bytes(), np.uint8)
    cut = len(numbers) - len(numbers) // 10
    return windows(numbers[:cut], numbers[cut:], opts, 256)


def tokens(opts):
    """DATA_DIR/train.bin and DATA_DIR/val.bin: numbers of 16 bits, or of 32 if the vocabulary needs them."""
    vocab = opts.vocab_size
    if not vocab:
        raise UserError("dataset tokens: the size of the vocabulary is not known\ngive --vocab-size N")
    dtype = "<u2" if vocab <= 2**16 else "<u4"
    train, test = [np.memmap(Path(opts.data_dir, name), dtype, "r") for name in ("train.bin", "val.bin")]
    return windows(train, test, opts, vocab, opts.seed)


def windows(train, test, opts, vocab, seed=None):
    return Data(
        Windows(train, opts, vocab, ring=True, seed=seed),
        Windows(test, opts, vocab, ring=False),
        known_classes=vocab,
        vocab=vocab,
    )
