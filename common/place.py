"""Where this process stands among the others: what torchrun, Slurm or a person set in its environment.

Only this file reads these variables. No torch here, and nothing of common/.
"""
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """One process of a job; without variables the only one."""

    rank: int
    size: int
    local_rank: int           # on this machine; a guess if `by_hand`
    local_size: int
    node: int                 # number of this machine
    nodes: int
    is_rank: bool             # RANK is set: somebody started several processes
    by_hand: bool             # RANK and WORLD_SIZE are set alone: the ranks find out who shares a machine
    address: str              # where rank 0 listens
    port: int
    agent: str                # run id of torchrun's agent above this process; empty without one
    agent_store: bool         # the agent keeps a store at `address`, for all its lives
    restart: int              # lives before this one
    restarts_left: int
    notes: Path | None        # the agent's folder, which ends with it
    slurm_job: str
    requeued: bool            # Slurm has requeued this job: it has new agents, but it is the same job
    gpus: tuple[str, ...]     # CUDA_VISIBLE_DEVICES; empty if it is not set, or hides all
    gpus_are_set: bool

    @property
    def speaks(self) -> bool:
        """Whether this process prints what concerns its machine."""
        return self.local_rank == 0


def here(environ: Mapping[str, str] = os.environ) -> Place:
    """This process's place; ValueError for variables that contradict each other."""
    rank = _number(environ, "RANK", 0)
    size = _number(environ, "WORLD_SIZE", 1)
    local_rank = _number(environ, "LOCAL_RANK", rank)
    local_size = _number(environ, "LOCAL_WORLD_SIZE", size)
    restart = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    _check_ranks(environ, rank, size, local_rank, local_size)
    error_file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    in_folder = error_file.match(f"attempt_{restart}/*/*")
    gpus = environ.get("CUDA_VISIBLE_DEVICES", "")
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node=_number(environ, "GROUP_RANK", rank // local_size),
        nodes=_number(environ, "GROUP_WORLD_SIZE", 1),
        is_rank="RANK" in environ,
        by_hand=size > 1 and "LOCAL_RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ,
        address=environ.get("MASTER_ADDR", ""),
        port=_number(environ, "MASTER_PORT", 0) if size > 1 else 0,  # Kubernetes may set it to tcp://...
        agent=environ.get("TORCHELASTIC_RUN_ID", ""),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=restart,
        restarts_left=_number(environ, "TORCHELASTIC_MAX_RESTARTS", restart) - restart,
        notes=error_file.parents[2] if in_folder else None,
        slurm_job=environ.get("SLURM_JOB_ID", ""),
        requeued=environ.get("SLURM_RESTART_COUNT", "0") != "0",
        gpus=tuple(name.strip() for name in gpus.split(",") if name.strip()),
        gpus_are_set="CUDA_VISIBLE_DEVICES" in environ)


def _number(environ, name, default):
    text = environ.get(name, str(default))
    if text.isascii() and text.isdecimal():
        return int(text)
    raise ValueError(f"{name}={text!r} is not a whole number\n"
                     "unset it, or start with torchrun, which sets it")


def _check_ranks(environ, rank, size, local_rank, local_size):
    alone = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if size > 1 and alone or rank and "WORLD_SIZE" in alone:
        raise ValueError(f"RANK={rank} and WORLD_SIZE={size}, but {alone[0]} is not set\n"
                         "start with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
    if not rank < size:
        raise ValueError(f"RANK={rank} with WORLD_SIZE={size}: ranks go from 0 to {size - 1}\n"
                         "lower RANK, or raise WORLD_SIZE")
    if not local_rank < local_size <= size:
        raise ValueError(f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size}, WORLD_SIZE={size}\n"
                         "local ranks go from 0 to LOCAL_WORLD_SIZE - 1, which WORLD_SIZE includes")
