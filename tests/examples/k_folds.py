"""Three runs in one script, one after another."""

from beside import labelled
from torch import nn, optim

RUNS = 3
ALL = labelled(72, 6)


def made(before):
    net = nn.Linear(6, 3)
    fold = len(before)
    return {
        "net": net,
        "optimizer": optim.SGD(net.parameters(), 0.5),
        "dataset": [sample for i, sample in enumerate(ALL) if i % 3 != fold],
        "test_set": ALL[fold::3],
    }
