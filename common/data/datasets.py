"""The datasets: this project's by name, and a user's own from a file; opened before the first step.

To add one: write a function of the options that returns a Data, add a line to DATASETS below, and a line to
DATASETS in common/options/rules.py. Code that lives elsewhere needs no edit here: use `--dataset
path/to/file.py:function`. Nothing in a file is ever executed.
"""
import contextlib
import hashlib
import operator
from dataclasses import replace

import torch
from torch.utils.data import TensorDataset

from common.data.drawn import digits, random_numbers, sentiment
from common.data.files import Windows, imagefolder, published, text, tokens
from common.data.splits import Data, DatasetSplit, TensorSplit, as_input, inherited, whole_targets
from common.errors import UserError, blamed
from common.options import Options, call_user
from common.sampler import seeded

DATASETS = {
    "digits": digits,
    "mnist": published,
    "fashion-mnist": published,
    "cifar10": published,
    "imagefolder": imagefolder,
    "sentiment": sentiment,
    "random": random_numbers,
    "text": text,
    "tokens": tokens}
FILES = "--data-dir names a dataset's files; --download fetches mnist, fashion-mnist, cifar10"
WANTED = ("wanted: (x, y, x_test, y_test), tensors, or (train, test), Datasets with __len__ and __getitem__; "
          "an iterable has no place at which a restart can resume")
WORDS = (torch.int16, torch.int32, torch.int64)
PRELOADED: dict[tuple, Data] = {}  # by `facts_of`


def load_data(opts: Options, source: Data | None = None) -> Data:
    """The dataset that `opts.dataset` names, or `source`, as splits."""
    return PRELOADED.get(facts_of(opts)) or opened(opts, source)


def preload(opts: Options) -> None:
    """Opens a dataset of this project, and hashes it, for all processes that will be forked from this one.

    A life then begins with it: drawing `digits` takes half a second. Threads do not survive a fork, so none
    is started. What cannot be opened is an error of those processes, not of this one.
    """
    if ".py" in opts.dataset or opts.download:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.suppress(UserError, OSError):
        PRELOADED[facts_of(opts)] = load_data(opts)
    torch.set_num_threads(threads)


def facts_of(opts):
    """The options from which a dataset of this project follows."""
    return (opts.dataset, opts.data_dir, opts.image_size, opts.augment, opts.vocab_size, opts.seed, opts.task,
            opts.bad_samples)


def opened(opts, source=None):
    if source is None and ".py" not in opts.dataset:
        with blamed(f"dataset {opts.dataset}", FILES):
            source = DATASETS[opts.dataset.partition(":")[0]](opts)  # options know the names
    with blamed(f"dataset {opts.dataset}", WANTED):
        source = source or user_dataset(opts)
        train = split_of(source.train, source, opts, source.augment)
        test = split_of(source.test, source, opts)
        digest = hashlib.sha256(repr((source.known_classes, train.shape, len(train), len(test))).encode())
        if not source.fingerprint:
            for content in (*train.contents(), *test.contents()):
                digest.update(content)
    return replace(source, train=train, test=test, name=opts.dataset, sample_shape=train.shape,
                   fingerprint=source.fingerprint or digest.hexdigest())


def split_of(samples, source, opts, augment=None):
    if not len(samples[1] if isinstance(samples, tuple) else samples):
        raise UserError(f"dataset {opts.dataset} has an empty set\n"
                        "at least one sample to train on is needed, and one to test on")
    if isinstance(samples, Windows):
        return samples
    if not isinstance(samples, tuple):
        return DatasetSplit(samples, source, opts)
    x, y = TensorDataset(*samples).tensors  # of one length
    if x.dtype != torch.uint8:
        x = as_input(x)
    if opts.task == "classify":
        y = whole_targets(y, len(x), source.known_classes, f"dataset {opts.dataset}")
    return TensorSplit(x, y, source, opts.seed, augment)


# ---- a user's own ----
def user_dataset(opts):
    """What a user's function returns: tensors, or Datasets that may have `classes` and `vocab`."""
    with seeded("dataset"):  # what it draws without a seed is the same on every rank, at every start
        returned = call_user(opts.dataset, opts)
    if len(returned) == 4:
        return _of_tensors(*returned)
    train, test = returned
    if type(train) is type(test) is TensorDataset and len(train.tensors) == 2:
        return _of_tensors(*train.tensors, *test.tensors)
    return Data(train, test, known_classes=_count(inherited(train, "classes")),
                vocab=_count(inherited(train, "vocab")), fingerprint=getattr(train, "fingerprint", ""))


def _of_tensors(*tensors):
    x, y, x_test, y_test = [tensor.detach().cpu() for tensor in tensors]
    return Data((x, y), (x_test, y_test),
                vocab=_kinds_in(x, x_test) if x.dtype in WORDS else None,
                known_classes=None if y.is_floating_point() else _kinds_in(y, y_test))


def _kinds_in(*tensors):
    """How many words or classes these numbers need: one more than the largest."""
    return max(int(tensor.max()) for tensor in tensors) + 1


def _count(names):
    """Of names, or a number."""
    return len(names) if hasattr(names, "__len__") else names and operator.index(names)
