"""Datasets as batches of samples held in memory or read by workers: the same numbers at any world size.

Augmentation and other random choices are a function of (seed, epoch, id of the sample): no worker and no rank
has a generator of its own to save.
"""
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from common.data.datasets import find_source, whole
from common.data.download import download
from common.data.prefetch import from_workers
from common.errors import UserError, one_line
from common.options import Options
from common.sampler import ElasticSampler, seeded, uniforms


@dataclass(frozen=True)
class Data:
    """A dataset, and the facts a model is built from."""

    name: str
    train: Any  # a TensorSplit, a DatasetSplit or text.Windows
    test: Any
    classes: int
    sample_shape: tuple
    vocab: int | None
    fingerprint: str  # a hash of all tensors; for files, of names and sizes
    class_names: tuple | None = None


class Batch(NamedTuple):
    x: torch.Tensor  # this rank's share of one global batch
    y: torch.Tensor
    ids: list[int]
    size: int  # number of samples in the whole global batch


# ---- augmentation: x is a copy of the images, u a uniform number in [0, 1) for each ----
def flip(x, u):
    """Mirror half of the images."""
    chosen = (u < 0.5).nonzero().squeeze(1)
    x[chosen] = x.index_select(0, chosen).flip(3)
    return x


def crop_flip(x, u):
    """Move each image by up to 4 pixels in both directions (zeros come in), and mirror half of them."""
    n, channels, height, width = x.shape
    choice = (u * (9 * 9 * 2)).long().view(n, 1)
    mirrored, down, right = choice % 2, choice // 2 % 9, choice // 18
    rows, columns = torch.arange(height), torch.arange(width)
    rows = (rows + down) * (width + 8)
    columns = right + torch.where(mirrored == 1, width - 1 - columns, columns)
    where = (rows.unsqueeze(2) + columns.unsqueeze(1)).view(n, 1, -1).expand(n, channels, -1)
    return F.pad(x, (4, 4, 4, 4)).view(n, channels, -1).gather(2, where).view(x.shape)


AUGMENTATIONS = {None: None, "flip": flip, "crop_flip": crop_flip}


# ---- splits ----
class TensorSplit:
    """Samples in memory: a batch costs one index operation, not one call per sample."""

    in_memory, tokens = True, 1

    def __init__(self, x, y, source, seed, augment=None):
        self.x, self.y, self.shape = x.contiguous(), y.long().contiguous(), tuple(x.shape[1:])
        self.seed, self.augment = seed, augment
        mean, std = torch.tensor(source.mean), torch.tensor(source.std)
        scale, shift = 1 / (255 * std), -mean / std
        # plain numbers for one channel: they are faster than tensors of one element
        self.scale, self.shift = (t.item() if len(t) == 1 else t.view(-1, 1, 1) for t in (scale, shift))

    def __len__(self):
        return len(self.y)

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y) of these samples; augmented as (seed, epoch, id) say."""
        ids = torch.as_tensor(ids, dtype=torch.int64)
        x, y = self.x.index_select(0, ids), self.y.index_select(0, ids)
        if augment and self.augment and len(ids):
            x = self.augment(x, uniforms(ids, self.seed, epoch, 1).squeeze(1))
        if x.dtype == torch.uint8:
            x = x.float().mul_(self.scale).add_(self.shift)
        return x, y


class DatasetSplit:
    """A map-style Dataset; before each sample, (seed, epoch, id) seeds torch, Python and numpy."""

    in_memory, tokens = False, 1

    def __init__(self, dataset, name, source, seed, augment=None, plain=None):
        self.dataset, self.name, self.classes, self.seed = dataset, name, source.classes, seed
        self.augment, self.plain, self.shape = augment or plain, plain, None
        self.groups, self.weights = getattr(dataset, "groups", None), getattr(dataset, "weights", None)
        x, _ = self.sample(0, 0, False)  # its shape and type are those of an empty share, too
        self.shape, self.dtype = tuple(x.shape), x.dtype

    def __len__(self):
        return len(self.dataset)

    def fetch(self, ids, epoch=0, augment=False):
        """(x, y) of these samples; `augment` chooses one of the source's two transforms, if it has any."""
        if not ids:
            return torch.empty(0, *self.shape, dtype=self.dtype), torch.empty(0, dtype=torch.int64)
        x, y = zip(*(self.sample(id, epoch, augment) for id in ids), strict=True)
        return torch.stack(x), torch.tensor(y)

    def sample(self, id, epoch, augment):
        transform = self.augment if augment else self.plain
        with seeded(self.seed, epoch, id):
            found = self.dataset[id]
            if not isinstance(found, (tuple, list)) or len(found) != 2:
                raise self.refuse(id, f"is a {type(found).__name__}", "(x, y)")
            x = transform(found[0]) if transform else found[0]
        try:
            x, y = as_input(torch.as_tensor(x)), whole(found[1])
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise self.refuse(id, f"is ({type(x).__name__}, {type(found[1]).__name__}): {one_line(error)}",
                              "(tensor, label), the label a whole number") from error
        if self.shape is not None and tuple(x.shape) != self.shape:
            raise self.refuse(id, f"has shape {tuple(x.shape)}", f"{self.shape}, the shape of sample 0")
        if not 0 <= y < self.classes:
            raise self.refuse(id, f"has label {y}", f"0 to {self.classes - 1}")
        return x, y

    def look(self):
        """(label, mean size of the numbers) of three samples; None for one that differs when read again."""
        def once(id):
            x, y = self.sample(id, 0, False)
            return y, f"{x.double().abs().mean():.2e}"  # rounded: the last bits may depend on the CPU

        ids = sorted({0, len(self) // 2, len(self) - 1})
        return [found if (found := once(id)) == once(id) else None for id in ids]

    def refuse(self, id, fact, wanted):
        return UserError(f"dataset {self.name}: sample {id} {fact}\nwanted: {wanted}")


class FetchSplit:
    """A split with a `fetch` of its own; all its targets must be classes, as the mean is over all of them."""

    def __init__(self, split, name):
        if lacks := [fact for fact in ("in_memory", "tokens", "shape") if not hasattr(split, fact)]:
            raise UserError(f"dataset {name} has `fetch` but no {', '.join(f'`{fact}`' for fact in lacks)}\n"
                            "wanted: the attributes of Windows in common/data/text.py, or no `fetch`")
        self.split, self.name = split, name
        self.fetch([0])

    def __len__(self):
        return len(self.split)

    def __getattr__(self, name):
        return getattr(self.split, name)

    def fetch(self, ids, epoch=0, augment=False):
        x, y = self.split.fetch(ids, epoch, augment)
        if y.is_floating_point() or y.numel() and y.min() < 0:
            raise UserError(f"dataset {self.name}: targets of {y.dtype} from {y.min():g} on\n"
                            "wanted: whole numbers, 0 or more: the mean counts ignored targets (-100) too\n"
                            "cut the samples to one length, or give padding a class of its own")
        return x, y


def as_input(x):
    """What a net accepts: bytes become 0..1, other numbers float32, indices int64."""
    if x.is_complex():
        raise TypeError(f"{x.dtype}: its imaginary parts would be lost")
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    return x.float() if x.is_floating_point() or x.dtype == torch.bool else x.long()


def load_data(opts: Options, world: Any) -> Data:
    """The dataset that `opts.dataset` names; call on every rank, because of --download."""
    if opts.download or opts.dataset == "tar":
        download(opts, world)
    source, name = find_source(opts), opts.dataset
    splits: list[Any] = []
    for part, samples in (("training", source.train), ("test", source.test)):
        augment = source.augment if part == "training" else None
        if not len(samples[1] if isinstance(samples, tuple) else samples):
            raise UserError(f"dataset {name}: the {part} set is empty\nat least one sample is needed")
        if isinstance(samples, tuple):
            x, y = checked(name, part, source, *samples)
            splits.append(TensorSplit(x, y, source, opts.seed, AUGMENTATIONS[augment]))
        elif hasattr(samples, "fetch"):
            splits.append(FetchSplit(samples, name))
        else:
            splits.append(DatasetSplit(samples, name, source, opts.seed, augment, source.plain))
    shapes = [split.shape for split in splits]
    if shapes[0] != shapes[1]:
        raise UserError(f"dataset {name}: training samples have shape {shapes[0]}, test samples {shapes[1]}")
    fingerprint = source.fingerprint or hash_splits(name, splits, source.classes, shapes[0])
    if callable(fingerprint):  # it takes long, and the ranks of a node see the same files
        fingerprint = world.once_per_node("fingerprint", fingerprint)
    if order := ElasticSampler(splits[0], 1).name:
        fingerprint = hashlib.sha256(f"{fingerprint} {order}".encode()).hexdigest()
    return Data(name, splits[0], splits[1], source.classes, shapes[0], source.vocab, fingerprint,
                source.class_names)


def checked(name, part, source, x, y):
    if y.shape != x.shape[:1]:
        raise UserError(f"dataset {name}: {len(x)} {part} samples, labels {tuple(y.shape)}\n"
                        "wanted: one label for each sample")
    if y.min() < 0 or y.max() >= source.classes:
        raise UserError(f"dataset {name}: {part} labels from {y.min()} to {y.max()}\n"
                        f"wanted: 0 to {source.classes - 1}")
    if source.vocab and x.min() < 0:
        raise UserError(f"dataset {name}: {part} samples hold word number {x.min()}\nwanted: 0 or more")
    return (x if x.dtype == torch.uint8 else as_input(x)), y


def hash_splits(name, splits, classes, shape):
    """A hash of every byte in memory, or of a Dataset's size, shape and a few samples."""
    tensors = [getattr(split, part, None) for split in splits if split.in_memory for part in ("x", "y")]
    if not all(map(torch.is_tensor, tensors)):
        raise UserError(f"dataset {name} has `fetch` but no `fingerprint`\n"
                        "give its training set this attribute: a text that changes when the data does")
    looks = [split.look() for split in splits if hasattr(split, "look")]
    digest = hashlib.sha256(repr((classes, shape, *map(len, splits), *looks)).encode())
    for tensor in tensors:
        digest.update(memoryview(tensor.numpy()).cast("B"))
    return digest.hexdigest()


# ---- batches ----
def batches(split: Any, order: ElasticSampler, opts: Options) -> Iterator[Batch]:
    """Yield this rank's Batch of every global batch that is left of `order`, on the CPU.

    A share may be empty, with x and y of zero samples: every rank yields the same number of batches.
    """
    epoch, augment = order.epoch, opts.augment != "none"
    pin = torch.cuda.is_available() and opts.device != "cpu"
    if split.in_memory or not opts.workers:
        for ids, size in zip(order, order.batch_sizes(), strict=True):
            x, y = split.fetch(ids, epoch, augment)
            yield Batch(*((x.pin_memory(), y.pin_memory()) if pin else (x, y)), ids, size)
        return
    shares = from_workers(split, order, opts.workers, augment, pin)
    for (x, y, ids), size in zip(shares, order.batch_sizes(), strict=True):
        yield Batch(x, y, ids, size)
