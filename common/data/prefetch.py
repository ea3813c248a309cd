"""Processes that fetch samples ahead of the training: sheltered from signals, and never silent about what
went wrong.
"""
import atexit
import ctypes
import functools
import mmap
import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from common.errors import UserError

# seconds a forked process has to reach its first line of ours, and how often that is tried
BEGIN, FORKS = 10.0, 5


def from_workers(split, order, count, augment, pin):
    """Yield (x, y, ids) of every share that is left of `order`, fetched by `count` processes.

    Call it in the main thread: the workers are killed when the thread that started them ends.
    """
    # rank and workers: leaving? and who has begun
    linux, shared = sys.platform == "linux", mmap.mmap(-1, 1 + count)
    leave = functools.partial(shared.__setitem__, 0, 1)
    # what is registered last runs first: before multiprocessing ends and joins its processes
    atexit.register(leave)
    loader = DataLoader(Shares(split, order.epoch, augment), batch_sampler=order, num_workers=count,
                        collate_fn=as_it_is, pin_memory=pin,
                        generator=torch.Generator(),  # its own: it must not draw its seed from the training's
                        worker_init_fn=functools.partial(shelter, shared) if linux else None,
                        multiprocessing_context="fork" if linux else None)
    previous = signal.getsignal(signal.SIGCHLD)
    shares = begin(loader, shared) if linux else iter(loader)
    # DataLoader's handler for dead workers would raise wherever the training just is, in mid-update for one.
    # Without it
    # the dead are found when their share is waited for, within five seconds.
    signal.signal(signal.SIGCHLD, previous)
    try:
        for found in shares:
            if isinstance(found, UserError):
                raise found
            yield found
    except RuntimeError as error:
        if "No space left" in str(error) or "Bus error" in str(error):
            raise UserError("the DataLoader's workers have no room left in shared memory (/dev/shm)\n"
                            "--workers 0, or a larger /dev/shm (docker run --shm-size=8g)") from error
        raise
    finally:
        leave()  # the traceback of an error inside DataLoader keeps the workers alive after this
        atexit.unregister(leave)
        del shares  # here and now: as part of a traceback it would wait five seconds for each worker


def begin(loader, shared):
    """An iterator whose workers have all begun.

    Before Python 3.12 a forked process may wait for ever for a lock of the interpreter that some thread held
    at that very moment. It has not run a line of ours then, and is worth nothing: it is killed and another
    set is forked.
    """
    for _ in range(FORKS):
        shared[1:] = bytes(len(shared) - 1)
        shares, deadline = iter(loader), time.monotonic() + BEGIN
        while 0 in shared[1:] and time.monotonic() < deadline:
            time.sleep(0.002)
        late = [worker for worker, begun in zip(shares._workers, shared[1:], strict=True) if not begun]
        if not late:
            return shares
        for worker in late:
            worker.kill()
        shared[0] = 1  # the others may end
        del shares
        shared[0] = 0
    raise RuntimeError(f"loading processes did not begin within {BEGIN:.0f} s, {FORKS} times in a row")


class Shares(Dataset):
    """A split as a worker sees it: a whole share at a time."""

    def __init__(self, split, epoch, augment):
        self.split, self.epoch, self.augment = split, epoch, augment

    def __len__(self):
        return len(self.split)

    def __getitems__(self, ids):
        try:
            x, y = self.split.fetch(ids, self.epoch, self.augment)
        except UserError as error:
            return error  # raised here, it would reach the user wrapped in a traceback
        if get_worker_info() and ids:
            # DataLoader would do this in a thread whose errors it drops, and wait for ever on a full
            # /dev/shm.
            x.share_memory_(), y.share_memory_()
        return x, y, ids


def as_it_is(found):
    return found


def shelter(shared, number):
    """A worker lives and dies with its rank: torchrun and Slurm signal all processes, but the rank is to
    answer.

    A worker that died would break its rank's orderly save. SIGTERM counts once the rank is leaving: it is
    then the rank that sends it. (Blocking signals instead would not do: torch starts threads in a worker
    before this runs.)
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if shared[0] else None)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: for a rank that was killed
    shared[1 + number] = 1
