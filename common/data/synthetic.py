"""Datasets that a program draws: no download, and the same bits on every machine.

All random numbers are integers from one seeded generator, and pictures are computed in integers, so that
neither the CPU nor the version of torch can change the data, and with it the fingerprint of a run.
"""
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from common.errors import UserError


@dataclass(frozen=True)
class Data:
    """A dataset, and the facts a model is built from; `load_data` adds the last two."""

    train: Any  # (x, y) tensors or a map-style Dataset; once loaded, a split
    test: Any
    known_classes: int | None
    vocab: int | None = None
    mean: tuple = (0.0,)  # of uint8 pixels scaled to 0..1, per channel
    std: tuple = (1.0,)
    augment: Any = None  # for tensors: as `flip` of pictures.py; for a Dataset: a transform of a sample
    plain: Any = None  # for a Dataset: the transform of a sample when it is not augmented
    fingerprint: Any = None  # for a Dataset: a text, or a function that returns it; tensors are hashed
    name: str = ""
    sample_shape: tuple = ()

    @property
    def classes(self) -> int:
        """Only some models ask for it: a regression has no classes."""
        if self.known_classes is None:
            raise UserError(f"dataset {self.name} does not tell its number of classes\n"
                            "give its training set an attribute `classes` (a number, or the names), "
                            "or use a --model of your own that does not need it")
        return self.known_classes


# ---- digits ----
GLYPHS = """
 ###    #    ###  #####    #  #####   ##  #####  ###   ###
#   #  ##   #   #    #    ##  #      #        # #   # #   #
#  ##   #       #   #    # #  ####  #        #  #   # #   #
# # #   #      #     #  #  #      # ####    #    ###   ####
##  #   #     #       # #####     # #   #  #    #   #     #
#   #   #    #    #   #    #  #   # #   #  #    #   #    #
 ###   ###  #####  ###     #   ###   ###   #     ###   ##
"""
FINE = 4  # cells of the glyph bank per pixel
SIDE = 28 * FINE
DIGITS_SEED = 20240711  # of the data, not of a run: every run trains on the same pictures


def digits(opts):
    """Noisy 28x28 pictures of digits, moved, turned, slanted: 12,000 to train, 2,000 to test."""
    rng = torch.Generator().manual_seed(DIGITS_SEED)
    bank = glyph_bank()
    x, y = zip(*(draw_digits(1000, bank, rng) for _ in range(14)), strict=True)
    x, y = torch.cat(x), torch.cat(y)
    return Data((x[:12000], y[:12000]), (x[12000:], y[12000:]), 10, mean=(0.22,), std=(0.27,))


def glyph_bank():
    """uint8 [10 digits * 4 weights, SIDE * SIDE]: each digit in four line widths, at FINE cells a pixel."""
    rows = [line.ljust(60) for line in GLYPHS.strip("\n").split("\n")]
    cells = [[[row[6 * digit + c] == "#" for c in range(5)] for row in rows] for digit in range(10)]
    cells = torch.tensor(cells).float()
    cells = cells.repeat_interleave(10, 1).repeat_interleave(10, 2)  # 7x5 cells of 10: 70 x 50 of 112 x 112
    ink = F.pad(cells, (31, 31, 21, 21)).unsqueeze(1)
    for _ in range(2):  # sums of ones stay whole numbers: no rounding on any machine
        ink = F.avg_pool2d(ink, 9, 1, 4, divisor_override=1)
    weights = [((ink - level) * 255 / 1024).round().clamp(0, 255) for level in (3200, 2400, 1600, 900)]
    return torch.stack(weights, 1).to(torch.uint8).view(40, SIDE * SIDE)


def draw_digits(n, bank, rng):
    """(uint8 [n, 1, 28, 28], int64 [n]): pictures number 0..n-1 show the digits 0, 1, ... 9, 0, 1, ..."""
    def draw(low, high):
        return torch.randint(low, high + 1, (n, 1, 1), generator=rng, dtype=torch.int32)

    label = torch.arange(n) % 10
    glyph = (label * 4).view(n, 1, 1) + draw(0, 3)
    turn, slant = draw(-60, 60), draw(-55, 75)  # in 1/256
    # steps in the bank per pixel, in 1/64: a large number makes a small digit
    wide, high = draw(208, 310), draw(208, 310)
    right, down = draw(-10, 10), draw(-10, 10)  # in cells of the bank, which is a quarter of a pixel
    axis = 2 * torch.arange(28, dtype=torch.int32) - 27  # twice the distance from the centre
    across, along = axis.view(1, 1, 28), axis.view(1, 28, 1)
    # the place in the bank of each pixel: a turn by a small angle (tan in 1/256), a slant, a zoom, a shift
    column = (wide * (256 * across + (slant + turn) * along) >> 15) + SIDE // 2 + right
    row = (high * (256 * along - turn * across) >> 15) + SIDE // 2 + down
    outside = (column < 0) | (column >= SIDE) | (row < 0) | (row >= SIDE)
    where = glyph * (SIDE * SIDE) + row.clamp_(0, SIDE - 1) * SIDE + column.clamp_(0, SIDE - 1)
    ink = bank.flatten()[where].to(torch.int32).masked_fill_(outside, 0)
    noise = torch.randint(0, 256, (n, 28, 28), generator=rng, dtype=torch.uint8)
    picture = (ink * draw(145, 255) >> 8) + (noise * draw(10, 110) >> 8)
    return picture.clamp_(0, 255).to(torch.uint8).unsqueeze(1), label


# ---- sentiment ----
VOCAB = {"<PAD>": 0, "<UNK>": 1, "I": 2, "love": 3, "this": 4, "movie": 5, "is": 6, "terrible": 7}
GOOD = "good great lovely funny moving clever bright warm".split()
BAD = "bad awful boring dull sad stupid dark cold".split()
PLAIN = "this movie is was the film story and it actor long short we saw really quite so very today".split()


def sentiment(opts):
    """The two sentences of the tutorial, both for training and for the test."""
    sentences = "I love this movie", "This movie is terrible"  # "This" is not "this"
    x = torch.tensor([[VOCAB.get(word, VOCAB["<UNK>"]) for word in text.split()] for text in sentences])
    both = x, torch.tensor([1, 0])
    return Data(both, both, 2, vocab=len(VOCAB))


def sentiment_large(opts):
    """5,000 sentences, each with one word that praises or blames; "not" before it means the opposite."""
    words = ["<PAD>", "<UNK>", "not", *GOOD, *BAD, *PLAIN]
    rng, rows, y = random.Random(DIGITS_SEED), [], torch.arange(5000) % 2

    def pick(choices):
        return choices[int(rng.random() * len(choices))]  # Python promises only random() to stay the same

    for label in y.tolist():
        negated = rng.random() < 0.3
        core = ["not"] * negated + [pick(GOOD if label != negated else BAD)]
        before, after = int(rng.random() * 6) + 2, int(rng.random() * 4) + 1
        sentence = [pick(PLAIN) for _ in range(before)] + core + [pick(PLAIN) for _ in range(after)]
        # padded in front, so that the last hidden state of an LSTM belongs to the last word
        rows.append([0] * (13 - len(sentence)) + [words.index(word) for word in sentence])
    x = torch.tensor(rows)
    return Data((x[:4000], y[:4000]), (x[4000:], y[4000:]), 2, vocab=len(words))


# ---- random ----
def random_numbers(opts):
    """`random:NxF`: N samples of F normal numbers, labels from a coin; 100x5 by default, as in tutorials."""
    size = re.fullmatch(r"(\d{1,9})x(\d{1,9})", opts.dataset.partition(":")[2] or "100x5")
    samples, features = map(int, size.groups()) if size else (0, 0)
    if not 0 < samples * features <= 10**8:
        raise UserError(f"{opts.dataset!r} is no size\n"
                        "write random:NxF, N samples of F numbers, at most 10^8 in all\n"
                        "for example random:100x10")
    rng = torch.Generator().manual_seed(DIGITS_SEED)
    x = torch.randn(samples, features, generator=rng)
    x = (x * 4096).round() / 4096  # CPUs differ in the last bits of a normal number
    both = x, torch.randint(0, 2, (samples,), generator=rng)
    # labels from a coin cannot be predicted: so the test set is the training set
    return Data(both, both, 2)
