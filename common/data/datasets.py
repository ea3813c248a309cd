"""The datasets by name, each a function of the options that returns a Data.

To add one: write such a function, and add a line to DATASETS in common/options/registry.py, with its flags;
each of these is a field of Options. Code that lives elsewhere needs no edit here: use
`--dataset path/to/file.py:function`. Nothing in a data file is ever executed.

--dataset imagefolder --data-dir DIR                       # DIR/train/CLASS/*.jpg and DIR/val/CLASS/*.jpg
--dataset text:128 --data-dir FILE                         # each byte is a token; the last tenth tests
--dataset tokens:1024 --data-dir DIR --vocab-size 50304    # DIR/train.bin and DIR/val.bin, on disk
"""

import hashlib
import operator
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common.data.samples import WORDS, Windows, data_of, inherited
from common.errors import UserError, blamed
from common.options import call_user
from common.sampler import seeded

# ---- digits: drawn in whole numbers, from one seed: no CPU and no version of torch can change them ----
GLYPHS = """
.###.  ..#..  .###.  #####  ...#.  #####  ..##.  #####  .###.  .###.
#...#  .##..  #...#  ...#.  ..##.  #....  .#...  ....#  #...#  #...#
#..##  ..#..  ....#  ..#..  .#.#.  ####.  #....  ...#.  #...#  #...#
#.#.#  ..#..  ...#.  ...#.  #..#.  ....#  ####.  ..#..  .###.  .####
##..#  ..#..  ..#..  ....#  #####  ....#  #...#  .#...  #...#  ....#
#...#  ..#..  .#...  #...#  ...#.  #...#  #...#  .#...  #...#  ...#.
.###.  .###.  #####  .###.  ...#.  .###.  .###.  .#...  .###.  .##..
"""
SEED = 20240711  # of the data, not of a run: every run trains on the same pictures


def digits(opts):
    """28x28 pictures of digits, moved, in noise: 12,000 to train, 2,000 to test."""
    rng = torch.Generator().manual_seed(SEED)
    count = 14000

    def draw(low, high, side=1):
        return torch.randint(low, high + 1, (count, side, side), generator=rng, dtype=torch.int32)

    cells = torch.tensor([[cell == "#" for cell in row] for row in GLYPHS.split()])
    glyphs = cells.view(7, 10, 5).transpose(0, 1)
    glyphs = glyphs.repeat_interleave(3, 1).repeat_interleave(3, 2)
    glyphs = F.pad(glyphs, (6, 7, 3, 4))  # 21 x 15 pixels of 28 x 28
    pixel = torch.arange(28)
    row = (pixel.view(28, 1) + draw(-3, 3)) % 28
    column = (pixel + draw(-6, 6)) % 28
    y = torch.arange(count) % 10
    ink = glyphs[y.view(count, 1, 1), row, column] * draw(100, 255)
    noise = draw(0, 255, side=28) * draw(10, 150) >> 8
    x = (ink + noise).clamp(max=255).to(torch.uint8).unsqueeze(1)
    return data_of(opts, (x[:12000], y[:12000]), (x[12000:], y[12000:]), 10, mean=0.27, std=0.28)


# ---- sentiment ----
def sentiment(opts):
    """The two sentences of the tutorial, both for training and for the test."""
    good = [2, 3, 4, 5]  # I love this movie
    bad = [1, 5, 6, 7]  # This movie is terrible; "This" is not "this", but an unknown word
    both = (torch.tensor([good, bad]), torch.tensor([1, 0]))
    return data_of(opts, both, both, 2, vocab=8)


# ---- random ----
def random_numbers(opts):
    """`random:NxF`: N samples of F normal numbers, labels from a coin; 100x5 by default, as in tutorials."""
    size = opts.dataset.partition(":")[2] or "100x5"
    samples, features = map(int, size.split("x"))
    rng = torch.Generator().manual_seed(SEED)
    x = torch.randn(samples, features, generator=rng)
    x = (x * 4096).round() / 4096  # CPUs differ in the last bits of a normal number
    y = torch.randint(0, 2, (samples,), generator=rng)
    # labels from a coin cannot be predicted: so the test set is the training set
    return data_of(opts, (x, y), (x, y), 2, fingerprint=opts.dataset)


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
def published(name, opts, **pictures):
    """MNIST and Fashion-MNIST from IDX files, CIFAR-10 from pickles of the published checksum alone."""
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
    digest = hashlib.sha256()  # of names and sizes: to read all of ImageNet would take minutes
    for path, label in train.samples + val.samples:
        name = os.path.relpath(path, opts.data_dir)
        digest.update(repr((name, label, os.path.getsize(path))).encode())
    return data_of(opts, train, val, len(train.classes), fingerprint=digest.hexdigest())


def decode(path):
    """The image in a file, in RGB."""
    from PIL import Image

    way_out = "mend it and resume with --accept-data-change; or --run-dir NEW with --bad-samples skip"
    with blamed(f"{path} is not an image that can be read", way_out), Image.open(path) as image:
        if image.mode[0] in "IF":
            raise ValueError(f"mode {image.mode}: in RGB, of 8 bits, it would be white")
        return image.convert("RGB")


# ---- samples for a language model ----
def text(opts):
    """The file that --data-dir names: each byte is a token; the last tenth is the test set."""
    numbers = np.frombuffer(Path(opts.data_dir).read_bytes(), np.uint8)
    cut = len(numbers) - len(numbers) // 10
    return windows(numbers[:cut], numbers[cut:], opts, 256)


def tokens(opts):
    """DATA_DIR/train.bin and DATA_DIR/val.bin: numbers of 16 bits, or of 32 if the vocabulary needs them."""
    vocab = opts.vocab_size  # without it the first token is refused
    dtype = "<u2" if vocab <= 2**16 else "<u4"
    train, test = [np.memmap(Path(opts.data_dir, name), dtype, "r") for name in ("train.bin", "val.bin")]
    return windows(train, test, opts, vocab, move=True)


def windows(train, test, opts, vocab, move=False):
    """text:LENGTH and tokens:LENGTH: samples of so many tokens."""
    samples = Windows(train, opts, vocab, ring=True, move=move)
    return data_of(opts, samples, Windows(test, opts, vocab), vocab, vocab)


# ---- a user's own ----
def user_dataset(opts):
    """What a user's function returns: tensors, or Datasets that may have `classes` and `vocab`."""
    with seeded("dataset"):  # what it draws without a seed is the same on every rank, at every start
        returned = call_user(opts.dataset, opts)
    if len(returned) == 4:
        x, y, x_test, y_test = returned
        vocab = end_of(x, x_test) if x.dtype in WORDS else None
        classes = None if y.is_floating_point() else end_of(y, y_test)
        return data_of(opts, (x, y), (x_test, y_test), classes, vocab)
    train, test = returned
    classes = count_of(inherited(train, "classes"))
    vocab = count_of(inherited(train, "vocab"))
    return data_of(opts, train, test, classes, vocab, getattr(train, "fingerprint", ""))


def end_of(*numbers):
    """What they are all below."""
    return int(torch.cat(numbers).max()) + 1


def count_of(names):
    """How many names these are; a number counts itself."""
    if hasattr(names, "__len__"):
        return len(names)
    return None if names is None else operator.index(names)
