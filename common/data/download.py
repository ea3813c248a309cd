"""Fetching published datasets, when asked to: through torchvision, which knows their checksums."""
import os
import shutil
import socket
from pathlib import Path

from common.data.datasets import find_source
from common.errors import UserError, one_line

CLASSES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}  # in torchvision.datasets


def download(opts, world):
    """Fetch the dataset unless it exists and is whole; call on every rank: one per node fetches, all wait.

    Shards are indexed instead, unless they are.
    """
    if opts.dataset not in CLASSES and opts.dataset != "tar":
        raise UserError(f"dataset {opts.dataset} has nothing to download\n"
                        f"leave --download out, it is for {', '.join(CLASSES)}")
    with world.all_or_none("download"):
        try:
            if world.local_rank == 0:
                (find_source if opts.dataset == "tar" else fetch)(opts)
        except UserError:
            raise
        except Exception as error:  # of any kind: the other ranks wait
            raise UserError(f"dataset {opts.dataset} cannot be downloaded to {opts.data_dir}\n"
                            f"{one_line(error)}") from error


def fetch(opts):
    try:
        find_source(opts)
        return
    except UserError:
        pass  # missing or damaged
    from torchvision import datasets
    # Into a folder aside, and each file is renamed when all are whole: neither a later start nor another node
    # that shares the folder can take half a download for data.
    data_dir = Path(opts.data_dir)
    aside = data_dir / f".download-{socket.gethostname()}-{os.getpid()}"
    try:
        for train in (True, False):
            getattr(datasets, CLASSES[opts.dataset])(aside, train=train, download=True)
        for path in sorted(aside.rglob("*")):
            if path.is_file() and path.suffix != ".gz":
                target = data_dir / path.relative_to(aside)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
