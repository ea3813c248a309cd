"""A dataset's training or test set as a function: `fetch(ids, epoch, augment)` makes one batch of samples.

The same ids give the same batch in any process: augmentation and other random choices are a function of
(seed, epoch, id of the sample), so no worker and no rank has a generator of its own to save.
"""
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import default_collate, get_worker_info

from common.data.prefetch import leaves, map_tensors
from common.errors import UserError, one_line, out_of_memory, say
from common.sampler import seeded, uniforms


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


# ---- splits ----
class TensorSplit:
    """Samples in memory: a batch costs one index operation, not one call per sample."""

    in_memory, tokens = True, 1

    def __init__(self, x, y, source, seed, augment=None):
        whole_numbers = not y.is_floating_point() and y.dtype != torch.bool
        self.x, self.y = x.contiguous(), (y.long() if whole_numbers else y).contiguous()
        self.shape, self.classes = tuple(x.shape[1:]), source.known_classes
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
            x = self.augment(x, uniforms(ids, self.seed, epoch))
        if x.dtype == torch.uint8:
            x = x.float().mul_(self.scale).add_(self.shift)
        return x, y


class DatasetSplit:
    """A map-style Dataset; before each sample, (seed, epoch, id) seeds torch, Python and numpy.

    With `labels` samples are (x, class), and checked. All others become a batch in the dataset's own method
    `collate(list of samples)`, or in torch's default_collate.
    """

    in_memory = False

    def __init__(self, dataset, name, source, seed, augment=None, plain=None, labels=True, skip=False):
        self.dataset, self.name, self.classes, self.seed = dataset, name, source.known_classes, seed
        self.augment, self.plain, self.labels, self.shape = augment or plain, plain, False, None
        self.groups, self.weights = getattr(dataset, "groups", None), getattr(dataset, "weights", None)
        self.collate, self.tokens = inherited(dataset, "collate"), 1
        self.skip, self.note, self.told = skip, None, set()  # note: how a ledger takes an event
        self.first = next((id for id in range(len(self)) if self.readable(id, 0, False)), None)
        if self.first is None:
            raise UserError(f"dataset {name}: none of its {len(self):,} samples can be read")
        first = self.sample(self.first, 0, False)
        pair = isinstance(first, (tuple, list)) and len(first) == 2
        if labels and not self.collate and (pair and not isinstance(first[0], (dict, tuple, list))):
            self.labels, first = True, self.sample(self.first, 0, False)
        self.shape = tuple(getattr(first[0] if pair else first, "shape", ()))
        self.tokens = 1 if self.labels else widest(self.fetch([self.first]))

    def __len__(self):
        return len(self.dataset)

    def fetch(self, ids, epoch=0, augment=False):
        """A batch of these samples; `augment` chooses one of the source's two transforms, if it has any.

        With --bad-samples skip it lacks those that cannot be read; it is None if it lacks all.
        """
        samples = (sample for id in ids for sample in self.readable(id, epoch, augment))
        if self.labels:
            return stacked(samples, len(ids))
        if not (samples := list(samples)):
            return None
        try:
            with seeded(self.seed, epoch, "collate", ids[0]):  # it may mask words at random
                return (self.collate or collate)(samples)
        except UserError:
            raise
        except Exception as error:
            few = ", ".join(map(str, ids[:3]))
            raise UserError(f"dataset {self.name}: samples {few}, ... are no batch: {one_line(error)}\n"
                            "wanted: samples of one shape, or a method collate(samples) of the dataset, "
                            "which may pad them") from error

    def readable(self, id, epoch, augment):
        """[the sample]; [] if it is bad and to be skipped."""
        try:
            return [self.sample(id, epoch, augment)]
        except Exception as error:
            if not self.skip or getattr(error, "errno", None) or out_of_memory(error):  # a restart may help
                raise
            if id not in self.told:
                say(f"warning: sample {id} is left out: {one_line(error)}", sys.stderr)
            self.told.add(id)
            if self.note:
                self.note("bad_sample", id=id, epoch=epoch, why=one_line(error))
            return []

    def sample(self, id, epoch, augment):
        transform = self.augment if augment else self.plain
        with seeded(self.seed, epoch, id):
            found = self.dataset[id]
            if transform:
                found = (transform(found[0]), *found[1:])
        return self.labelled(id, found) if self.labels else found

    def labelled(self, id, found):
        """(input, class) of a sample; a UserError if that would cut something off."""
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise self.refuse(id, f"is a {type(found).__name__}", "(x, y)")
        try:
            x, y = as_input(torch.as_tensor(found[0])), whole(found[1])
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            types = ", ".join(type(part).__name__ for part in found)
            raise self.refuse(id, f"is ({types}): {one_line(error)}",
                              "(tensor, label), the label a whole number; for other targets write a "
                              "--task path/to/file.py:function") from error
        if self.shape is not None and tuple(x.shape) != self.shape:
            raise self.refuse(id, f"has shape {tuple(x.shape)}", f"{self.shape}, the shape of sample 0")
        if not 0 <= y < (self.classes or y + 1):
            wanted = f"0 to {self.classes - 1}" if self.classes else "0 or more"
            raise self.refuse(id, f"has label {y}", wanted)
        return x, y

    def look(self):
        """(label, mean size of the numbers) of three samples; None for one that differs when read again."""
        def once(id):
            if not self.readable(id, 0, False):
                return None
            numbers = leaves(self.sample(id, 0, False) if self.labels else self.fetch([id]))
            means = [f"{x.double().abs().mean():.2e}" for x in numbers]  # the CPU may decide the last bits
            return (self.sample(id, 0, False)[1], *means) if self.labels else means

        ids = sorted({0, len(self) // 2, len(self) - 1})
        return [found if (found := once(id)) == once(id) else None for id in ids]

    def refuse(self, id, fact, wanted):
        return UserError(f"dataset {self.name}: sample {id} {fact}\nwanted: {wanted}")


class FetchSplit:
    """A Dataset whose own `fetch(ids, epoch, augment)` makes a whole batch at once."""

    def __init__(self, split, name, classes, labels=True):
        self.split, self.name, self.classes, self.labels = split, name, classes, labels
        first = self.fetch([0])
        x = first[0] if isinstance(first, (tuple, list)) else first
        self.in_memory = getattr(split, "in_memory", True)  # if not, loading processes fetch ahead
        self.shape = getattr(split, "shape", tuple(getattr(x, "shape", ())[1:]))
        self.tokens = getattr(split, "tokens", None) or widest(first)

    def __len__(self):
        return len(self.split)

    def __getattr__(self, name):
        return getattr(self.split, name)

    def fetch(self, ids, epoch=0, augment=False):
        batch = self.split.fetch(ids, epoch, augment)
        y = batch[1] if self.labels and isinstance(batch, (tuple, list)) and len(batch) == 2 else None
        if y is not None and (y.is_floating_point() or y.numel() and y.min() < 0):
            raise UserError(f"dataset {self.name}: targets of {y.dtype} from {y.min():g} on\n"
                            "wanted: whole numbers, 0 or more: the mean counts ignored targets (-100) too\n"
                            "use --task tokens, whose mean leaves them out, or a task of your own")
        return batch


def stacked(samples, most):
    """(x, y) of up to `most` pairs, each copied to its place at once; in a worker into shared memory."""
    x, labels = torch.empty(0), []
    for image, label in samples:
        if not labels:
            shape, x = (most, *image.shape), torch.empty(0, dtype=image.dtype)
            if get_worker_info():
                x.set_(torch.UntypedStorage._new_shared(most * image.nbytes), 0, shape)
            x.resize_(shape)
        x = x if x.dtype == image.dtype else x.float()
        x[len(labels)] = image
        labels.append(label)
    return (x[:len(labels)], torch.tensor(labels)) if labels else None


def inherited(dataset, name):
    """An attribute of a dataset, or of the one that a Subset (as random_split makes it) is part of."""
    while dataset is not None:
        if (found := getattr(dataset, name, None)) is not None:
            return found
        dataset = getattr(dataset, "dataset", None)
    return None


def whole(label):
    """The number of a class; a ValueError if int() would round it."""
    if float(label) != int(label):
        raise ValueError(f"label {float(label):g} is not a whole number")
    return int(label)


def widest(batch):
    """The number of tokens or pixels with a class, of a batch of one sample."""
    return max([1, *(leaf.numel() for leaf in leaves(batch) if leaf.dtype == torch.int64)])


def collate(samples):
    """torch's default_collate, which turns Python's numbers into float64; nets need float32."""
    return map_tensors(lambda x: x.float() if x.dtype == torch.float64 else x, default_collate(samples))


def as_input(x):
    """What a net accepts: bytes become 0..1, other numbers float32, indices int64."""
    if x.is_complex():
        raise TypeError(f"{x.dtype}: its imaginary parts would be lost")
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    return x.float() if x.is_floating_point() or x.dtype == torch.bool else x.long()
