"""A dataset with a sample that cannot be read, for tests of runs that come to nothing."""

import torch
from torch.utils.data import Dataset


class Poisoned(Dataset):
    classes = 2

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError(f"sample {index} cannot be read")
        return torch.full((5,), index / 200), index % 2


def data():
    return Poisoned(37), Poisoned()
