"""The datasets: this project's by name, and a user's own from a file; opened before the first step.

To add one: write a function of the options that returns a Data, add a line to DATASETS below, and a line to
DATASETS in common/options/rules.py. Code that lives elsewhere needs no edit here: use `--dataset
path/to/file.py:function`. Nothing in a file is ever executed.
"""

import hashlib
import operator
from dataclasses import replace

import torch
from torch.utils.data import TensorDataset

from common.data.drawn import digits, random_numbers, sentiment
from common.data.files import imagefolder, published, text, tokens
from common.data.splits import (
    WORDS,
    Data,
    DatasetSplit,
    TensorSplit,
    Windows,
    as_input,
    inherited,
    whole_targets,
)
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
    "tokens": tokens,
}
FILES = "--data-dir names a dataset's files; --download fetches mnist, fashion-mnist, cifar10"
WANTED = (
    "wanted: (x, y, x_test, y_test), tensors, or (train, test), Datasets with __len__ and __getitem__; "
    "an iterable has no place at which a restart can resume"
)
FACTS = operator.attrgetter(  # the options from which a dataset of this project follows
    "dataset", "data_dir", "image_size", "augment", "vocab_size", "seed", "task", "bad_samples"
)
PRELOADED = {}  # by these


def load_data(opts: Options, source: Data | None = None) -> Data:
    """The dataset that `opts.dataset` names, or `source`, as splits."""
    return PRELOADED.get(FACTS(opts)) or opened(opts, source)


def preload(opts: Options) -> None:
    """Opens a dataset of this project, and hashes it, for all processes that will be forked from this one.

    A life then begins with it: drawing `digits` takes half a second. Threads do not survive a fork, so none
    is started.
    """
    if ".py" in opts.dataset:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    PRELOADED[FACTS(opts)] = load_data(opts)
    torch.set_num_threads(threads)


def opened(opts, source=None):
    make = DATASETS.get(opts.dataset.partition(":")[0], user_dataset)
    way_out = WANTED if source or make is user_dataset else FILES
    with blamed(f"dataset {opts.dataset}", way_out):
        source = source or make(opts)
        train = split_of(source.train, source, opts, source.augment)
        test = split_of(source.test, source, opts)
        facts = (source.known_classes, train.shape, len(train), len(test))
        digest = hashlib.sha256(repr(facts).encode())
        if not source.fingerprint:
            for content in (*train.contents(), *test.contents()):
                digest.update(content)
    return replace(
        source,
        train=train,
        test=test,
        name=opts.dataset,
        sample_shape=tuple(train.shape),
        fingerprint=source.fingerprint or digest.hexdigest(),
    )


def split_of(samples, source, opts, augment=None):
    split = samples
    if isinstance(samples, tuple):
        x, y = TensorDataset(*samples).tensors  # of one length
        if x.dtype != torch.uint8:
            x = as_input(x)
        if opts.task == "classify":
            y = whole_targets(y, len(x), source.known_classes, f"dataset {opts.dataset}")
        split = TensorSplit(x, y, source, opts.seed, augment)
    elif not isinstance(samples, Windows):
        split = DatasetSplit(samples, source, opts)
    if not len(split):
        raise UserError(
            f"dataset {opts.dataset} has an empty set\n"
            "at least one sample to train on is needed, and one to test on"
        )
    return split


# ---- a user's own ----
def user_dataset(opts):
    """What a user's function returns: tensors, or Datasets that may have `classes` and `vocab`."""
    with seeded("dataset"):  # what it draws without a seed is the same on every rank, at every start
        returned = call_user(opts.dataset, opts)
    if len(returned) == 4:
        x, y, x_test, y_test = returned
        vocab = largest(x, x_test) + 1 if x.dtype in WORDS else None
        classes = largest(y, y_test) + 1 if not y.is_floating_point() else None
        return Data((x, y), (x_test, y_test), classes, vocab)
    train, test = returned
    classes = count_of(inherited(train, "classes"))
    vocab = count_of(inherited(train, "vocab"))
    return Data(train, test, classes, vocab, fingerprint=getattr(train, "fingerprint", ""))


def largest(*tensors):
    return int(torch.cat(tensors).max())


def count_of(names):
    """How many names these are; a number counts itself."""
    return len(names) if hasattr(names, "__len__") else names and operator.index(names)
