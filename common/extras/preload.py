"""A dataset for all processes that a launcher forks."""

import os

import torch

from common.data import DECIDING, PRELOADED, load_data
from common.options import Options


def preload(opts: Options) -> None:
    """Open a dataset of this project, and hash it, for all processes that will be forked from this one.

    A life then begins with it: drawing `digits` takes half a second. Threads do not survive a fork, so none
    is started.
    """
    if ".py" in opts.dataset:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    PRELOADED[DECIDING(opts)] = load_data(opts)
    torch.set_num_threads(threads)
    # a fork makes torch's pool of threads anew, without a lock: two threads that begin with it would abort
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
