"""Nets and data for the tests of --virtual-ranks, given to the scripts as `--model tests/tools/nets.py:cnn`
and so on.
"""

import torch
from torch import nn
from torch.nn import functional as F

WORDS, LENGTH = 23, 12


def cut(count, x, y):
    """So many to train on, the others to test on."""
    return x[:count], y[:count], x[count:], y[count:]


def pictures():
    """(x, y, x_test, y_test): 107 pictures, so that every epoch ends in a short batch."""
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(150, 1, 12, 12, generator=draws)
    y = torch.randint(4, (150,), generator=draws)
    x += y.view(-1, 1, 1, 1) * 0.2
    return cut(107, x, y)


def colours():
    """Pictures of three channels, as torchvision's nets take them."""
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(72, 3, 32, 32, generator=draws)
    y = torch.randint(3, (72,), generator=draws)
    return cut(64, x, y)  # 24, 24, 16: no slice of one, which BatchNorm refuses


def large_pictures():
    """As small as AlexNet takes them."""
    x = torch.randn(10, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    return x[:8], torch.arange(8) % 2, x[8:], torch.arange(2)


def words():
    """Sequences of words; to be predicted: the first of them."""
    x = torch.randint(WORDS, (110, LENGTH), generator=torch.Generator().manual_seed(3))
    return cut(91, x, x[:, 0])


def sentences():
    """Enough for batches of 1,500; to be predicted: whether the first word is even."""
    x = torch.randint(WORDS, (5000, LENGTH), generator=torch.Generator().manual_seed(6))
    return cut(4000, x, x[:, 0] % 2)


def cnn(data):
    """Convolutions with BatchNorm, dropout, and a buffer that does not move and is not finite."""
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.Conv2d(8, 12, 3, padding=1),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12 * 9, 32),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(32, data.classes),
    )
    net[0].register_buffer("infinite", torch.tensor([float("-inf"), 1.0]))
    return net


class Gpt(nn.Module):
    """Two blocks whose parts the net calls itself, tied weights, dropout, one parameter that is never used
    and one that is used at times.
    """

    def __init__(self, width=16):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "mix": nn.Linear(LENGTH, LENGTH)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.never = nn.Parameter(torch.ones(3))
        self.at_times = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = F.dropout(self.words(x) + self.places.weight, 0.1, self.training)
        if int(x[0, 0]) % 3 == 0:  # of a slice's first sample: so it differs by slice
            h = h + self.at_times
        for block in self.blocks:
            mixed = block["mix"](block["norm"](h).mT).mT
            h = h + F.dropout(F.gelu(mixed), 0.1, self.training)
        return self.head(self.norm(h[:, -1]))


def gpt():
    return Gpt()
