"""The processes of one life: who is who, the device of each, and what they say to each other."""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError
from common.options import Options
from common.place import here
from common.sampler import hash_seed
from common.world.determinism import pin
from common.world.rendezvous import ANSWER, fresh_store, interface_towards

BROADCAST_BYTES = 1 << 28  # of one broadcast: bounds what the transport allocates
WORKING = timedelta(hours=1)  # ranks that have met wait for one that reads a large checkpoint
WATCHED = timedelta(days=1)  # a collective's time-out while the rescue ends hangs
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
    restart: int
    store: dist.TCPStore | None = None  # of this life; None if there is one process
    stages: int = 1  # ranks that hold one replica of the net together, a stage each
    stage_group: dist.ProcessGroup | None = None  # of this rank's replica, if it is more than this rank
    peers: dist.ProcessGroup | None = None  # the ranks with the same stage, if they are not all

    @property
    def stage(self) -> int:
        return self.rank % self.stages

    @property
    def replica(self) -> int:
        return self.rank // self.stages

    @property
    def replicas(self) -> int:
        return self.size // self.stages

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    @property
    def backend(self) -> str:
        if self.size == 1:
            return "none"
        return "nccl" if self.device.type == "cuda" else "gloo"

    def device_names(self) -> list[str]:
        return [
            f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
            for device in self.devices
        ]

    def memory(self) -> dict[str, int]:
        """MiB in use on each GPU of this process, for the log: nn.DataParallel needs more on the first."""
        return {
            f"MiB_{device.index}": torch.cuda.memory_allocated(device) >> 20
            for device in self.devices
            if device.type == "cuda"
        }

    # ---- collectives ------------------------------------------------------------------------------
    def all_sum(self, tensor: Tensor, group: dist.ProcessGroup | None = None, ranks: int = 0) -> Tensor:
        """Sum over ranks, in place."""
        if (ranks or self.size) > 1:
            dist.all_reduce(tensor, group=group)
        return tensor

    def sum_over_replicas(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that have the same stage, in place."""
        return self.all_sum(tensor, self.peers, self.replicas)

    def sum_over_stages(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks of this replica, in place."""
        return self.all_sum(tensor, self.stage_group, self.stages)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor (of one shape), in rank order."""
        if self.size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor)
        return tensors

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The source's bytes everywhere, in place; a flat tensor of any length."""
        if self.size > 1:
            for piece in tensor.view(-1).split(BROADCAST_BYTES // tensor.element_size()):
                dist.broadcast(piece, source)
        return tensor

    def in_stages(self, stages: int, timeout: timedelta | None = None) -> "World":
        """This world as size / stages replicas of so many ranks each; call on every rank."""
        if stages == 1:
            return self
        ranks = range(self.size)
        replicas = [dist.new_group(ranks[first : first + stages], timeout) for first in ranks[::stages]]
        peers = [dist.new_group(ranks[stage::stages], timeout) for stage in range(stages)]
        return replace(
            self, stages=stages, stage_group=replicas[self.rank // stages], peers=peers[self.rank % stages]
        )

    def watched(self) -> None:
        """From now on the rescue ends hangs: collectives wait, however long a step or a save takes."""
        if self.size > 1:
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in (None, self.stage_group, self.peers):
                set_timeout(WATCHED, group)

    # ---- over the key-value store -----------------------------------------------------------------
    def barrier(self, name: str) -> None:
        """Waits for all ranks while the rescue ends hangs; use each name once per life."""
        if self.store:
            if self.store.add(f"{name}/met", 1) == self.size:
                self.store.set(f"{name}/open", "")
            self.store.wait([f"{name}/open"], WATCHED)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A UserError on one rank inside this block is raised on every rank."""
        error = ""
        try:
            yield
        except UserError as own:
            error = json.dumps([str(own), own.code])
        for text in filter(None, gather_texts(self, error)):
            raise UserError(*json.loads(text))


# ---- what the ranks of one life tell each other, never as pickles ---------------------------------
def gather_texts(world: World, text: str) -> list[str]:
    """The text of every rank; call on every rank. Rank 0 reads them, the others ask it alone."""
    store = world.store
    if store is None:
        return [text]
    turn = store.add(f"turn/{world.rank}", 1)
    names = [f"texts/{turn}/{rank}" for rank in range(world.size)]
    store.set(names[world.rank], text)
    if world.rank == 0:
        store.wait(names, WORKING)
        store.set(f"texts/{turn}", json.dumps([other.decode() for other in store.multi_get(names)]))
    store.wait([f"texts/{turn}"], WORKING)
    return json.loads(store.get(f"texts/{turn}"))


def same_everywhere(world: World, facts: dict[str, str | int]) -> None:
    """UserError, naming two ranks and their values, if {name: value} differs between ranks."""
    every = [json.loads(text) for text in gather_texts(world, json.dumps(facts))]
    for rank, other in enumerate(every):
        for name, value in other.items():
            first = every[0].get(name)
            if value != first:
                raise UserError(
                    f"the ranks run different things: rank 0 has {name} {first}, "
                    f"rank {rank} has {name} {value}\n"
                    "give every node the same code, environment, data and options\n"
                    "seed what is drawn at random: torch.manual_seed(0), "
                    "numpy.random.default_rng(0)"
                )


def send(world: World, data: bytes | None, source: int) -> bytes:
    """The bytes of rank `source`, on every rank."""
    room = bytearray(data or b"")
    length = world.broadcast(torch.tensor([len(room)]), source)
    if world.rank != source:
        room = bytearray(int(length))
    world.broadcast(torch.frombuffer(room, dtype=torch.uint8), source)
    return bytes(room)


def odd_ranks(world: World, numbers: list[int]) -> list[int] | None:
    """None if the ranks of each stage have equal integers; else those in the minority, [] without one."""
    rows = [tuple(row.tolist()) for row in world.all_gather(torch.tensor(numbers))]
    stages = [rows[stage :: world.stages] for stage in range(world.stages)]
    if all(stage.count(stage[0]) == len(stage) for stage in stages):
        return None
    odd = [
        rank for rank, row in enumerate(rows) if 2 * stages[rank % world.stages].count(row) <= world.replicas
    ]
    return odd if len(odd) < world.size else []


@torch.no_grad()
def fingerprint_of(tensors: dict[str, Tensor]) -> int:
    """A cheap number that depends on every bit of named tensors; equal weights give it on every device."""
    sums = [torch.zeros((), dtype=torch.int64)]
    for tensor in tensors.values():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.numel() % 8 or flat.storage_offset() % 8:
            flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))  # a copy
        sums.append(flat.view(torch.int64).sum().cpu())  # 64-bit sums wrap, so their order does not matter
    return hash_seed(*torch.stack(sums).tolist())


# ---- how a process joins the world of this life, and how it leaves it -----------------------------
def join(opts: Options) -> World:
    """The world that torchrun or a person describes in the environment; call once, on every rank."""
    prepare_process()
    place = here()
    devices = choose_devices(opts, place.local_rank, place.local_size)
    pin(opts)
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    timeout = timedelta(seconds=4 * opts.hang_timeout) if opts.hang_timeout else WORKING
    store = None
    life = uuid.uuid4().hex[:12]
    if place.size > 1:
        store = fresh_store(place.rank, place.size)
        _init_process_group(store, place, devices[0], timeout)
        if place.rank == 0:
            store.set("life", life)
        life = store.get("life").decode()
    world = World(
        place.rank,
        place.size,
        place.local_rank,
        place.local_size,
        devices,
        life,
        place.restart,
        store,
    )
    return world.in_stages(opts.stages or place.size if opts.script == "mp" else 1, timeout)


def leave(world: World) -> None:
    """The clean end: all is saved, all ranks have met, and no error is a failure.

    Rank 0 leaves last: its end would be a death for a rank that still asks its store.
    """
    if world.store:
        deadline = time.monotonic() + ANSWER.total_seconds()
        with contextlib.suppress(RuntimeError):
            world.store.add("left", 1)
            while world.rank == 0 and world.store.add("left", 0) < world.size and time.monotonic() < deadline:
                time.sleep(0.01)
            dist.destroy_process_group()


def prepare_process() -> None:
    """Makes this process a good one to train in."""
    gc.freeze()  # imported modules stay: the collector need not look at them again
    atexit.register(gc.unfreeze)  # at the end triton counts what is left, and complains
    gc.enable()
    keep_memory()
    with contextlib.suppress(ValueError, OSError):  # rank 0 holds connections to all
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_memory() -> None:
    """Keeps freed memory for the next step: the kernel would clear it, a quarter of a ResNet's time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; other libraries do not give memory back, or offer no choice
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        if not libc.mallopt(M_MMAP_THRESHOLD, 1 << 30):
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 25)  # the most that older versions accept


def choose_devices(opts: Options, local_rank: int, local_size: int) -> tuple[torch.device, ...]:
    """The devices of this process: one per rank, or the list of a script that drives many."""
    count = torch.cuda.device_count() if opts.device != "cpu" else 0
    if opts.device == "cuda" and not count:
        visible = ",".join(here().gpus) or "none"
        raise UserError(
            f"--device cuda: torch sees no GPU (CUDA_VISIBLE_DEVICES: {visible})\n"
            "use --device cpu, or make a GPU visible"
        )
    if opts.devices:
        return tuple(torch.device("cuda:0" if name == "cuda" else name) for name in opts.devices)
    if not count:
        return (torch.device("cpu"),)
    if opts.script != "ddp" and local_size == 1:
        return tuple(torch.device("cuda", i) for i in range(count))
    if count == 1 and here().gpus:  # each process sees its own: --gpus-per-task
        return (torch.device("cuda", 0),)
    if local_size > count:
        raise UserError(
            f"{local_size} processes on this machine but {count} GPUs are visible\n"
            f"start at most {count} (--nproc_per_node={count}), or use --device cpu"
        )
    return (torch.device("cuda", local_rank),)


def _init_process_group(store, place, device, timeout):
    if place.size == place.local_size:  # no network for the gradients of one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        # by itself gloo listens where the machine's own name points: a loopback on Debian
        interface = interface_towards(place.address)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # control traffic never touches the device stream
        # torchrun exports 1: then a collective stuck on a dead peer "succeeds", and a queued optimizer step
        # uses garbage
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
