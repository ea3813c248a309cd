"""The data of a run: opened once, then a Batch a step, loaded by the rank or by processes that read ahead."""
import atexit
import contextlib
import ctypes
import functools
import hashlib
import itertools
import mmap
import os
import pickle
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from common.data.datasets import PRELOADED, download, facts_of, find_source
from common.data.splits import Data, DatasetSplit, TensorSplit, as_input, map_tensors, whole_targets
from common.data.tokens import Windows
from common.errors import UserError, blamed
from common.options import Options
from common.sampler import ElasticSampler, share


class Batch(NamedTuple):
    """A rank's share of one global batch, cut into its forwards."""

    parts: list[tuple[int, Any]]  # (samples, what collate made of them) for each forward
    ids: list[int]
    size: int  # number of samples in the whole global batch

    @property
    def x(self) -> Any:
        """The inputs, of a share that is one forward of (input, target)."""
        return self.parts[0][1][0]

    @property
    def y(self) -> Any:
        return self.parts[0][1][1]


# ---- opening ----
def load_data(opts: Options, world: Any, source: Data | None = None) -> Data:
    """The dataset that `opts.dataset` names, or `source`, as splits; call on every rank: it may download."""
    if opts.download:
        with world.all_or_none("download"):
            if world.local_rank == 0:
                with blamed(f"dataset {opts.dataset} cannot be downloaded to {opts.data_dir}"):
                    download(opts)
    source = source or find_source(opts)
    train, test = _splits_of(source, opts)
    fingerprint = source.fingerprint or _hash_of(train, test, source)
    if callable(fingerprint):  # it takes long, and the ranks of a node see the same files
        fingerprint = world.once_per_node("fingerprint", fingerprint)
    return replace(source, train=train, test=test, name=opts.dataset, sample_shape=train.shape,
                   fingerprint=fingerprint)


def preload(opts: Options) -> None:
    """Opens a dataset of this project, and hashes it, for all processes that will be forked from this one.

    A life then begins with it: drawing `digits` takes half a second. Threads do not survive a fork, so none
    is started. What cannot be opened is an error of those processes, not of this one.
    """
    if ".py" in opts.dataset:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.suppress(UserError, OSError):
        source = find_source(opts)
        train, test = _splits_of(source, opts)
        fingerprint = source.fingerprint or _hash_of(train, test, source)
        if callable(fingerprint):
            fingerprint = fingerprint()
        PRELOADED[facts_of(opts)] = replace(source, fingerprint=fingerprint)
    torch.set_num_threads(threads)


def _splits_of(source, opts):
    with blamed(f"dataset {opts.dataset}", "wanted: Datasets with __len__ and __getitem__(i); an iterable "
                "has no place at which a restart can resume"):
        return _split_of(source.train, source, opts, source.augment), _split_of(source.test, source, opts)


def _split_of(samples, source, opts, augment=None):
    if not len(samples[1] if isinstance(samples, tuple) else samples):
        raise UserError(f"dataset {opts.dataset} has an empty set\n"
                        "at least one sample to train on is needed, and one to test on")
    if isinstance(samples, Windows):
        return samples
    if not isinstance(samples, tuple):
        return DatasetSplit(samples, source, opts)
    x, y = samples
    if x.dtype != torch.uint8:
        x = as_input(x)
    if len(x) != len(y):
        raise UserError(f"dataset {opts.dataset}: {len(x)} samples with {len(y)} labels\n"
                        "wanted: a label for each sample")
    if opts.task == "classify":
        y = whole_targets(y, len(x), source.known_classes, f"dataset {opts.dataset}")
    elif not y.is_floating_point() and not y.is_complex() and y.dtype != torch.bool:
        y = y.long()
    return TensorSplit(x, y, source, opts.seed, augment)


def _hash_of(train, test, source):
    """A hash of every byte in memory, or of a Dataset's size, shape and a few samples."""
    splits = (train, test)
    looks = [split.look() for split in splits if not split.in_memory]
    facts = (source.known_classes, train.shape, len(train), len(test), *looks)
    digest = hashlib.sha256(repr(facts).encode())
    for split in splits:
        if split.in_memory:
            digest.update(memoryview(split.x.numpy()).cast("B"))
            digest.update(memoryview(split.y.numpy()).cast("B"))
    return digest.hexdigest()


# ---- batches ----
def batches(split: Any, order: ElasticSampler, opts: Options) -> Iterator[Batch]:
    """Yield this rank's Batch of every global batch that is left of `order`, on the CPU.

    A share may be empty, without any part: every rank yields the same number of batches.
    """
    shares = Shares(split, order.epoch, opts.augment != "none", opts.sync_bn or opts.shard)
    pin = torch.cuda.is_available() and "cpu" not in (opts.device, *opts.devices)
    loaded: Iterable
    if opts.workers and not split.in_memory:
        loaded = from_workers(shares, cuts(order, opts), opts.workers, pin)
    else:
        loaded = map(shares.load, cuts(order, opts))
        if pin:
            loaded = ((map_tensors(Tensor.pin_memory, parts), ids) for parts, ids in loaded)
    for (parts, ids), size in zip(loaded, order.batch_sizes(), strict=True):
        yield Batch(parts, ids, size)


def forward_sizes(n: int, rank: int, world: int, opts: Options) -> list[int]:
    """How many samples each forward of this rank gets of a global batch of n samples.

    With --sync-bn and --shard ranks wait for each other inside a forward: all make as many, if need be of
    no sample. With --virtual-ranks each slice is one forward.
    """
    if opts.virtual_ranks:
        return [len(share(n, v, opts.virtual_ranks)) for v in share(opts.virtual_ranks, rank, world)]
    mine = len(share(n, rank, world))
    most = -(-n // world)
    size = opts.micro_batch_size or max(1, most)
    if opts.sync_bn and world > 1:
        count = -(-most // size)
        return [mine // count + (k < mine % count) for k in range(count)]
    return [max(0, min(size, mine - at)) for at in range(0, most if opts.shard else mine, size)]


def cuts(order, opts):
    """Yield every share that is left of `order`, as the lists of ids of its forwards."""
    for mine, size in zip(order, order.batch_sizes(), strict=True):
        ids = iter(mine)
        yield [list(itertools.islice(ids, n)) for n in forward_sizes(size, order.rank, order.world, opts)]


class Shares:
    """A split as shares: ([(number of samples, what `fetch` made of them) for each forward], ids)."""

    def __init__(self, split: Any, epoch: int, augment: bool, hollow: bool) -> None:
        self.split = split
        self.epoch = epoch
        self.augment = augment
        self.hollow = hollow  # ranks wait for each other in a forward, so one without samples has an input

    def load(self, cut: list[list[int]]) -> tuple[list, list[int]]:
        parts = []
        for ids in cut:
            batch = self.split.fetch(ids, self.epoch, self.augment) if ids else self.nothing()
            parts.append((len(ids), batch))
        return parts, [id for ids in cut for id in ids]

    def nothing(self) -> Any:
        """The input of a forward without samples."""
        return map_tensors(lambda t: t[:0], self.split.fetch([0])) if self.hollow else None

    def __getitems__(self, cut: list[list[int]]) -> Any:
        """For a loading process. DataLoader sends what this returns from a thread, which drops errors: with a
        full /dev/shm, or with what cannot be pickled, the rank would wait for ever.
        """
        try:
            parts, ids = self.load(cut)
            with blamed("a batch cannot leave its loading process",
                        "let collate return tensors in tuples, lists or dicts, or use --workers 0"):
                parts = map_tensors(lambda t: t.share_memory_() if t.numel() else t, parts)
                pickle.dumps(map_tensors(lambda t: None, parts))
            return parts, ids
        except UserError as error:
            return error  # raised, it would come in a traceback


# ---- loading processes ----
def from_workers(shares: Shares, cuts: Iterable, count: int, pin: bool) -> Iterator[Any]:
    """Yield each share of `cuts`, as `shares` loads it in one of `count` processes.

    Call it in the main thread: the workers are killed when the thread that started them ends.
    """
    leaving = mmap.mmap(-1, 1)  # one byte: is the rank leaving?
    leave = functools.partial(leaving.__setitem__, 0, 1)
    atexit.register(leave)  # registered last, it runs first: before multiprocessing joins its processes
    on_death = signal.getsignal(signal.SIGCHLD)
    loaded = iter(DataLoader(
        shares, batch_sampler=cuts, num_workers=count, collate_fn=lambda share: share, pin_memory=pin,
        generator=torch.Generator(),  # the default one belongs to training
        worker_init_fn=functools.partial(shelter, leaving, os.getpid()), multiprocessing_context="fork"))
    # DataLoader's handler for dead workers would raise at any line of training, even within an update.
    # Without it a dead worker is noticed when its share is needed, within five seconds.
    signal.signal(signal.SIGCHLD, on_death)
    try:
        for share in loaded:
            if isinstance(share, UserError):
                raise share
            yield share
    except RuntimeError:
        dead = [worker.pid for worker in loaded._workers if not worker.is_alive()]
        if dead:
            raise UserError(f"its loading process (pid {dead[0]}) was killed\n"
                            "there may be too little memory for so many --workers", code=1) from None
        raise
    finally:
        leave()  # the workers may end: the traceback of an error inside DataLoader would keep them alive
        atexit.unregister(leave)
        del loaded  # now: as part of a traceback it would wait five seconds for each worker


def shelter(leaving, rank, number):
    """Ignore signals: torchrun and Slurm signal every process, but only the rank should react.

    A worker that dies would break its rank's save. SIGTERM counts once the rank is leaving, because then the
    rank sends it. (Blocking signals is not enough: torch starts threads in a worker before this runs.)
    """
    for name in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0) if leaving[0] else None)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: for a rank that was killed
    if os.getppid() != rank:  # killed before that line: nothing would end this process
        os._exit(0)
