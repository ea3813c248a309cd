"""A dataset, and its two sets as functions: `fetch(ids, epoch, augment)` makes one batch of samples.

The same ids give the same batch in any process: augmentation and other random choices are a function of
(seed, epoch, id of the sample), so no worker and no rank has a generator of its own to save.
"""
import copy
import math
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from common.errors import UserError, blamed, one_line, say, speaks_for_node
from common.sampler import seeded, uniforms

Tree = Any  # of dicts, lists and tuples, with tensors as leaves: what a collate returns


class Split(Protocol):
    """One set: what training and evaluation ask of it, however it makes its batches."""

    shape: tuple[int, ...]  # of a sample's input
    classes: int | None
    tokens: int = 1         # of a sample
    first: int = 0          # the id of a sample that can be read
    in_memory: bool = True  # a loading process would only cost time
    note: Callable[..., None] | None = None  # note("bad_sample", ...) writes to the ledger

    def __len__(self) -> int: ...
    def fetch(self, ids: Sequence[int], epoch: int = 0, augment: bool = False) -> Tree: ...
    def contents(self) -> Iterable[Any]: ...


@dataclass(frozen=True)
class Data:
    """A dataset, and the facts a model is built from; `load_data` adds the last two."""

    train: Any  # (x, y) tensors or a map-style Dataset; once loaded, a Split
    test: Any
    known_classes: int | None
    vocab: int | None = None
    mean: float | Tensor = 0.0  # of uint8 pixels scaled to 0..1
    std: float | Tensor = 1.0
    augment: Callable[[Tensor, Tensor], Tensor] | None = None  # of tensors, as `flip` of files.py
    fingerprint: str = ""  # "": of its contents
    name: str = ""
    sample_shape: tuple[int, ...] = ()

    @property
    def classes(self) -> int:
        """Only some models ask for it: a regression has no classes."""
        if self.known_classes is None:
            raise UserError(f"dataset {self.name} does not tell its number of classes\n"
                            "give its training set an attribute `classes` (a number, or the names), "
                            "or use a --model of your own that does not need it")
        return self.known_classes


class TensorSplit(Split):
    """Samples in memory: a batch costs one index operation, not one call per sample."""

    def __init__(self, x, y, source, seed, augment=None):
        self.x = x.contiguous()
        self.y = y.contiguous()
        self.shape = tuple(x.shape[1:])
        self.classes = source.known_classes
        self.seed = seed
        self.augment = augment
        mean = torch.as_tensor(source.mean)
        std = torch.as_tensor(source.std)
        self.scale = 1 / (255 * std)
        self.shift = -mean / std

    def __len__(self):
        return len(self.y)

    def fetch(self, ids, epoch=0, augment=False):
        rows = torch.as_tensor(ids, dtype=torch.int64)
        x = self.x.index_select(0, rows)
        y = self.y.index_select(0, rows)
        if augment and self.augment and len(rows):
            x = self.augment(x, uniforms(rows, self.seed, epoch))
        if x.dtype == torch.uint8:
            x = x.float().mul_(self.scale).add_(self.shift)
        return x, y

    def contents(self):
        return [self.x.flatten().numpy(), self.y.flatten().numpy()]


class DatasetSplit(Split):
    """A Dataset; (seed, epoch, id) seeds torch, Python and numpy before each sample.

    Samples become a batch in its own `collate(samples)`, or in torch's default_collate. A Dataset augments
    by itself. With --bad-samples skip a batch lacks the samples that cannot be read; without any it is None.
    """

    in_memory = False

    def __init__(self, dataset, source, opts):
        self.dataset = dataset
        self.name = f"dataset {opts.dataset}"
        self.seed = opts.seed
        self.classes = source.known_classes
        self.classify = opts.task == "classify"
        self.skip = opts.bad_samples == "skip"
        self.length = len(dataset)  # asked once: ranks must agree
        self.collate = inherited(dataset, "collate") or default_collate
        self.warned_of = set()
        self.first = next((id for id in range(self.length) if self._samples([id], 0)), 0)
        batch = self.fetch([self.first])
        if batch is None:
            raise UserError(f"{self.name}: none of its {self.length:,} samples can be read\n"
                            "at least one is needed to train on, and one to test on")
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        self.shape = tuple(getattr(x, "shape", ())[1:])
        self.tokens = max([1, *(leaf.numel() for leaf in leaves(batch) if leaf.dtype == torch.int64)])

    def __len__(self):
        return self.length

    def fetch(self, ids, epoch=0, augment=False):
        samples = self._samples(ids, epoch)
        if not samples:
            return None
        which = f"{self.name}: samples {list(ids[:3])}"
        with blamed(f"{which} are no batch",
                    "samples of one shape, or a method collate(samples) of the dataset, may pad them"):
            with seeded(self.seed, epoch, "collate", ids[0]):  # it may mask words at random
                batch = self.collate(samples)
            if batch is None and not self.skip:  # it would count as nothing to train on
                raise ValueError("collate returned None")
            if self.collate is default_collate:  # turns Python's numbers into float64
                batch = map_tensors(lambda x: x.float() if x.dtype == torch.float64 else x, batch)
            return self._classified(batch, len(ids), which) if self.classify else batch

    def _samples(self, ids, epoch):
        """Those of the samples that can be read."""
        samples = []
        for id in ids:
            try:
                with seeded(self.seed, epoch, id):
                    with blamed(f"{self.name}: sample {id}", "mend it, or use --bad-samples skip"):
                        samples.append(self.dataset[id])
            except UserError as error:
                if not self.skip:
                    raise
                self._leave_out(id, epoch, one_line(error))
        return samples

    def _leave_out(self, id, epoch, why):
        if id not in self.warned_of:
            say(f"warning: left out: {why}", sys.stderr)
        self.warned_of.add(id)
        if self.note:
            self.note("bad_sample", id=id, epoch=epoch, why=why)

    def _classified(self, batch, count, which):
        """The batch with inputs and targets as nets and losses accept them."""
        is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        y = batch[1] if is_pair else batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(y, Tensor):
            return batch
        y = whole_targets(y, len(y) if self.skip else count, self.classes, which)
        return (map_tensors(as_input, batch[0]), y) if is_pair else batch

    def contents(self):
        """The mean sizes of the numbers of three samples; nothing of one that is another when read again."""
        for id in sorted({0, self.length // 2, self.length - 1}):
            facts = self._sizes_of(id)
            if facts == self._sizes_of(id):
                yield facts
            elif speaks_for_node():
                say(f"warning: {self.name}: sample {id} is another one each time it is read, so no restart "
                    "is exact\n         let it draw from torch, random or numpy.random, which are seeded",
                    sys.stderr)

    def _sizes_of(self, id):
        """In few digits: the CPU may decide the last bits."""
        return " ".join(f"{leaf.double().abs().mean():.3e}" for leaf in leaves(self.fetch([id]))).encode()


def whole_targets(y, count, classes, which):
    """The targets of `classify`, a whole number for each sample; UserError where a mean would be wrong."""
    whole = y.long()
    end = classes or math.inf
    if len(y) != count or not torch.equal(whole, y) or y.min() < 0 or y.max() >= end:
        raise UserError(f"{which}: {len(y)} targets for {count} samples, {y.dtype} from {y.min():g} to "
                        f"{y.max():g}\nwanted: for each sample a whole number from 0 on, below {end}\n"
                        "for others, also -100, there is --task tokens, or path/to/file.py:function")
    return whole


def as_input(x):
    """The tensor as a net accepts it: bytes become 0..1, other numbers float32, indices int64."""
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    if x.is_floating_point():
        return x.float()
    return x if x.is_complex() else x.long()


def inherited(dataset, name):
    """An attribute of a dataset, or of the one that a Subset (as random_split makes it) is part of."""
    value = getattr(dataset, name, None)
    if value is None and hasattr(dataset, "dataset"):
        return inherited(dataset.dataset, name)
    return value


def map_tensors(change: Callable, tree: Tree) -> Tree:
    """The same tree, with each tensor changed, and all else as it was."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, MutableMapping):
        same = copy.copy(tree)  # of the same type, as default_collate makes it
        for key, value in tree.items():
            same[key] = map_tensors(change, value)
        return same
    if isinstance(tree, (list, tuple)):
        branches = [map_tensors(change, branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return tree


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, tree)
    return tensors
