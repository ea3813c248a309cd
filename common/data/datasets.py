"""The datasets that a first run needs, each a function of the options that returns a Data.

To add one: write such a function, and add a line to DATASETS in common/options/registry.py, with its flags;
each of these is a field of Options. Code that lives elsewhere needs no edit here: use
`--dataset path/to/file.py:function`. More by name: extras/datasets.py, extras/text.py.
"""

import operator

import torch
import torch.nn.functional as F

from common.data.samples import WORDS, data_of, inherited
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
    """Draw 28x28 pictures of digits, moved, in noise: 12,000 to train, 2,000 to test."""
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


# ---- a user's own ----
def user_dataset(opts):
    """Take what a user's function returns: tensors, or Datasets that may have `classes` and `vocab`."""
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
    """Return the number that all of these are below."""
    return int(torch.cat(numbers).max()) + 1


def count_of(names):
    """Count these names; a number is a count already."""
    if hasattr(names, "__len__"):
        return len(names)
    return None if names is None else operator.index(names)
