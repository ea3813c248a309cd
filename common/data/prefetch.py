"""Loading processes that fetch samples ahead of training: they ignore signals and pass on every error."""
import atexit
import copy
import ctypes
import functools
import itertools
import mmap
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from common.errors import UserError, one_line
from common.sampler import share

BEGIN_SECONDS = 10.0    # that a forked process has to reach our first line
FORK_ATTEMPTS = 5


def from_workers(shares: Any, cuts: Any, count: int, pin: bool) -> Iterator[Any]:
    """Yield each share of `cuts`, as `shares` loads it in one of `count` processes.

    Call it in the main thread: the workers are killed when the thread that started them ends.
    """
    shared = mmap.mmap(-1, 1 + count)  # one byte each: is the rank leaving? has worker 0, 1, ... begun?
    leave = functools.partial(shared.__setitem__, 0, 1)
    atexit.register(leave)  # registered last, it runs first: before multiprocessing joins its processes
    loader = DataLoader(shares, batch_sampler=cuts, num_workers=count,
                        collate_fn=lambda share: share, pin_memory=pin,
                        generator=torch.Generator(),  # the default one belongs to training
                        worker_init_fn=functools.partial(shelter, shared, os.getpid()),
                        multiprocessing_context="fork")
    found = begin(loader, shared)
    try:
        for share in found:
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
        del found  # now: as part of a traceback it would wait five seconds for each worker


def begin(loader, shared):
    """An iterator whose workers have all begun.

    Before Python 3.12 a forked process may wait for ever for a lock of the interpreter that another thread
    held during the fork. Such a process has run no line of ours: it is killed, and new ones are forked.
    """
    on_death = signal.getsignal(signal.SIGCHLD)
    for _ in range(FORK_ATTEMPTS):
        shared[1:] = bytes(len(shared) - 1)
        shares, deadline = iter(loader), time.monotonic() + BEGIN_SECONDS
        # DataLoader's handler for dead workers would raise at any line of training, even within an update.
        # Without it a dead worker is noticed when its share is needed, within five seconds.
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


def forward_sizes(n: int, rank: int, world: int, opts: Any) -> list[int]:
    """How many samples each forward of this rank gets of a global batch of n samples.

    With --sync-bn and --shard ranks wait for each other inside a forward: all make as many, if need be of
    no sample. With --virtual-ranks each slice is one forward.
    """
    if opts.virtual_ranks:
        return [len(share(n, v, opts.virtual_ranks)) for v in share(opts.virtual_ranks, rank, world)]
    mine, most = len(share(n, rank, world)), -(-n // world)
    size = opts.micro_batch_size or max(1, most)
    if opts.sync_bn and world > 1:
        count = -(-most // size)
        return [mine // count + (k < mine % count) for k in range(count)]
    return [max(0, min(size, mine - at)) for at in range(0, most if opts.shard else mine, size)]


class Cuts:
    """Every share that is left of `order`, as the lists of ids of its forwards."""

    def __init__(self, order, opts):
        self.order, self.opts = order, opts

    def __iter__(self):
        order = self.order
        for ids, size in zip(order, order.batch_sizes(), strict=True):
            sizes = forward_sizes(size, order.rank, order.world, self.opts)
            ends = list(itertools.accumulate(sizes))
            yield [ids[end - n:end] for n, end in zip(sizes, ends, strict=True)]


class Shares:
    """A split as shares: ([(number of samples, what `fetch` made of them) for each forward], ids)."""

    def __init__(self, split: Any, epoch: int, augment: bool, hollow: bool) -> None:
        self.split, self.epoch, self.augment, self.hollow = split, epoch, augment, hollow

    def load(self, cut: list) -> tuple[list, list]:
        parts = [(len(ids), self.split.fetch(ids, self.epoch, self.augment) if ids else self.nothing())
                 for ids in cut]
        return parts, [id for ids in cut for id in ids]

    def nothing(self) -> Any:
        """The input of a forward without samples, where ranks wait for each other in it; else None."""
        return map_tensors(lambda t: t[:0], self.split.fetch([0])) if self.hollow else None

    def __getitems__(self, cut):
        try:
            parts, ids = self.load(cut)
        except UserError as error:
            return error  # if raised here, it would arrive inside a traceback
        if get_worker_info():
            # DataLoader does this in a thread that drops errors: with a full /dev/shm it would wait for ever
            parts = map_tensors(lambda t: t.share_memory_() if t.numel() else t, parts)
            try:
                pickle.dumps(map_tensors(lambda t: None, parts))
            except Exception as error:
                few = ", ".join(map(str, ids[:3]))  # the thread would drop this error, too
                return UserError(f"the batch of samples {few}, ... cannot leave its loading process: "
                                 f"{one_line(error)}\nlet collate return tensors in tuples, lists or dicts, "
                                 "or use --workers 0")
        return parts, ids


def map_tensors(change: Callable, tree: Any) -> Any:
    """The same tree of dicts, lists and tuples, with each tensor changed, and all else as it was."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, MutableMapping):
        same = copy.copy(tree)  # of the same type, as default_collate makes it
        for key, value in tree.items():
            same[key] = map_tensors(change, value)
        return same
    if isinstance(tree, (list, tuple)):
        branches = [map_tensors(change, branch) for branch in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    return tree


def leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    return found


def shelter(shared, rank, number):
    """Ignore signals: torchrun and Slurm signal every process, but only the rank should react.

    A worker that dies would break its rank's save. SIGTERM counts once the rank is leaving, because then the
    rank sends it. (Blocking signals is not enough: torch starts threads in a worker before this runs.)
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if shared[0] else None)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: for a rank that was killed
    if os.getppid() != rank:  # killed before that line: nothing would end this process
        os._exit(0)
    shared[1 + number] = 1
