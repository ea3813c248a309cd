"""The two sets of a dataset: `fetch(ids, epoch, augment)` makes one batch of samples.

From what a function of datasets.py or of a user returns to a Data: `data_of` makes Samples of each set (of a
user's Dataset: extras/own_data.py), looks at the first one that can be read, and hashes the contents. The
same ids give the same batch in any process: augmentation and other random choices are a function of (seed,
epoch, id of the sample), so no worker and no rank has a generator of its own to save.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from common.errors import UserError
from common.options import Options, extra

Nested = Any  # of dicts, lists and tuples, with tensors as leaves: what a collate returns


@dataclass(frozen=True)
class DataFacts:
    """What a net is built from."""

    name: str
    known_classes: int | None
    sample_shape: tuple[int, ...]
    vocab: int | None

    @property
    def classes(self) -> int:
        """Return their number. Only some models ask for it: a regression has no classes."""
        if self.known_classes is None:
            raise UserError(
                f"dataset {self.name} does not tell its number of classes\n"
                "give its training set an attribute `classes` (a number, or the names), "
                "or use a --model of your own that does not need it"
            )
        return self.known_classes


class Samples:
    """A set: `fetch` makes a batch of it, `contents` are bytes that change when the data does."""

    first = 0  # a sample that can be read
    tokens = 1  # of a sample
    one_by_one = False  # each is a call of a user's: processes may load them ahead
    note = None  # note("bad_sample", ...) writes to the ledger
    set_epoch = None  # of a dataset that has one

    fetch: Callable[..., Nested]  # of (ids, epoch=0, augment=False): these samples as a batch
    contents: Callable[[], Iterable]

    def __init__(self, count: int, opts: Options, classes: int | None) -> None:
        self.count = count
        self.name = f"dataset {opts.dataset}"
        self.seed = opts.seed
        self.classify = opts.task == "classify"
        self.classes = classes  # targets are below it; None: the dataset does not tell

    def __len__(self) -> int:
        return self.count

    def look(self) -> Nested:
        """Take the shape of samples from the first one that can be read; return the batch of that one."""
        for id in range(len(self)):
            batch = self.fetch([id])
            tensors = leaves(batch)
            if tensors:
                x = tensors[0]
                self.first = id
                self.shape = x.shape[1:]
                self.tokens = x.numel() if x.dtype == torch.int64 else 1
                return batch
        raise UserError(
            f"{self.name} has an empty set: none of its {len(self):,} samples can be read, or has a tensor\n"
            "at least one is needed to train on, and one to test on"
        )


class TensorSamples(Samples):
    """Samples in memory: a batch costs one index operation, not one call per sample.

    `mean` and `std` are those of uint8 pixels scaled to 0..1, or of their channels; `augment` changes
    pictures, as `flip` of extras/datasets.py does.
    """

    def __init__(self, tensors, opts, classes, mean=0.0, std=1.0, augment=None):
        x, y = TensorDataset(*tensors).tensors  # of one length
        super().__init__(len(y), opts, classes)
        if not is_picture(x):
            x = extra("as_input")(x)
        if self.classify:
            y = whole_targets(y, len(x), classes, self.name)
        self.x = x.contiguous()
        self.y = y.contiguous()
        self.augment = augment
        mean = torch.tensor(mean)[..., None, None]
        std = torch.tensor(std)[..., None, None]
        self.scale = 1 / (255 * std)
        self.shift = -mean / std

    def fetch(self, ids, epoch=0, augment=False):
        rows = torch.as_tensor(ids, dtype=torch.int64)
        x = self.x.index_select(0, rows)
        y = self.y.index_select(0, rows)
        if augment and self.augment:
            x = self.augment(x, extra("uniforms")(rows, self.seed, epoch))
        if is_picture(x):
            x = x.float().mul_(self.scale).add_(self.shift)
        return x, y

    def contents(self):
        return [part.flatten().view(torch.uint8).numpy() for part in (self.x, self.y)]


@dataclass(frozen=True)
class Data(DataFacts):
    """A dataset: its two sets, and a text that changes when one of them does."""

    train: Samples
    test: Samples
    fingerprint: str


def data_of(
    opts: Options,
    train: Any,
    test: Any,
    classes: int | None = None,
    vocab: int | None = None,
    fingerprint: str = "",
    **pictures: Any,
) -> Data:
    """Make the Data of two sets: each (x, y) tensors, Samples, or a map-style Dataset.

    `pictures` are arguments of TensorSamples. Without a fingerprint the sets are hashed.
    """
    sets = []
    for samples in (train, test):
        if isinstance(samples, tuple):
            samples = TensorSamples(samples, opts, classes, **pictures)
        elif not isinstance(samples, Samples):
            samples = extra("dataset")(samples, opts, classes)
        batch = samples.look()
        if opts.task == "tokens":
            extra("tokens")(batch, samples.name)
        sets.append(samples)
    first, second = sets
    if not fingerprint:
        digest = hashlib.sha256(repr((classes, first.shape, len(first), len(second))).encode())
        for content in (*first.contents(), *second.contents()):
            digest.update(content)
        fingerprint = digest.hexdigest()
    return Data(opts.dataset, classes, tuple(first.shape), vocab, first, second, fingerprint)


def whole_targets(y: Tensor, count: int, classes: int | None, which: str) -> Tensor:
    """Check targets of `classify`, return them as int64; with `count` 0 there may be any number of them."""
    whole = y.long()
    end = classes or math.inf
    one_each = count in (0, len(y))
    if not one_each or not torch.equal(whole, y) or y.min() < 0 or y.max() >= end:
        raise UserError(
            f"{which}: {len(y)} targets for {count} samples, {y.dtype} from {y.min():g} to "
            f"{y.max():g}\nwanted: for each sample a whole number from 0 on, below {end}\n"
            "for others, also -100, there is --task tokens, or path/to/file.py:function"
        )
    return whole


def is_picture(x: Tensor) -> bool:
    """Return whether a batch holds pictures in bytes."""
    return x.dtype == torch.uint8 and x.dim() == 4


def map_tensors(change: Callable, nested: Nested) -> Nested:
    """Return the same, with each tensor changed, and all else as it was."""
    if isinstance(nested, Tensor):
        return change(nested)
    if isinstance(nested, MutableMapping):
        same = copy.copy(nested)  # of the same type, as default_collate makes it
        for key, value in nested.items():
            same[key] = map_tensors(change, value)
        return same
    if isinstance(nested, (list, tuple)):
        values = [map_tensors(change, value) for value in nested]
        return getattr(nested, "_make", type(nested))(values)  # _make: of a namedtuple
    return nested


def leaves(nested: Nested) -> list[Tensor]:
    """Return its tensors."""
    tensors = []
    map_tensors(tensors.append, nested)
    return tensors
