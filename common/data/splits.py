"""A dataset, and its two sets as functions: `fetch(ids, epoch, augment)` makes one batch of samples.

The same ids give the same batch in any process: augmentation and other random choices are a function of
(seed, epoch, id of the sample), so no worker and no rank has a generator of its own to save.
"""
import copy
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from common.errors import UserError, blamed, may_pass, one_line, say, speaks_for_node
from common.sampler import seeded, uniforms


@dataclass(frozen=True)
class Data:
    """A dataset, and the facts a model is built from; `load_data` adds the last two."""

    train: Any  # (x, y) tensors or a map-style Dataset; once loaded, a split
    test: Any
    known_classes: int | None
    vocab: int | None = None
    mean: tuple = (0.0,)  # of uint8 pixels scaled to 0..1, per channel
    std: tuple = (1.0,)
    augment: Callable | None = None  # of tensors, as `flip` of images.py
    fingerprint: str | Callable[[], str] | None = None  # a function where it takes long; None: what is read
    name: str = ""
    sample_shape: tuple = ()

    @property
    def classes(self) -> int:
        """Only some models ask for it: a regression has no classes."""
        if self.known_classes is None:
            raise UserError(f"dataset {self.name} does not tell its number of classes\n"
                            "give its training set an attribute `classes` (a number, or the names), "
                            "or use a --model of your own that does not need it")
        return self.known_classes


class TensorSplit:
    """Samples in memory: a batch costs one index operation, not one call per sample."""

    in_memory = True
    tokens = 1

    def __init__(self, x, y, source, seed, augment=None):
        self.x = x.contiguous()
        self.y = y.contiguous()
        self.shape = tuple(x.shape[1:])
        self.classes = source.known_classes
        self.seed = seed
        self.augment = augment
        mean = torch.tensor(source.mean)
        std = torch.tensor(source.std)
        self.scale = _per_channel(1 / (255 * std))
        self.shift = _per_channel(-mean / std)

    def __len__(self):
        return len(self.y)

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y) of these samples; augmented as (seed, epoch, id) say."""
        rows = torch.as_tensor(ids, dtype=torch.int64)
        x = self.x.index_select(0, rows)
        y = self.y.index_select(0, rows)
        if augment and self.augment and len(rows):
            x = self.augment(x, uniforms(rows, self.seed, epoch))
        if x.dtype == torch.uint8:
            x = x.float().mul_(self.scale).add_(self.shift)
        return x, y


def _per_channel(numbers):
    """A plain number for one channel: it is faster than a tensor of one element."""
    return numbers.item() if len(numbers) == 1 else numbers.view(-1, 1, 1)


class DatasetSplit:
    """A Dataset; (seed, epoch, id) seeds torch, Python and numpy before each sample.

    Samples become a batch in its own `collate(samples)`, or in torch's default_collate.
    """

    in_memory = False

    def __init__(self, dataset, source, opts):
        self.dataset = dataset
        self.name = opts.dataset
        self.seed = opts.seed
        self.classes = source.known_classes
        self.classify = opts.task == "classify"
        self.skip = opts.bad_samples == "skip"
        self.length = len(dataset)  # asked once: ranks must agree
        self.note = None  # note("bad_sample", ...) writes to the ledger
        self.warned_of = set()
        self.collate = inherited(dataset, "collate")
        self.first = self._first_readable()
        batch = self.fetch([self.first])
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        self.shape = tuple(getattr(x, "shape", ())[1:])
        self.tokens = max([1, *(leaf.numel() for leaf in leaves(batch) if leaf.dtype == torch.int64)])

    def __len__(self):
        return self.length

    def fetch(self, ids, epoch=0, augment=False):
        """A batch of these samples; a Dataset augments by itself.

        With --bad-samples skip it lacks those that cannot be read; it is None if it lacks all.
        """
        samples = self._samples(ids, epoch)
        if not samples:
            return None
        with blamed(f"dataset {self.name}: {named(ids)} are no batch",
                       "samples of one shape, or a method collate(samples) of the dataset, may pad them"):
            with seeded(self.seed, epoch, "collate", ids[0]), torch.no_grad():  # it may mask words at random
                batch = self.collate(samples) if self.collate else collate(samples, self.classify)
            return self._checked(batch, ids)

    def _samples(self, ids, epoch):
        """Those of the samples that can be read."""
        samples = []
        for id in ids:
            try:
                with seeded(self.seed, epoch, id):
                    samples.append(self.dataset[id])
            except Exception as error:
                if not self.skip or may_pass(error):
                    with blamed(f"dataset {self.name}: sample {id}",
                                   "mend it, or use --bad-samples skip"):
                        raise
                self._leave_out(id, epoch, one_line(error))
        return samples

    def _leave_out(self, id, epoch, why):
        if id not in self.warned_of:
            say(f"warning: sample {id} is left out: {why}", sys.stderr)
        self.warned_of.add(id)
        if self.note:
            self.note("bad_sample", id=id, epoch=epoch, why=why)

    def _first_readable(self):
        for id in range(self.length):
            if self._samples([id], 0):
                return id
        raise UserError(f"dataset {self.name}: none of its {self.length:,} samples can be read\n"
                        "at least one is needed to train on, and one to test on")

    def _checked(self, batch, ids):
        """The batch; UserError if `classify` would have no exact mean of it."""
        if batch is None and not self.skip:
            raise UserError(f"dataset {self.name}: {named(ids)} became None\n"
                            "wanted: a batch of them, from the dataset's `collate`")
        pair = isinstance(batch, (tuple, list)) and len(batch) == 2
        y = batch[1] if pair else batch.get("labels") if isinstance(batch, Mapping) else None
        if not self.classify or not isinstance(y, Tensor):
            return batch
        count = len(y) if self.skip else len(ids)
        whole = whole_targets(y, count, self.classes, f"dataset {self.name}: {named(ids)}")
        return (batch[0], whole) if pair else batch

    def look(self):
        """The mean sizes of the numbers of three samples; None for one that differs when read again."""
        looks = []
        for id in sorted({0, self.length // 2, self.length - 1}):
            facts = self._facts_of(id)
            if facts != self._facts_of(id):
                facts = None
                if speaks_for_node():
                    say(f"warning: dataset {self.name}: sample {id} is another one each time it is read, so "
                        "no restart is exact\n         let it draw from torch, random or numpy.random, which "
                        "are seeded", sys.stderr)
            looks.append(facts)
        return looks

    def _facts_of(self, id):
        facts = []
        for tensor in leaves(self.fetch([id])):
            digits = 2 if tensor.is_floating_point() else 15  # the CPU may decide the last bits
            facts.append(f"{tensor.double().abs().mean():.{digits}e}")
        return facts


def whole_targets(y, samples, classes, which):
    """The targets of `classify`, a whole number for each sample; UserError where a mean would be wrong."""
    whole = y.long()
    most = classes or torch.iinfo(torch.int64).max
    if len(y) != samples or not torch.equal(whole, y) or y.numel() and not 0 <= y.min() <= y.max() < most:
        span = f"from {y.min():g} to {y.max():g}" if y.numel() else ""
        raise UserError(f"{which}: {len(y)} targets for {samples} samples, {y.dtype} {span}\n"
                        f"wanted: for each sample a whole number from 0 to {most - 1}\n"
                        "for others, also -100, there is --task tokens, or path/to/file.py:function")
    return whole[:, 0] if y.dim() == 2 and y.shape[1] == 1 else whole


def collate(samples, classify):
    """torch's default_collate, which turns Python's numbers into float64; nets need float32."""
    batch = map_tensors(lambda x: x.float() if x.dtype == torch.float64 else x, default_collate(samples))
    if classify and isinstance(batch, (tuple, list)) and isinstance(batch[0], Tensor):
        return (as_input(batch[0]), *batch[1:])
    return batch


def as_input(x):
    """The tensor as a net accepts it: bytes become 0..1, other numbers float32, indices int64."""
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    if x.is_complex():
        return x
    return x.float() if x.is_floating_point() or x.dtype == torch.bool else x.long()


def named(ids):
    more = ", ..." if len(ids) > 3 else ""
    return f"samples {', '.join(map(str, ids[:3]))}{more}"


def inherited(dataset, name):
    """An attribute of a dataset, or of the one that a Subset (as random_split makes it) is part of."""
    while dataset is not None:
        value = getattr(dataset, name, None)
        if value is not None:
            return value
        dataset = getattr(dataset, "dataset", None)
    return None


# ---- batches that are trees of tensors ----
def map_tensors(change: Callable, tree: Any) -> Any:
    """The same tree of dicts, lists and tuples, with each tensor changed, and all else as it was."""
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


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, tree)
    return tensors
