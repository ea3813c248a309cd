"""torchrun's environment, the device, the process group and the few collectives.

Everything that differs between ranks lives in `World`; the scripts hold no rank of their own.
"""
import atexit
import contextlib
import gc
import json
import os
import sys
import time
import uuid
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError
from common.meeting import ANSWER, JOINING, choose_interface, fresh_store, place, wait
from common.options import die_with_the_agent, machine
from common.pinned import pin
from common.processes import allow_open_files, keep_memory

PIECE = 1 << 28                   # bytes per broadcast: bounds what the transport allocates
WATCHED = timedelta(days=1)       # a collective's time-out while the pulse watches


@dataclass(frozen=True)
class World:
    """The processes of this life; frozen, because a changed world is a new life."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    devices: tuple
    life: str            # drawn by rank 0: names this life in the ledger, in the audit and in the fence
    restart: int
    store: object = None
    stages: int = 1      # ranks that hold one replica of the net together, a stage each
    line: object = None  # the group of this rank's replica, if it is more than this rank
    peers: object = None  # the group of the ranks with the same stage, if they are not all

    @property
    def stage(self):
        return self.rank % self.stages

    @property
    def replica(self):
        return self.rank // self.stages

    @property
    def replicas(self):
        return self.size // self.stages

    @property
    def device(self):
        return self.devices[0]

    @property
    def backend(self):
        return "none" if self.size == 1 else "nccl" if self.device.type == "cuda" else "gloo"

    def all_sum(self, tensor):
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def replica_sum(self, tensor):
        """Sum over the ranks that have the same stage, in place."""
        if self.replicas > 1:
            dist.all_reduce(tensor, group=self.peers)
        return tensor

    def line_sum(self, tensor):
        """Sum over the ranks of this replica, in place."""
        if self.stages > 1:
            dist.all_reduce(tensor, group=self.line)
        return tensor

    def in_stages(self, stages, timeout=None):
        """This world as size / stages replicas of so many ranks each; call on every rank."""
        if stages == 1:
            return self
        lines = [dist.new_group(range(first, first + stages), timeout) for first in range(0, self.size, stages)]
        peers = [dist.new_group(range(stage, self.size, stages), timeout) for stage in range(stages)]
        return replace(self, stages=stages, line=lines[self.rank // stages], peers=peers[self.rank % stages])

    def all_gather(self, tensor):
        """Every rank's tensor (of one shape), in rank order."""
        if self.size == 1:
            return [tensor]
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(out, tensor)
        return out

    def broadcast(self, tensor, source):
        """The source's bytes everywhere, in place; a flat tensor of any length."""
        if self.size > 1:
            for piece in tensor.view(-1).split(PIECE // tensor.element_size()):
                dist.broadcast(piece, source)
        return tensor

    def meet(self, name, patience=None):
        """All ranks have come here: a wait of minutes, where a collective would give up after the short time-out."""
        if self.size > 1:
            _meet(self.store, f"meet/{name}", self.size, patience)

    def watched(self):
        """From here on the pulse ends hangs: no collective gives up before it, however long a step or a save takes."""
        if self.size > 1:
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in (None, self.line, self.peers):
                set_timeout(WATCHED, group)

    @contextlib.contextmanager
    def together(self, name):
        """All ranks leave this block, or none: what a person must mend on one rank is said once and raised on each."""
        try:
            yield
        except UserError as error:
            if self.size > 1:
                self.store.set(f"meet/{name}/open", json.dumps([str(error), error.code]))
                deadline = time.monotonic() + ANSWER.total_seconds()
                while self.store.add(f"meet/{name}/heard", 0) < self.size - 1 and time.monotonic() < deadline:
                    time.sleep(0.01)                                # the store ends with rank 0: let the others hear first
            raise
        self.meet(name)

    def own_line(self):
        """A second connection to this life's store, for a thread that must not wait behind the main one."""
        return dist.TCPStore(self.store.host, self.store.port, is_master=False, timeout=ANSWER)

    def local_barrier(self, name="node"):
        """All ranks of this node have come here; each name is good for one meeting."""
        if self.local_size > 1:
            _meet(self.store, f"{name}/{self.node}", self.local_size)

    def once_a_node(self, name, find):
        """The text that `find` returns on the first rank of this node, on all of its ranks; each name is good for once."""
        if self.local_size == 1:
            return find()
        key = f"once/{self.node}/{name}"
        if self.local_rank == 0:
            self.store.set(key, find())
        self.store.wait([key], JOINING)
        return self.store.get(key).decode()


def _meet(store, key, count, patience=None):
    if store.add(key, 1) == count:
        store.set(f"{key}/open", "1")
    wait(store, f"{key}/open", patience)
    if (word := store.get(f"{key}/open")) != b"1":
        store.add(f"{key}/heard", 1)
        raise UserError(*json.loads(word))


def join(opts):
    """The world torchrun (or the hand-set environment, or nothing at all) asks for; call once, on every rank."""
    env = os.environ
    gc.freeze()                                                     # what was imported stays: never to be looked at again
    atexit.register(gc.unfreeze)                                    # but at the end: triton counts what is left, and complains
    gc.enable()
    die_with_the_agent()
    keep_memory()
    rank, size = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    allow_open_files(3 * size + 23, f"{size} processes")            # those of rank 0 while it holds the store
    store = None
    if size == 1 or {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(env):
        local_rank, local_size = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", size))
        node = int(env.get("GROUP_RANK", rank // local_size))
    else:                                                           # by hand
        store = fresh_store(rank, size)
        node, local_rank, local_size = place(store, rank, size)
    devices = _devices(opts, local_rank, local_size)
    if opts.threads:
        torch.set_num_threads(opts.threads)
    pin(opts)
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    timeout = timedelta(seconds=4 * opts.hang_timeout or 600)      # of the start: once training begins the pulse watches
    life = uuid.uuid4().hex[:12]
    if size > 1:
        choose_interface(env, size, local_size)
        store = store or fresh_store(rank, size)
        _refuse_a_shared_gpu(store, devices[0], local_size)
        _init_process_group(store, rank, size, devices[0], timeout)
        if rank == 0:
            store.set("life", life)
        life = store.get("life").decode()
    world = World(rank, size, local_rank, local_size, node, devices, life, int(env.get("TORCHELASTIC_RESTART_COUNT", 0)), store)
    return world.in_stages(opts.stages or size if opts.script == "mp" else 1, timeout)


def leave(world):
    """The clean end. All is saved and all have met: what goes wrong from here on is no failure.

    Rank 0 holds the store, so it goes last: somebody still asking it would take its end for a death, start another life,
    and on another machine leave an agent waiting for minutes.
    """
    if world.size > 1:
        with contextlib.suppress(RuntimeError):
            deadline = time.monotonic() + ANSWER.total_seconds()
            world.store.add("left", 1)
            while world.rank == 0 and world.store.add("left", 0) < world.size and time.monotonic() < deadline:
                time.sleep(0.01)
            dist.destroy_process_group()
    sys.stdout.flush()


def _devices(opts, local_rank, local_size):
    """The devices of this process: one per rank, or the list of a script that drives many."""
    count = torch.cuda.device_count() if opts.device != "cpu" else 0
    if opts.device == "cuda" and not count:
        raise UserError("--device cuda: torch sees no GPU (CUDA_VISIBLE_DEVICES="
                        f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})\nuse --device cpu, or make a GPU visible")
    if opts.devices:
        devices = tuple(torch.device(name) for name in opts.devices)
        for device in devices:
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise UserError(f"--devices {','.join(opts.devices)}: torch sees {torch.cuda.device_count()} GPUs, "
                                f"so {device} does not exist")
        return devices
    if not count:
        return (torch.device("cpu"),)
    if opts.script != "ddp" and local_size == 1:
        return tuple(torch.device("cuda", i) for i in range(count))
    if count == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):       # one for each, as srun --gpus-per-task leaves them
        return (torch.device("cuda", 0),)
    if local_size > count:
        raise _too_few(local_size, count)
    return (torch.device("cuda", local_rank),)


def _too_few(processes, gpus):
    return UserError(f"{processes} processes on this machine but {gpus} GPUs are visible\n"
                     f"start at most {gpus} (--nproc_per_node={gpus}), or use --device cpu")


def _refuse_a_shared_gpu(store, device, local_size):
    """Where each process sees one GPU, it must not be the same one."""
    if device.type == "cuda" and local_size > torch.cuda.device_count() == 1:
        gpu = torch.cuda.get_device_properties(device).uuid
        if store.add(f"gpu/{machine()}/{gpu}", 1) > 1:
            raise _too_few(local_size, 1)


def _init_process_group(store, rank, size, device, timeout):
    backend = "gloo"
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"                              # control traffic never touches the device stream
        # torchrun exports 1: on a dead peer the stuck collective would then "succeed" and a queued optimizer step run on garbage
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout,
                            device_id=device if device.type == "cuda" else None)
