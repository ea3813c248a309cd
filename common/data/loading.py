"""Datasets as batches of samples held in memory or read by workers: the same numbers at any world size."""
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from common.data.datasets import find_source, make_ready
from common.data.prefetch import Cuts, Shares, from_workers, map_tensors
from common.data.samples import as_input
from common.data.splits import DatasetSplit, FetchSplit, TensorSplit
from common.data.synthetic import Data
from common.errors import UserError
from common.options import Options
from common.sampler import ElasticSampler


class Batch(NamedTuple):
    """A rank's share of one global batch, cut into its forwards."""

    parts: list[tuple[int, Any]]  # (samples, what collate made of them) for each forward
    ids: list[int]
    size: int  # number of samples in the whole global batch

    @property
    def x(self) -> Any:
        """The inputs, of a share that is one forward of (input, target)."""
        return self.parts[0][1][0]

    @property
    def y(self) -> Any:
        return self.parts[0][1][1]


def load_data(opts: Options, world: Any, source: Data | None = None) -> Data:
    """The dataset that `opts.dataset` names, or `source`, as splits; call on every rank: it may download."""
    if opts.download or opts.dataset == "tar":
        make_ready(opts, world)
    source, name, labels = source or find_source(opts), opts.dataset, opts.task == "classify"
    splits, skip = list[Any](), opts.bad_samples == "skip"
    for part, samples in (("training", source.train), ("test", source.test)):
        augment = source.augment if part == "training" else None
        if isinstance(samples, IterableDataset) or not hasattr(samples, "__len__"):
            raise UserError(f"dataset {name}: a {type(samples).__name__} has no index, so a restart cannot "
                            "find its place\ngive it __len__ and __getitem__(i); an attribute `groups`, "
                            "the sizes of shards or row groups, keeps neighbours together\n"
                            "for tar shards: --dataset tar")
        if not (samples[1].numel() if isinstance(samples, tuple) else len(samples)):
            raise UserError(f"dataset {name}: the {part} set is empty\nat least one sample is needed")
        if isinstance(samples, tuple):
            x, y = checked(name, part, source, labels, *samples)
            splits.append(TensorSplit(x, y, source, opts.seed, augment))
        elif hasattr(samples, "fetch"):
            splits.append(FetchSplit(samples, name, source.known_classes, labels, opts.seed, skip))
        else:
            splits.append(DatasetSplit(samples, name, source, opts.seed, augment, source.plain, labels, skip))
    train, test = splits
    if train.shape != test.shape and all(getattr(split, "labels", True) for split in splits):
        raise UserError(f"dataset {name}: samples to train on have shape {train.shape}, to test {test.shape}")
    fingerprint = source.fingerprint or hash_splits(name, splits, source.known_classes, train.shape)
    if callable(fingerprint):  # it takes long, and the ranks of a node see the same files
        fingerprint = world.once_per_node("fingerprint", fingerprint)
    if order := ElasticSampler(train, 1).name:
        fingerprint = hashlib.sha256(f"{fingerprint} {order}".encode()).hexdigest()
    return replace(source, train=train, test=test, name=name, sample_shape=train.shape,
                   fingerprint=fingerprint)


def checked(name, part, source, labels, x, y):
    """(x, y) as a split takes them; UserError for tensors that cannot be trained on."""
    odd = x.is_complex() or y.is_complex() or y.is_floating_point() or y.dim() != 1
    if not x.numel() or x.shape[:1] != y.shape[:1] or labels and (x.dim() < 2 or odd):
        raise UserError(f"dataset {name}: {part} samples {tuple(x.shape)} with labels {tuple(y.shape)}, "
                        f"{x.dtype} and {y.dtype}\n"
                        "wanted: a label for each sample, which has one dimension or more; a whole number\n"
                        "for other targets write a task: --task path/to/file.py:function")
    if labels and (y.min() < 0 or y.max() >= source.known_classes):
        raise UserError(f"dataset {name}: {part} labels from {y.min()} to {y.max()}\n"
                        f"wanted: 0 to {source.known_classes - 1}")
    if source.vocab and x.min() < 0:
        raise UserError(f"dataset {name}: {part} samples hold word number {x.min()}\nwanted: 0 or more")
    return (x if x.dtype == torch.uint8 else as_input(x)), y


def hash_splits(name, splits, classes, shape):
    """A hash of every byte in memory, or of a Dataset's size, shape and a few samples."""
    if any(isinstance(split, FetchSplit) for split in splits):
        raise UserError(f"dataset {name} has `fetch` but no `fingerprint`\n"
                        "give its training set this attribute: a text that changes when the data does")
    looks = [split.look() for split in splits if hasattr(split, "look")]
    digest = hashlib.sha256(repr((classes, shape, *map(len, splits), *looks)).encode())
    for tensor in (getattr(split, part) for split in splits if split.in_memory for part in ("x", "y")):
        digest.update(memoryview(tensor.numpy()).cast("B"))
    return digest.hexdigest()


# ---- batches ----
def batches(split: Any, order: ElasticSampler, opts: Options) -> Iterator[Batch]:
    """Yield this rank's Batch of every global batch that is left of `order`, on the CPU.

    A share may be empty, without any part: every rank yields the same number of batches.
    """
    shares = Shares(split, order.epoch, opts.augment != "none", opts.sync_bn or opts.shard)
    cuts, pin = Cuts(order, opts), torch.cuda.is_available() and "cpu" not in (opts.device, *opts.devices)
    loaded: Any = map(shares.load, cuts)
    if opts.workers and not split.in_memory:
        loaded = from_workers(shares, cuts, opts.workers, pin)
    elif pin:
        loaded = ((map_tensors(torch.Tensor.pin_memory, parts), ids) for parts, ids in loaded)
    for (parts, ids), size in zip(loaded, order.batch_sizes(), strict=True):
        yield Batch(parts, ids, size)
