"""Processes that load samples ahead of a training (--workers)."""

import atexit
import ctypes
import os
import signal
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from common.data import map_tensors
from common.errors import UserError, one_line


class Same:
    """A map-style dataset whose samples are their indices."""

    def __getitem__(self, index):
        return index


def from_workers(load, cuts, count, pin):
    """Yield load(cut) for each of `cuts`, from `count` processes.

    Call it in the main thread: the workers are killed when the thread that started them ends.
    """

    def sent(cut):
        # DataLoader sends what this returns from a thread, which drops errors: with a full /dev/shm the rank
        # would wait for ever.
        try:
            return map_tensors(Tensor.share_memory_, load(cut))
        except UserError as error:
            return error  # raised, it would come in a traceback

    on_death = signal.getsignal(signal.SIGCHLD)
    loaded = iter(
        DataLoader(
            Same(),
            batch_sampler=cuts,
            num_workers=count,
            collate_fn=sent,
            pin_memory=pin,
            generator=torch.Generator(),  # the default one belongs to training
            worker_init_fn=partial(shelter, os.getpid()),
            multiprocessing_context="fork",
        )
    )
    # DataLoader's handler for dead workers would raise at any line of training, even within an update.
    # Without it a dead worker is noticed when its share is needed, within five seconds.
    signal.signal(signal.SIGCHLD, on_death)
    workers = loaded._workers

    def kill():
        for worker in workers:
            worker.kill()

    atexit.register(kill)  # registered last, it runs first: before multiprocessing joins its processes
    try:
        for share in loaded:
            if isinstance(share, UserError):
                raise share
            yield share
    except (RuntimeError, OSError, EOFError) as error:  # the last two: it dies as it hands a tensor over
        raise UserError(
            f"its loading process: {one_line(error)}\nthere may be too little memory for so many --workers",
            code=1,
        ) from None
    finally:
        del loaded  # ends the workers, unless it is part of a traceback
        kill()
        atexit.unregister(kill)


def shelter(parent, number):
    """Ignore signals: torchrun and Slurm signal every process, but only the rank should react.

    A worker that dies would break its rank's save. (Blocking signals is not enough: torch starts threads in
    a worker before this runs.)
    """
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was killed before that line
        os._exit(1)
