"""Loading processes that fetch samples ahead of training: they ignore signals and pass on every error."""
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

BEGIN_SECONDS = 10.0    # that a forked process has to reach our first line
FORK_ATTEMPTS = 5


def from_workers(split, order, count, augment, pin):
    """Yield (x, y, ids) of every share that is left of `order`, fetched by `count` processes.

    Call it in the main thread: the workers are killed when the thread that started them ends.
    """
    linux = sys.platform == "linux"
    shared = mmap.mmap(-1, 1 + count)  # one byte each: is the rank leaving? has worker 0, 1, ... begun?
    leave = functools.partial(shared.__setitem__, 0, 1)
    atexit.register(leave)  # registered last, it runs first: before multiprocessing joins its processes
    loader = DataLoader(Shares(split, order.epoch, augment), batch_sampler=order, num_workers=count,
                        collate_fn=as_it_is, pin_memory=pin,
                        generator=torch.Generator(),  # the default one belongs to training
                        worker_init_fn=functools.partial(shelter, shared) if linux else None,
                        multiprocessing_context="fork" if linux else None)
    previous = signal.getsignal(signal.SIGCHLD)
    shares = begin(loader, shared, previous) if linux else iter(loader)
    # DataLoader's handler for dead workers would raise at any line of training, even within an update.
    # Without it a dead worker is noticed when its share is needed, within five seconds.
    signal.signal(signal.SIGCHLD, previous)
    try:
        for share in shares:
            if isinstance(share, UserError):
                raise share
            yield share
    except RuntimeError as error:
        if "No space left" in str(error) or "Bus error" in str(error):
            raise UserError("shared memory (/dev/shm) has no room left for the loading processes\n"
                            "use --workers 0, or a larger /dev/shm (docker run --shm-size=8g)") from error
        raise
    finally:
        leave()  # the workers may end: the traceback of an error inside DataLoader would keep them alive
        atexit.unregister(leave)
        del shares  # now: as part of a traceback it would wait five seconds for each worker


def begin(loader, shared, on_death):
    """An iterator whose workers have all begun.

    Before Python 3.12 a forked process may wait for ever for a lock of the interpreter that another thread
    held during the fork. Such a process has run no line of ours: it is killed, and new ones are forked.
    """
    for _ in range(FORK_ATTEMPTS):
        shared[1:] = bytes(len(shared) - 1)
        shares, deadline = iter(loader), time.monotonic() + BEGIN_SECONDS
        signal.signal(signal.SIGCHLD, on_death)
        while 0 in shared[1:] and time.monotonic() < deadline and all(w.is_alive() for w in shares._workers):
            time.sleep(0.002)
        late = [worker for worker, begun in zip(shares._workers, shared[1:], strict=True) if not begun]
        if not late:
            return shares
        for worker in late:
            worker.kill()
        shared[0] = 1  # the others may end
        del shares
        shared[0] = 0
    raise RuntimeError(f"loading processes did not begin within {BEGIN_SECONDS:.0f} s, "
                       f"{FORK_ATTEMPTS} times in a row")


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
            return error  # if raised here, it would arrive inside a traceback
        if get_worker_info() and ids:
            # DataLoader does this in a thread that drops errors: with a full /dev/shm it would wait for ever
            x.share_memory_(), y.share_memory_()
        return x, y, ids


def as_it_is(share):
    return share


def shelter(shared, number):
    """Ignore signals: torchrun and Slurm signal every process, but only the rank should react.

    A worker that dies would break its rank's save. SIGTERM counts once the rank is leaving, because then the
    rank sends it. (Blocking signals is not enough: torch starts threads in a worker before this runs.)
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if shared[0] else None)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: for a rank that was killed
    shared[1 + number] = 1
