"""The processes of one life: who is who, the device of each, and what they say to each other."""

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import resource
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.device import gpus, is_gpu, module_of
from common.errors import UserError, warn
from common.options import Options, extra
from common.place import here
from common.sampler import hash_seed
from common.world.rendezvous import ANSWER, MEETING_TIME, fresh_store

WORKING = timedelta(hours=1)  # ranks that have met wait for one that reads a large checkpoint
WATCHED = timedelta(days=1)  # a collective's time-out while the rescue ends hangs
MAY_DIFFER = ("build of torch", "CPU or GPU")  # of the bit_facts: other bits are possible, not sure
MOST_IN_A_MESH = 256  # ranks that gloo connects at the start, each with each; more connect when they talk
BLOCK_WORDS = 1 << 16  # of a tensor that are scrambled at once: they stay in a core's cache
ODD = (-7046029254386353131, -4658895280553007687)  # the factors of splitmix64, as numbers with a sign
M_TRIM_THRESHOLD = -1  # of mallopt: which freed memory goes back to the kernel
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class World:
    """The processes of this life; frozen, because a changed world is a new life."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    devices: tuple[torch.device, ...]
    life: str  # drawn by rank 0: names this life in the ledger, in the audit and in the fence
    store: dist.TCPStore | None = None  # of this life; None if there is one process

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def use_device(self) -> None:
        """Call it first in a new thread. It begins on GPU 0: a call there takes half a gigabyte, or fails."""
        if is_gpu(self.device):
            module_of(self.device).set_device(self.device)

    def memory(self) -> dict[str, int]:
        """Return the MiB in use on each GPU of this process: nn.DataParallel needs more on the first."""
        return {
            f"MiB_{gpu.index}": module_of(gpu).memory_allocated(gpu) >> 20
            for gpu in self.devices
            if is_gpu(gpu)
        }

    # ---- collectives ------------------------------------------------------------------------------
    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def set_patience(self, patience: timedelta) -> None:
        """Set how long a collective waits for the other ranks from now on."""
        if self.size > 1:
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            set_timeout(patience, None)

    def barrier(self) -> None:
        """Wait for all ranks."""
        gather(self, None)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Raise a UserError of one rank in this block on all, which wait for each other at its end."""
        error = None
        try:
            yield
        except UserError as own:
            error = [str(own), own.code]
        for other in gather(self, error):
            if other:
                raise UserError(*other)


# ---- what the ranks of one life tell each other, never as pickles ---------------------------------
def gather(world: World, value: object) -> list:
    """Return what every rank says, in rank order; anything that JSON knows. Call on every rank."""
    text = json.dumps(value).encode()
    sizes = torch.zeros(world.size, dtype=torch.int64)
    sizes[world.rank] = len(text)
    world.all_sum(sizes)
    flat = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
    texts = flat.split(sizes.tolist())
    texts[world.rank].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    world.all_sum(flat)
    return [json.loads(text.numpy().tobytes()) for text in texts]


def same_everywhere(
    world: World, facts: dict[str, str | int], of_the_run: dict[str, str] | None = None
) -> None:
    """Raise a UserError that names two ranks and their values, if {name: value} differs between ranks.

    `of_the_run` are those that the run had before: a rank that still has them may try again, without the odd
    one.
    """
    (first, *others), runs = zip(*gather(world, [facts, of_the_run or {}]), strict=True)
    for rank, row in enumerate(others, 1):
        for name, value in row.items():
            if value != first.get(name):
                was = {run[name] for run in runs if name in run}
                raise UserError(
                    f"the ranks run different things: rank 0 has {name} {first.get(name)}, "
                    f"rank {rank} has {name} {value}\n"
                    "give every node the same code, environment, data and options\n"
                    "seed what is drawn at random: torch.manual_seed(0), "
                    "numpy.random.default_rng(0)",
                    code=1 if was == {facts.get(name)} else 2,
                )


def fingerprint_of(tensors: Iterable[Tensor]) -> int:
    """Return a cheap number that depends on each bit of some tensors and its place; equal on every device."""
    sums = [0]
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.numel() % 8 or flat.storage_offset() % 8:
            flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))  # a copy
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for number, words in enumerate(flat.view(torch.int64).split(BLOCK_WORDS)):
            total += mixed(words, number * BLOCK_WORDS).sum()  # sums wrap, so their order does not matter
        sums.append(int(total))
    return hash_seed(*sums)


def mixed(words, first):
    """Scramble 64-bit words, each one to one with its place; `first` is that of the first one.

    Without it rows in another order, or two signs that flip, would leave the sum as it is.
    """
    x = torch.arange(first, first + len(words), device=words.device)
    x.mul_(ODD[0]).add_(words).mul_(ODD[1])
    x.bitwise_xor_((x >> 32).bitwise_and_(2**32 - 1))  # the shift of a number without a sign
    x.mul_(ODD[0])
    return x.bitwise_xor_((x >> 29).bitwise_and_(2**35 - 1))


# ---- how a process joins the world of this life, and how it leaves it -----------------------------
def join(opts: Options, placed: Sequence[torch.device] = ()) -> World:
    """Join the world that torchrun or a person describes in the environment; call once, on every rank.

    `placed`: the devices of a net that lies on several of them already.
    """
    prepare_process()
    place = here()
    devices = visible_devices(opts, place, placed)
    store = fresh_store(place.rank, place.size) if place.size > 1 else None
    if store and not place.local_size_is_set:
        extra("machines")(store, place.rank, place.size)
    if is_gpu(devices[0]) and not (opts.devices or placed):
        devices = extra("own_share")(devices, opts, place, store)
    pin(opts)
    world = World(place.rank, place.size, place.local_rank, place.local_size, devices, uuid.uuid4().hex[:12])
    world.use_device()
    if store:
        _init_process_group(store, place, devices)
        life = gather(world, world.life)[0]
        world = replace(world, life=life, store=store)
        world.set_patience(WORKING)  # all have met
    return world


def has_peers() -> bool:
    """Return whether this process may wait for another one."""
    return dist.is_initialized()


def leave(world: World) -> None:
    """End cleanly: all is saved, all ranks have met, and no error is a failure.

    Rank 0 leaves last: its end would be a death for a rank that still asks its store.
    """
    if world.store:
        with suppress(RuntimeError):
            world.store.set(f"left/{world.rank}", "")
            if world.rank == 0:
                world.store.wait([f"left/{rank}" for rank in range(world.size)], ANSWER)
            dist.destroy_process_group()


def prepare_process():
    """Make this process a good one to train in."""
    gc.freeze()  # imported modules stay: the collector need not look at them again
    atexit.register(gc.unfreeze)  # at the end triton counts what is left, and complains
    gc.enable()
    keep_memory()
    # a GPU's driver then takes more launches behind a dead peer: --sync-bn waits within a forward
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    with suppress(ValueError, OSError):  # rank 0 holds connections to all
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_memory():
    """Keep freed memory for the next step: the kernel would clear it, a quarter of a ResNet's time."""
    libc = ctypes.CDLL(None)  # glibc, which torch is built for
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    if not libc.mallopt(M_MMAP_THRESHOLD, 1 << 30):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most that older versions accept


def visible_devices(opts, place, placed=()):
    """Return where a process may train: the devices of a placed net, those named, or all GPUs it sees."""
    seen = gpus() if opts.device != "cpu" else ()
    kinds = {"auto", "cpu", *(gpu.type for gpu in seen)}
    if opts.device not in kinds:
        raise UserError(
            f"--device {opts.device}: torch sees no GPU of this kind "
            f"(CUDA_VISIBLE_DEVICES: {place.gpus or 'none'})\n"
            f"choose among {', '.join(sorted(kinds))}, or make one visible"
        )
    if opts.devices or placed:
        return extra("devices")(opts, seen, place, placed)
    if place.gpus and not seen and opts.device == "auto":
        warn(f"CUDA_VISIBLE_DEVICES is {place.gpus}, but torch sees no GPU: it trains on the CPU")
    return seen or (torch.device("cpu"),) * (2 if opts.script == "mp" else 1)


def _init_process_group(store, place, devices):
    device = devices[0]
    if place.size == place.local_size:  # no network for the gradients of one machine
        interface = "lo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    else:  # by itself gloo listens where the machine's own name points: a loopback on Debian
        interface = extra("interface")(place.address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if place.size > MOST_IN_A_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = "gloo"
    if is_gpu(device):
        backend = extra("nccl")(store, place, devices)
    # its meeting has an end: NCCL's has none where a driver hangs
    faulthandler.dump_traceback_later(5 * MEETING_TIME.total_seconds(), exit=True, file=2)
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=MEETING_TIME,
            # a backend that is bound to a device refuses collectives on the others
            device_id=device if is_gpu(device) and len(devices) == 1 else None,
        )
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---- what decides the bits besides the options ----------------------------------------------------
def pin(opts: Options) -> None:
    """Call before the first tensor is computed; plain `python` needs it too, for it sets no thread count."""
    if opts.threads or opts.virtual_ranks:
        torch.set_num_threads(opts.threads or 1)
    if opts.tf32:
        torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = not opts.virtual_ranks  # it chooses kernels by their speed today
    if opts.virtual_ranks:
        # cuBLAS is deterministic only with a fixed workspace
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # it is overwritten anyway


def bit_facts(opts: Options, device: torch.device) -> dict[str, str | int]:
    """Return what options.json holds of this machine: nothing unless bits are promised (--virtual-ranks)."""
    return extra("bit_facts")(device) if opts.virtual_ranks else {}
