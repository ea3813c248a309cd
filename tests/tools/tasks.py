"""Jobs that are no classification: for each a net, a dataset and a task, as a user would write them.

train_ddp.py --task tests/tools/tasks.py:padded --model tests/tools/tasks.py:padded_net --dataset tests/tools/tasks.py:padded_data
"""  # noqa: E501

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset


class Drawn(Dataset):
    """Sample i is a function of i."""

    def __init__(self, n, make):
        self.n = n
        self.make = make
        self.fingerprint = f"{make.__name__} {n}"

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return self.make(torch.Generator().manual_seed(i))


# ---- regression: float targets; samples with weights, so a count may be any number ----
def regression(net, batch):
    x, y = batch
    weight = x[:, 0].sigmoid()
    error = net(x).squeeze(1) - y
    return {"loss": ((weight * error.square()).sum(), weight.sum()), "mae": (error.abs().sum(), len(y))}


def regression_data():
    def make(draw):
        x = torch.randn(6, generator=draw)
        return x, x.sum().item() + 5  # a Python float

    return Drawn(74, make), Drawn(21, make)


def regression_net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


# ---- dicts of unequal lengths, padded to the longest of a forward, with a mask; -100 does not count ----
class Words(Drawn):
    def collate(self, samples):
        words, labels = (
            nn.utils.rnn.pad_sequence([sample[key] for sample in samples], True, padding)
            for key, padding in (("words", 0), ("labels", -100))
        )
        return {"x": {"words": words, "mask": words != 0}, "y": labels}


class Tagger(nn.Module):
    """Each word's tag from the word and the mean of its sentence."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(12, 3)

    def forward(self, words, mask):
        x = self.drop(self.embed(words))
        mean = (x * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.head(torch.cat([x, mean.expand_as(x)], dim=2))


def padded(net, batch):
    out = net(**batch["x"])
    y = batch["y"]
    real = y != -100
    return {
        "loss": (F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum"), real.sum()),
        "acc": ((out.argmax(2) == y).logical_and(real).sum(), real.sum()),
    }


def padded_data():
    def make(draw):
        words = torch.randint(1, 20, (int(torch.randint(2, 12, (), generator=draw)),), generator=draw)
        labels = words % 3
        labels[torch.rand(len(words), generator=draw) < 0.4] = -100  # some samples have no target at all
        return {"words": words, "labels": labels}

    return Words(74, make), Words(21, make)


def padded_net():
    return Tagger()
