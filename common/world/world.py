"""The processes of one life: who is who, the device of each, and the few collectives."""
import contextlib
import json
import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError
from common.options import machine
from common.world.rendezvous import ANSWER, JOINING, wait

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
    life: str  # drawn by rank 0: names this life in the ledger, in the audit and in the fence
    restart: int
    store: object = None
    stages: int = 1  # ranks that hold one replica of the net together, a stage each
    stage_group: object = None  # the group of this rank's replica, if it is more than this rank
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

    def sum_over_replicas(self, tensor):
        """Sum over the ranks that have the same stage, in place."""
        if self.replicas > 1:
            dist.all_reduce(tensor, group=self.peers)
        return tensor

    def sum_over_stages(self, tensor):
        """Sum over the ranks of this replica, in place."""
        if self.stages > 1:
            dist.all_reduce(tensor, group=self.stage_group)
        return tensor

    def in_stages(self, stages, timeout=None):
        """This world as size / stages replicas of so many ranks each; call on every rank."""
        if stages == 1:
            return self
        lines = [dist.new_group(range(first, first + stages), timeout) for first in range(0, self.size, stages)]
        peers = [dist.new_group(range(stage, self.size, stages), timeout) for stage in range(stages)]
        return replace(self, stages=stages, stage_group=lines[self.rank // stages], peers=peers[self.rank % stages])

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

    def barrier(self, name, patience=None):
        """All ranks have come here: a wait of minutes, where a collective would give up after the short time-
        out.
        """
        if self.size > 1:
            _meet(self.store, f"meet/{name}", self.size, patience)

    def watched(self):
        """From here on the pulse ends hangs: no collective gives up before it, however long a step or a save
        takes.
        """
        if self.size > 1:
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in (None, self.stage_group, self.peers):
                set_timeout(WATCHED, group)

    @contextlib.contextmanager
    def all_or_none(self, name):
        """All ranks leave this block, or none: what a person must mend on one rank is said once and raised on
        each.
        """
        try:
            yield
        except UserError as error:
            if self.size > 1:
                self.store.set(f"meet/{name}/open", json.dumps([str(error), error.code]))
                deadline = time.monotonic() + ANSWER.total_seconds()
                while self.store.add(f"meet/{name}/heard", 0) < self.size - 1 and time.monotonic() < deadline:
                    time.sleep(0.01)  # the store ends with rank 0: let the others hear first
            raise
        self.barrier(name)

    def new_store_client(self):
        """A second connection to this life's store, for a thread that must not wait behind the main one."""
        return dist.TCPStore(self.store.host, self.store.port, is_master=False, timeout=ANSWER)

    def local_barrier(self, name="node"):
        """All ranks of this node have come here; each name is good for one meeting."""
        if self.local_size > 1:
            _meet(self.store, f"{name}/{self.node}", self.local_size)

    def once_per_node(self, name, find):
        """The text that `find` returns on the first rank of this node, on all of its ranks; each name is good
        for once.
        """
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


def _too_few(processes, gpus):
    return UserError(f"{processes} processes on this machine but {gpus} GPUs are visible\n"
                     f"start at most {gpus} (--nproc_per_node={gpus}), or use --device cpu")


def _refuse_a_shared_gpu(store, device, local_size):
    """Where each process sees one GPU, it must not be the same one."""
    if device.type == "cuda" and local_size > torch.cuda.device_count() == 1:
        gpu = torch.cuda.get_device_properties(device).uuid
        if store.add(f"gpu/{machine()}/{gpu}", 1) > 1:
            raise _too_few(local_size, 1)


def devices_line(world):
    """Which physical devices these are: torch counts only those that CUDA_VISIBLE_DEVICES leaves."""
    if world.device.type != "cuda":
        return f"devices {', '.join(map(str, world.devices))}   {torch.get_num_threads()} CPU threads a process"
    visible = [v for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    return "devices " + ", ".join(
        f"{d} (physical {visible[d.index or 0].strip() if visible else d.index or 0}, {torch.cuda.get_device_name(d)})"
        for d in world.devices)


def memory(world):
    """MiB in use on each GPU of this process, under names for the log: the first one's surplus is
    nn.DataParallel's price.
    """
    return {f"MiB_{d.index}": torch.cuda.memory_allocated(d) >> 20 for d in world.devices if d.type == "cuda"}
