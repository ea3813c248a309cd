"""What a user's samples, batches and attributes must be, and what is made of them."""
from collections.abc import Mapping

import torch
from torch.utils.data import Subset, default_collate, get_worker_info

from common.data.prefetch import leaves, map_tensors
from common.errors import UserError


def fitting(batch, split, ids):
    """The batch that a user's code made of these samples; UserError if `classify` had no exact mean of it."""
    if batch is None and not split.skip:
        raise UserError(f"dataset {split.name}: its batch of samples {', '.join(map(str, ids[:3]))}, ... "
                        "is None\nreturn what collate or fetch makes of them")
    batch = map_tensors(lambda t: t.detach() if t.requires_grad else t, batch)
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    y = batch.get("labels") if isinstance(batch, Mapping) else batch[1] if pair else None
    if not split.classify or not torch.is_tensor(y):
        return batch
    if y.dtype not in (torch.int64, torch.uint8) or y.numel() and y.min() < 0:
        raise UserError(f"dataset {split.name}: targets of {y.dtype} from {y.min():g} on\n"
                        "wanted: int64 numbers from 0 on: the mean counts ignored targets (-100) too\n"
                        "use --task tokens, whose mean leaves them out, or a task of your own")
    if split.classes and y.numel() and y.max() >= split.classes:
        raise UserError(f"dataset {split.name}: a target is {y.max()}\nwanted: 0 to {split.classes - 1}")
    if len(y) != len(ids) and not split.skip:
        raise UserError(f"dataset {split.name}: {len(ids)} samples became a batch of {len(y)} targets\n"
                        "return them all; --bad-samples skip has the mean over those that are left")
    return batch


def stacked(samples, most):
    """(x, y) of up to `most` pairs, or None; each is copied once, in a worker into shared memory."""
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


def weights_of(dataset):
    """A dataset's `weights`; of a Subset, those that its samples have in the whole dataset."""
    found = getattr(dataset, "weights", None)
    if found is None and isinstance(dataset, Subset) and (found := weights_of(dataset.dataset)) is not None:
        found = torch.as_tensor(found)[torch.as_tensor(dataset.indices)]
    return found


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
    """How many classes a sample has at most (a token or a pixel each), from a batch of one sample."""
    return max([1, *(leaf.numel() for leaf in leaves(batch) if leaf.dtype == torch.int64)])


def collate(samples):
    """torch's default_collate, which turns Python's numbers into float64; nets need float32."""
    with torch.no_grad():
        batch = default_collate(samples)
    return map_tensors(lambda x: x.float() if x.dtype == torch.float64 else x, batch)


def as_input(x):
    """The tensor as a net accepts it: bytes become 0..1, other numbers float32, indices int64."""
    if x.is_complex():
        raise TypeError(f"{x.dtype}: its imaginary parts would be lost")
    if x.layout != torch.strided or x.is_meta:
        raise TypeError(f"{x.layout} on {x.device} cannot be stacked")
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    return x.float() if x.is_floating_point() or x.dtype == torch.bool else x.long()
