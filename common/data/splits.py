"""A dataset's training or test set as a function: `fetch(ids, epoch, augment)` makes one batch of samples.

The same ids give the same batch in any process: augmentation and other random choices are a function of
(seed, epoch, id of the sample), so no worker and no rank has a generator of its own to save.
"""
import sys

import torch

from common.data.prefetch import leaves
from common.data.samples import as_input, collate, fitting, inherited, stacked, weights_of, whole, widest
from common.errors import UserError, one_line, out_of_memory, say, speaks_for_node
from common.sampler import seeded, uniforms


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
        self.classify, self.length = labels, len(dataset)  # asked once: all ranks must agree
        self.groups, self.weights = getattr(dataset, "groups", None), weights_of(dataset)
        self.collate, self.tokens = inherited(dataset, "collate"), 1
        self.skip, self.note, self.told = skip, None, set()  # note(name, ...) writes to the ledger
        self.first = next((id for id in range(len(self)) if self.readable(id, 0, False)), None)
        if self.first is None:
            raise UserError(f"dataset {name}: none of its {len(self):,} samples can be read")
        first = self.sample(self.first, 0, False)
        pair = isinstance(first, (tuple, list)) and len(first) == 2
        if labels and not self.collate and (pair and not isinstance(first[0], (dict, tuple, list))):
            self.labels, first = True, self.sample(self.first, 0, False)
        self.shape = tuple(getattr(first[0] if pair else first, "shape", ()))
        self.tokens = 1 if self.labels else widest(self.fetch([self.first]))
        was = repr(first)
        if not self.labels and self.readable(len(self) - 1, 0, False) and repr(first) != was:
            raise self.refuse(self.first, "changes when another one is read", "a copy of what you keep")

    def __len__(self):
        return self.length

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
                batch = (self.collate or collate)(samples)
            return fitting(batch, self, ids)
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
        """(input, class) of a sample; UserError if it holds anything else, or would be changed."""
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            raise self.refuse(id, f"is a {type(found).__name__}", "(x, y)")
        try:
            x, y = as_input(torch.as_tensor(found[0]).detach()), whole(found[1])
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
        looks = [(id, once(id), once(id)) for id in ids]
        if (odd := [id for id, one, two in looks if one != two]) and speaks_for_node():
            say(f"warning: dataset {self.name}: sample {odd[0]} is another one each time it is read, so no "
                "restart is exact\n         let it draw from torch, random or numpy.random: these are seeded",
                sys.stderr)
        return [one if one == two else None for _, one, two in looks]

    def refuse(self, id, fact, wanted):
        return UserError(f"dataset {self.name}: sample {id} {fact}\nwanted: {wanted}")


class FetchSplit:
    """A Dataset whose own `fetch(ids, epoch, augment)` makes a whole batch at once."""

    def __init__(self, split, name, classes, labels=True, seed=0, skip=False):
        self.split, self.name, self.classes, self.classify = split, name, classes, labels
        self.length, self.seed, self.skip = len(split), seed, skip
        first = self.fetch([0])
        x = first[0] if isinstance(first, (tuple, list)) else first
        self.in_memory = getattr(split, "in_memory", True)  # if not, loading processes fetch ahead
        self.shape = getattr(split, "shape", tuple(getattr(x, "shape", ())[1:]))
        self.tokens = getattr(split, "tokens", None) or widest(first)

    def __len__(self):
        return self.length

    def __getattr__(self, name):
        return getattr(self.split, name)

    def fetch(self, ids, epoch=0, augment=False):
        with seeded(self.seed, epoch, "fetch", *ids[:1]):
            return fitting(self.split.fetch(ids, epoch, augment), self, ids)
