"""What a net remembers where no checkpoint looks."""

import math
import random

import numpy
import pytest
import torch
from samples import state_of
from torch import nn

from common.options import Options


class Remembers(nn.Module):
    """`act` runs in each forward of a training."""

    def __init__(self, act):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.act = act
        self.kept = {}
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        self.act(self)
        return self.layer(x)


def after_three_steps(act, capsys):
    opts = Options()
    net = Remembers(act)
    state = state_of(net, opts)
    for _ in range(3):
        net(torch.ones(4, 3)).sum().backward()
        state.update(4)
    return capsys.readouterr().err


def derived(net):
    net.twice = net.layer.weight * 2  # made afresh in each forward


def cached(net):
    net.kept.setdefault("size", 3)


def counted(net):
    net.kept["calls"] = net.kept.get("calls", 0) + 1


def appended(net):
    net.kept["history"] = [*net.kept.get("history", []), torch.zeros(())]


def drawn(make, draw):
    def act(net):
        net.kept.setdefault("source", make())
        draw(net.kept["source"])

    return act


@pytest.mark.parametrize(
    "act, name",
    [
        (counted, "kept"),
        (appended, "kept"),
        (lambda net: net.cache.add_(1), "cache"),
        (drawn(torch.Generator, lambda source: torch.rand(1, generator=source)), "kept"),
        (drawn(random.Random, lambda source: source.random()), "kept"),
        (drawn(numpy.random.default_rng, lambda source: source.random()), "kept"),
    ],
    ids=["a number", "a list", "a buffer that is not persistent", "torch's draws", "Python's", "numpy's"],
)
def test_what_changes_outside_of_the_checkpoint_is_warned_of_once(act, name, capsys):
    words = after_three_steps(act, capsys)
    assert words.count("warning") == 1 and f"training changes {name}," in words


@pytest.mark.parametrize(
    "act", [derived, cached, lambda net: net.mean.add_(1), lambda net: net.cache.fill_(math.nan)]
)
def test_nothing_is_printed_of_what_is_saved_or_computed_afresh(act, capsys):
    assert after_three_steps(act, capsys) == ""
