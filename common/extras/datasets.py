"""Datasets by name, beside the one that the core has; each is named in DATASETS (options/registry.py).

--dataset random:100x5                         # numbers, and labels from a coin
--dataset sentiment                            # the two sentences of the tutorial
--dataset mnist | fashion-mnist | cifar10      # in --data-dir; --download fetches them
--dataset imagefolder --data-dir DIR           # DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg
--dataset text:128 --data-dir FILE             # each byte is a token; the last tenth tests
--dataset tokens:1024 --data-dir DIR --vocab-size 50304    # DIR/train.bin and DIR/val.bin, on disk

Nothing in a data file is ever executed.
"""

import hashlib
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.data import DECIDING, PRELOADED, Samples, data_of, load_data
from common.errors import UserError, blamed
from common.sampler import MASK32, hash_seed, mix

SEED = 20240711  # of the data, not of a run: every run trains on the same numbers
BLOCK_TOKENS = 2**15  # that are hashed together when a run starts,
BLOCKS = 256  # at so many places of a file


# ---- sentiment ----
def sentiment(opts):
    """Return the two sentences of the tutorial, both for training and for the test."""
    good = [2, 3, 4, 5]  # I love this movie
    bad = [1, 5, 6, 7]  # This movie is terrible; "This" is not "this", but an unknown word
    both = (torch.tensor([good, bad]), torch.tensor([1, 0]))
    return data_of(opts, both, both, 2, vocab=8)


# ---- random ----
def random_numbers(opts):
    """Draw for `random:NxF` N samples of F normal numbers, labels from a coin; 100x5 by default."""
    size = opts.dataset.partition(":")[2] or "100x5"
    samples, features = map(int, size.split("x"))
    rng = torch.Generator().manual_seed(SEED)
    x = torch.randn(samples, features, generator=rng)
    x = (x * 4096).round() / 4096  # CPUs differ in the last bits of a normal number
    y = torch.randint(0, 2, (samples,), generator=rng)
    # labels from a coin cannot be predicted: so the test set is the training set
    return data_of(opts, (x, y), (x, y), 2, fingerprint=opts.dataset)


# ---- augmentation: x is a copy of the images, u a uniform number in [0, 1) for each ----
def uniforms(ids, seed, epoch):
    """Return float32 [len(ids)] in [0, 1): a pure function of (seed, epoch, id)."""
    ids = torch.as_tensor(ids, dtype=torch.int64).reshape(-1)
    low, high = [hash_seed("uniform", seed, epoch, 0, half) for half in range(2)]
    bits = mix((ids & MASK32) ^ low)
    bits = mix(bits ^ (ids >> 32) ^ high)
    return (bits >> 8) * 2.0**-24  # a float32 holds 24 bits: all 32 could round up to 1


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
def published(name, opts, **pictures):
    """Read MNIST and Fashion-MNIST from IDX files, CIFAR-10 from pickles of the published checksum alone."""
    from filelock import FileLock
    from torchvision import datasets

    one_rank = FileLock(Path(opts.data_dir, ".download")) if opts.download else nullcontext()
    pairs = []
    for train in (True, False):
        with one_rank:
            read = getattr(datasets, name)(opts.data_dir, train=train, download=opts.download)
        x = torch.as_tensor(read.data)
        x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2)
        pairs.append((x, torch.as_tensor(read.targets)))
    return data_of(opts, *pairs, 10, **pictures)


mnist = partial(published, "MNIST", mean=0.1307, std=0.3081)


fashion_mnist = partial(published, "FashionMNIST", mean=0.2860, std=0.3530, augment=flip)


cifar10 = partial(
    published, "CIFAR10", mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), augment=crop_flip
)


# ---- a folder of images ----
def imagefolder(opts):
    """Open DATA_DIR/train/CLASS/*.jpg and DATA_DIR/val/CLASS/*.jpg, ImageNet's layout."""
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
    digest = hashlib.sha256()  # of names and sizes: to read all of ImageNet would take minutes
    for path, label in train.samples + val.samples:
        name = os.path.relpath(path, opts.data_dir)
        digest.update(repr((name, label, os.path.getsize(path))).encode())
    return data_of(opts, train, val, len(train.classes), fingerprint=digest.hexdigest())


def decode(path):
    """Read the image in a file, in RGB."""
    from PIL import Image

    way_out = "mend it and resume with --accept-data-change; or --run-dir NEW with --bad-samples skip"
    with blamed(f"{path} is not an image that can be read", way_out), Image.open(path) as image:
        if image.mode[0] in "IF":
            raise ValueError(f"mode {image.mode}: in RGB, of 8 bits, it would be white")
        return image.convert("RGB")


# ---- samples for a language model ----
def text(opts):
    """Read the file that --data-dir names: each byte is a token; the last tenth is the test set."""
    numbers = np.frombuffer(Path(opts.data_dir).read_bytes(), np.uint8)
    cut = len(numbers) - len(numbers) // 10
    return windows(numbers[:cut], numbers[cut:], opts, 256)


def tokens(opts):
    """Map DATA_DIR/train.bin and val.bin: numbers of 16 bits, or of 32 if the vocabulary needs them."""
    vocab = opts.vocab_size  # without it the first token is refused
    dtype = "<u2" if vocab <= 2**16 else "<u4"
    train, test = [np.memmap(Path(opts.data_dir, name), dtype, "r") for name in ("train.bin", "val.bin")]
    return windows(train, test, opts, vocab, move=True)


def windows(train, test, opts, vocab, move=False):
    """Cut both files into samples of so many tokens: text:LENGTH and tokens:LENGTH."""
    samples = Windows(train, opts, vocab, ring=True, move=move)
    return data_of(opts, samples, Windows(test, opts, vocab), vocab, vocab)


class Windows(Samples):
    """Sample i is tokens i*L to i*L+L of a file; its target is the L tokens that begin one later.

    To train on, the file is a ring: one window leads from its end to its beginning. An epoch reads every
    token once, but for fewer than L, which it reads twice: the last window ends where the first has begun.
    If they move, the windows begin at another place in each epoch, so that a token gets every context, as
    with nanoGPT's windows at random places. A test does not join end and beginning: fewer than L tokens are
    left.
    """

    def __init__(self, numbers, opts, vocab, ring=False, move=False):
        self.numbers = numbers
        self.length = int(opts.dataset.partition(":")[2] or 128)
        self.move = move
        last = len(numbers) + self.length - 1 if ring else max(0, len(numbers) - 1)
        super().__init__(last // self.length, opts, vocab)

    def fetch(self, ids, epoch=0, augment=False):
        """Return (x, y), both [samples, length]; `augment` moves the windows as (seed, epoch) say."""
        starts = np.asarray(ids, dtype=np.int64) * self.length
        if augment and self.move:
            starts += hash_seed("windows", self.seed, epoch)
        places = starts[:, None] + np.arange(self.length + 1)
        words = np.asarray(self.numbers)[places % len(self.numbers)]
        words = torch.from_numpy(words.astype(np.int64))
        if words.max() >= self.classes:
            raise UserError(
                f"the data holds token {words.max():,}, but the vocabulary has {self.classes:,}\n"
                "give the --vocab-size it was written with"
            )
        return words[:, :-1].clone(), words[:, 1:].clone()  # a task may change one of them in place

    def contents(self):
        last = max(0, len(self.numbers) - BLOCK_TOKENS)
        for start in np.linspace(0, last, BLOCKS, dtype=np.int64):
            yield self.numbers[start : start + BLOCK_TOKENS].tobytes()


def refuse_unshifted(batch, name):
    """Refuse labels that are the words themselves: here the net would learn to copy its input."""
    match batch:
        case {"input_ids": Tensor() as words, "labels": Tensor() as labels} if words.shape == labels.shape:
            real = labels >= 0
            if real.sum() > 1 and torch.equal(words[real], labels[real]):
                raise UserError(
                    f"{name}: labels are the input_ids, which a model of Hugging Face shifts; "
                    "--task tokens does not\n"
                    "let collate(samples) shift them: labels[t] is input_ids[t + 1], -100 at the end; "
                    "or take the model's own loss: --task path/to/file.py:function"
                )


def preload(opts):
    """Open a dataset of this project, and hash it, for all processes that will be forked from this one.

    A life then begins with it: drawing `digits` takes half a second. Threads do not survive a fork, so none
    is started.
    """
    if ".py" in opts.dataset:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    PRELOADED[DECIDING(opts)] = load_data(opts)
    torch.set_num_threads(threads)
    # a fork makes torch's pool of threads anew, without a lock: two threads that begin with it would abort
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
