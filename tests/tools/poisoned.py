"""What harms: a dataset with a sample that cannot be read, and what runs code where it is unpickled."""

import os

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


class Bomb:
    """Whoever unpickles it makes a folder `canary` where it was pickled."""

    def __reduce__(self):
        return os.mkdir, (f"{os.getcwd()}/canary",)
