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

from common.data.splits import Data, Split
from common.errors import UserError, blamed
from common.sampler import hash_seed

DEFAULT_LENGTH = 128    # tokens per sample; text:LENGTH and tokens:LENGTH change it
TEST_PART = 10          # the last 1/10 of a text is the test set
BLOCK = 2**15           # tokens that are hashed together when a run starts,
BLOCKS = 256            # at so many places of a file


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
    places = F.pad(x, (4, 4, 4, 4)).unfold(2, height, 1).unfold(3, width, 1)
    moved = places[torch.arange(len(x)), :, choice // 2 % 9, choice // 18]
    return flip(moved, 1 - choice % 2)


# ---- small pictures, by torchvision ----
PUBLISHED = {
    "mnist": ("MNIST", {"mean": 0.1307, "std": 0.3081}),
    "fashion-mnist": ("FashionMNIST", {"mean": 0.2860, "std": 0.3530, "augment": flip}),
    "cifar10": ("CIFAR10", {
        "mean": torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1),
        "std": torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1),
        "augment": crop_flip})}


def published(opts):
    """MNIST and Fashion-MNIST from IDX files, CIFAR-10 from pickles of the published checksum alone."""
    from filelock import FileLock
    from torchvision import datasets
    name, facts = PUBLISHED[opts.dataset]
    one_rank = FileLock(Path(opts.data_dir, ".download")) if opts.download else contextlib.nullcontext()
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
    numbers = [
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    plain = [transforms.Resize(size * 256 // 224), transforms.CenterCrop(size)]
    changed = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    sets = []
    for name, steps in (("train", plain if opts.augment == "none" else changed), ("val", plain)):
        transform = transforms.Compose(steps + numbers)
        sets.append(datasets.ImageFolder(Path(opts.data_dir, name), transform, loader=decode))
    train, val = sets
    if train.classes != val.classes:
        raise UserError(f"dataset imagefolder: train and val of {opts.data_dir} have different classes\n"
                        f"only in one: {', '.join(sorted({*train.classes} ^ {*val.classes})[:5])}")
    return Data(train, val, known_classes=len(train.classes), fingerprint=hash_files(opts, *sets))


def decode(path):
    """The image in a file, in RGB."""
    from PIL import Image
    with blamed(f"{path} is not an image that can be read",
                "replace or remove it, then resume with --accept-data-change; or use --bad-samples skip"):
        with Image.open(path) as image:
            if image.mode[0] in "IF":
                raise ValueError(f"mode {image.mode}: in RGB, of 8 bits, it would be white")
            return image.convert("RGB")


def hash_files(opts, train, val):
    """A hash of names and sizes: reading all of ImageNet would take longer than the rest of a restart."""
    digest = hashlib.sha256()
    for path, label in train.samples + val.samples:
        name = os.fsencode(os.path.relpath(path, opts.data_dir))  # of any bytes
        digest.update(name + f"\0{label}\0{os.path.getsize(path)}\n".encode())
    return digest.hexdigest()


# ---- samples for a language model ----
class Windows(Split):
    """Sample i is tokens i*L to i*L+L of a file; its target is the L tokens that begin one later.

    To train on, the file is a ring: one window leads from its end to its beginning. An epoch reads every
    token once, but for fewer than L, which it reads twice: the last window ends where the first has begun.
    With a seed the windows begin at another place in each epoch, so that a token gets every context, as with
    nanoGPT's windows at random places. A test does not join end and beginning: fewer than L tokens are left.
    """

    def __init__(self, numbers, opts, vocab, ring, seed=None):
        self.numbers = numbers
        self.length = int(opts.dataset.partition(":")[2] or DEFAULT_LENGTH)
        self.name = opts.dataset
        self.classes = vocab
        self.ring = ring
        self.seed = seed
        self.shape = (self.length,)
        self.tokens = self.length

    def __len__(self):
        if self.ring:
            return -(-len(self.numbers) // self.length)
        return max(0, len(self.numbers) - 1) // self.length

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y), both [samples, length]; `augment` moves the windows as (seed, epoch) say."""
        starts = np.asarray(ids, dtype=np.int64).reshape(-1, 1) * self.length
        if augment and self.seed is not None:
            starts += hash_seed("windows", self.seed, epoch)
        places = (starts + np.arange(self.length + 1)) % len(self.numbers)
        words = torch.from_numpy(np.asarray(self.numbers)[places].astype(np.int64))
        if words.numel() and words.max() >= self.classes:
            raise UserError(f"dataset {self.name} holds token {words.max():,}, "
                            f"but the vocabulary has {self.classes:,}\n"
                            "give the --vocab-size it was written with")
        return words[:, :-1].clone(), words[:, 1:].clone()  # a task may change one of them in place

    def contents(self):
        for start in np.linspace(0, max(0, len(self.numbers) - BLOCK), BLOCKS, dtype=np.int64):
            yield self.numbers[start:start + BLOCK].tobytes()


def text(opts):
    """The file that --data-dir names: each byte is a token."""
    numbers = np.frombuffer(Path(opts.data_dir).read_bytes(), np.uint8)
    cut = len(numbers) - len(numbers) // TEST_PART
    train = Windows(numbers[:cut], opts, 256, ring=True)
    test = Windows(numbers[cut:], opts, 256, ring=False)
    return Data(train, test, known_classes=256, vocab=256)


def tokens(opts):
    """DATA_DIR/train.bin and DATA_DIR/val.bin: numbers of 16 bits, or of 32 if the vocabulary needs them."""
    vocab = opts.vocab_size
    if not vocab:
        raise UserError("dataset tokens: the size of the vocabulary is not known\ngive --vocab-size N")
    dtype = "<u2" if vocab <= 2**16 else "<u4"
    train, test = [np.memmap(Path(opts.data_dir, f"{name}.bin"), dtype, "r") for name in ("train", "val")]
    return Data(Windows(train, opts, vocab, ring=True, seed=opts.seed),
                Windows(test, opts, vocab, ring=False), known_classes=vocab, vocab=vocab)
