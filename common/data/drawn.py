"""Datasets that a program draws: no download, and the same bits on every machine.

All random numbers are integers from one seeded generator, and pictures are computed in integers, so that
neither the CPU nor the version of torch can change the data, and with it the fingerprint of a run.
"""

import torch
import torch.nn.functional as F

from common.data.splits import Data

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
SIDE = 112  # cells of a glyph's square, four for a pixel
SEED = 20240711  # of the data, not of a run: every run trains on the same pictures


def digits(opts):
    """Noisy 28x28 pictures of digits, moved, turned, slanted: 12,000 to train, 2,000 to test."""
    rng = torch.Generator().manual_seed(SEED)
    bank = glyph_bank()
    thousands = [draw_digits(1000, bank, rng) for _ in range(14)]
    x = torch.cat(thousands)
    y = torch.arange(14000) % 10
    return Data((x[:12000], y[:12000]), (x[12000:], y[12000:]), known_classes=10, mean=0.22, std=0.27)


def glyph_bank():
    """uint8 [10 digits * 4 weights, SIDE, SIDE]: each digit in four line widths; empty at the edges."""
    rows = [[ink == "#" for ink in line.ljust(60)] for line in GLYPHS.strip("\n").split("\n")]
    cells = torch.tensor(rows).float()
    cells = cells.view(7, 10, 6)[:, :, :5]
    cells = cells.transpose(0, 1)
    cells = cells.repeat_interleave(10, 1)
    cells = cells.repeat_interleave(10, 2)  # 70 x 50 of 112 x 112
    ink = F.pad(cells, (31, 31, 21, 21))
    ink = ink.unsqueeze(1)
    for _ in range(2):  # sums of ones stay whole numbers: no rounding on any machine
        ink = F.avg_pool2d(ink, 9, 1, 4, divisor_override=1)
    levels = torch.tensor([3200, 2400, 1600, 900])
    weights = (ink - levels.view(4, 1, 1)) * 255 / 1024
    weights = weights.round().clamp(0, 255)
    return weights.to(torch.uint8).flatten(0, 1)


def draw_digits(n, bank, rng):
    """uint8 [n, 1, 28, 28]: pictures number 0..n-1 show the digits 0, 1, ... 9, 0, 1, ..."""

    def draw(low, high):
        return torch.randint(low, high + 1, (n, 1, 1), generator=rng, dtype=torch.int32)

    digit = torch.arange(n).view(n, 1, 1) % 10
    glyph = digit * 4 + draw(0, 3)
    turn = draw(-60, 60)  # in 1/256
    slant = draw(-55, 75)
    # steps in the bank per pixel, in 1/64: a large number makes a small digit
    wide = draw(208, 310)
    high = draw(208, 310)
    right = draw(-10, 10)  # in cells of the bank
    down = draw(-10, 10)
    axis = 2 * torch.arange(28, dtype=torch.int32) - 27  # twice the distance from the centre
    across = axis.view(1, 1, 28)
    along = axis.view(1, 28, 1)
    # the place in the bank of each pixel: a turn by a small angle (tan in 1/256), a slant, a zoom, a shift
    column = 256 * across + (slant + turn) * along
    column = (wide * column >> 15) + SIDE // 2 + right
    row = 256 * along - turn * across
    row = (high * row >> 15) + SIDE // 2 + down
    row = row.clamp(0, SIDE - 1)
    column = column.clamp(0, SIDE - 1)
    ink = bank[glyph, row, column]
    noise = torch.randint(0, 256, (n, 28, 28), generator=rng, dtype=torch.uint8)
    ink = ink * draw(145, 255) >> 8
    noise = noise * draw(10, 110) >> 8
    picture = ink + noise
    return picture.clamp(0, 255).to(torch.uint8).unsqueeze(1)


# ---- sentiment ----
def sentiment(opts):
    """The two sentences of the tutorial, both for training and for the test."""
    good = [2, 3, 4, 5]  # I love this movie
    bad = [1, 5, 6, 7]  # This movie is terrible; "This" is not "this", but an unknown word
    both = (torch.tensor([good, bad]), torch.tensor([1, 0]))
    return Data(both, both, known_classes=2, vocab=8)


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
    return Data((x, y), (x, y), known_classes=2, fingerprint=opts.dataset)
