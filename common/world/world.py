"""The processes of one life: who is who, the device of each, and the few collectives."""
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError
from common.options import machine_id
from common.world.rendezvous import ANSWER, JOINING, wait

BROADCAST_BYTES = 1 << 28         # of one broadcast: bounds what the transport allocates
WATCHED = timedelta(days=1)       # a collective's time-out while the watchdog ends hangs


@dataclass(frozen=True)
class World:
    """The processes of this life; frozen, because a changed world is a new life."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    devices: tuple[torch.device, ...]
    life: str  # drawn by rank 0: names this life in the ledger, in the audit and in the fence
    restart: int
    store: Any = None  # a TCPStore of this life; None if there is one process
    stages: int = 1  # ranks that hold one replica of the net together, a stage each
    stage_group: Any = None  # the group of this rank's replica, if it is more than this rank
    peers: Any = None  # the group of the ranks with the same stage, if they are not all
    restarts_left: int = 0  # lives that the agent may still start after a failure; without an agent none

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
        return "none" if self.size == 1 else "nccl" if self.device.type == "cuda" else "gloo"

    def devices_line(self) -> str:
        """Which physical devices these are: torch counts only those that CUDA_VISIBLE_DEVICES leaves."""
        if self.device.type != "cuda":
            names = ", ".join(map(str, self.devices))
            return f"devices {names}   {torch.get_num_threads()} CPU threads a process"
        visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
        numbers = [visible[d.index or 0] if visible else d.index or 0 for d in self.devices]
        return "devices " + ", ".join(f"{device} (physical {number}, {torch.cuda.get_device_name(device)})"
                                      for device, number in zip(self.devices, numbers, strict=True))

    def memory(self) -> dict[str, int]:
        """MiB in use on each GPU of this process, for the log: nn.DataParallel needs more on the first."""
        gpus = [device for device in self.devices if device.type == "cuda"]
        return {f"MiB_{gpu.index}": torch.cuda.memory_allocated(gpu) >> 20 for gpu in gpus}

    def all_sum(self, tensor: Tensor, group: Any = None, ranks: int = 0) -> Tensor:
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

    def in_stages(self, stages: int, timeout: timedelta | None = None) -> "World":
        """This world as size / stages replicas of so many ranks each; call on every rank."""
        if stages == 1:
            return self
        replicas = [range(first, first + stages) for first in range(0, self.size, stages)]
        same_stage = [range(stage, self.size, stages) for stage in range(stages)]
        groups = [[dist.new_group(ranks, timeout) for ranks in kind] for kind in (replicas, same_stage)]
        own, peers = groups[0][self.rank // stages], groups[1][self.rank % stages]
        return replace(self, stages=stages, stage_group=own, peers=peers)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor (of one shape), in rank order."""
        if self.size == 1:
            return [tensor]
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(out, tensor)
        return out

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The source's bytes everywhere, in place; a flat tensor of any length."""
        if self.size > 1:
            for piece in tensor.view(-1).split(BROADCAST_BYTES // tensor.element_size()):
                dist.broadcast(piece, source)
        return tensor

    def barrier(self, name: str, patience: timedelta | None = None) -> None:
        """Waits for all ranks over the key-value store: up to 10 minutes, longer than a collective would."""
        if self.size > 1:
            _meet(self.store, f"meet/{name}", self.size, patience)

    def watched(self) -> None:
        """From now on the watchdog ends hangs: collectives wait, however long a step or a save takes."""
        if self.size > 1:
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in (None, self.stage_group, self.peers):
                set_timeout(WATCHED, group)

    @contextlib.contextmanager
    def all_or_none(self, name: str) -> Iterator[None]:
        """A UserError on one rank inside this block is raised on every rank."""
        try:
            yield
        except UserError as error:
            if self.size > 1:
                self.store.set(f"meet/{name}/open", json.dumps([str(error), error.code]))
                deadline = time.monotonic() + ANSWER.total_seconds()
                while self.store.add(f"meet/{name}/heard", 0) < self.size - 1 and time.monotonic() < deadline:
                    time.sleep(0.01)  # the store ends with rank 0: the others must read the error first
            raise
        self.barrier(name)

    def new_store_client(self) -> Any:
        """A second connection to this life's store, for a thread that must not wait for the main one."""
        return dist.TCPStore(self.store.host, self.store.port, is_master=False, timeout=ANSWER)

    def once_per_node(self, name: str, find: Callable[[], str]) -> str:
        """Calls `find` on the node's first rank, returns its text on all; use each name once per life."""
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
    """UserError if each process of a machine sees one GPU only, and two of them the same one."""
    if device.type == "cuda" and local_size > torch.cuda.device_count() == 1:
        gpu = torch.cuda.get_device_properties(device).uuid
        if store.add(f"gpu/{machine_id()}/{gpu}", 1) > 1:
            raise _too_few(local_size, 1)
