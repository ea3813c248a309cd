"""An adapter that eval() merges into the frozen weight, and train() takes out."""

from beside import evaluated
from silent import LowRank
from torch import nn

OPTIONS = {"epochs": 3}
mine = evaluated


def net():
    return nn.Sequential(LowRank(6, 8), nn.Tanh(), nn.Linear(8, 3))
