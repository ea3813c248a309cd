"""Fetching published datasets, when asked to: through torchvision, which knows their checksums."""
import os
import shutil
import socket
from pathlib import Path

from common.data.datasets import find_source
from common.errors import UserError, one_line

CLASSES = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10"}  # in torchvision.datasets


def download(opts, world):
    """Fetch the dataset unless it is there and whole; call on every rank: one a node fetches, the others
    wait.
    """
    if opts.dataset not in CLASSES:
        raise UserError(f"dataset {opts.dataset} has nothing to download\nleave --download out, it is for "
                        f"{', '.join(CLASSES)}")
    error = None
    if world.local_rank == 0:
        try:
            fetch(opts)
        except Exception as caught:  # whatever it is, the other ranks must not be left at the barrier
            error = caught
    world.local_barrier()
    if error:
        raise UserError(f"dataset {opts.dataset} cannot be downloaded to {opts.data_dir}\n{one_line(error)}") from error


def fetch(opts):
    try:
        find_source(opts)
        return
    except UserError:
        pass  # not there, or not as it should be
    from torchvision import datasets
    # Aside first, each file renamed when all are whole: nobody ever takes half a download for data, neither a
    # later
    # start nor another node that shares the folder and fetches at the same time.
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
