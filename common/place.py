"""Where this process stands: which rank, under which agent, on which machine; and which processes have ended.

Only this file reads RANK and the other variables of a launcher: of torchrun, launch/torchrun.py, Slurm or a
person. No torch here, and nothing of common/.
"""

import ctypes
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

MEETING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# signals that ask a process to stop; USR1: Slurm's early warning; HUP: the terminal is gone
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STOPPED = 143  # exit code of one that such a signal has ended, saved
# How many tasks srun or mpirun has started; each is a process of its own until WORLD_SIZE is set.
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
NO_NUMBER = -1  # stands for a variable that is no whole number
DEAD = b"ZX"  # states in /proc/PID/stat: zombie or dead


class Place(NamedTuple):
    """One process of a job; without variables the only one."""

    rank: int
    size: int
    local_rank: int  # on this machine; if it is not set, all ranks are on one
    local_size: int
    local_size_is_set: bool
    address: str  # where rank 0 listens
    port: int
    agent: str  # run id of torchrun's agent above this process; empty without one
    agent_pid: int  # of the agent, if there is one
    agent_store: bool  # the agent keeps a store at `address`, for all its lives
    restart: int  # lives before this one
    restarts_left: int
    notes: Path | None  # the agent's folder, which ends with it
    launched: bool  # by launch/torchrun.py
    gpus: str  # CUDA_VISIBLE_DEVICES; empty if it is not set, or hides all

    @property
    def can_meet(self) -> bool:
        """Return whether the variables that ranks need to meet are there, and fit each other."""
        in_range = 0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size
        return in_range and (self.size == 1 or self.address != "" and self.port != NO_NUMBER)

    @property
    def speaks(self) -> bool:
        """Return whether this process prints what concerns its machine."""
        return self.local_rank == 0 or not self.can_meet


def here() -> Place:
    """Return this process's place, as the environment has it."""
    environ = os.environ
    size = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0 if size == 1 else NO_NUMBER)
    local_size = _number("LOCAL_WORLD_SIZE", size)
    restart = _number("TORCHELASTIC_RESTART_COUNT", 0)
    error_file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    in_folder = error_file.match(f"attempt_{restart}/*/*")
    return Place(
        rank=rank,
        size=size,
        local_rank=_number("LOCAL_RANK", rank),
        local_size=local_size,
        local_size_is_set="LOCAL_WORLD_SIZE" in environ,
        address=environ.get("MASTER_ADDR", ""),
        port=_number("MASTER_PORT", NO_NUMBER),
        agent=environ.get("TORCHELASTIC_RUN_ID", ""),
        agent_pid=_number("LAUNCHER_PID", os.getppid()),  # above its fork server
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=restart,
        restarts_left=_number("TORCHELASTIC_MAX_RESTARTS", restart) - restart,
        notes=error_file.parents[2] if in_folder else None,
        launched="LAUNCHER_PID" in environ,
        gpus=environ.get("CUDA_VISIBLE_DEVICES", "").strip(),
    )


def _number(name, default):
    text = os.environ.get(name, str(default))
    return int(text) if text.isascii() and text.isdecimal() else NO_NUMBER


def tasks_beside() -> str:
    """Return the variable that tells of siblings which this process does not know of; empty if none does."""
    named = [f"{name}={os.environ[name]}" for name in TASKS if _number(name, 1) > 1]
    return "" if "WORLD_SIZE" in os.environ else " ".join(named[:1])


def meeting_variables() -> str:
    """Return what the environment has of them, for an error."""
    return ", ".join(
        f"{name}={os.environ[name]!r}" if name in os.environ else f"{name} is not set" for name in MEETING
    )


# ---- this life, as its agent sees it --------------------------------------------------------------
def note_start(trains: bool = False) -> None:
    """Tell launch/agent.py, by a file, that this rank begins; then that it has met the others, and trains."""
    place = here()
    if place.notes:
        name = f"{place.restart}-{place.local_rank}"
        note = place.notes / f"start-{name}"
        with suppress(OSError):
            if trains:
                note.rename(place.notes / f"trains-{name}")
            else:
                note.touch()


def die_with_the_parent() -> None:
    """Let the kernel end this process when its parent dies: the agent, or its fork server.

    Workers of a SIGKILLed agent would go on training: after the next start a run would have two ranks 0.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    parent = os.getppid()  # if it died before this line: init or a user's systemd
    with suppress(OSError):  # in a container the agent itself can be process 1
        name = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0].rpartition(b"/")[2]
        adopted_by_init = parent == 1 and not name.startswith((b"python", b"torchrun"))
        if adopted_by_init or name.startswith(b"systemd"):
            os._exit(1)


# ---- machines and processes -----------------------------------------------------------------------
def _this_boot():
    """Name the boot and the container in which a pid is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def this_process() -> dict[str, Any]:
    """Return what a lock's file tells of its holder. Its job is the same in all lives of that job."""
    place = here()
    host = socket.gethostname()
    process = _named(os.getpid())
    agent = _named(os.getppid()) if place.agent else process
    slurm_job = os.environ.get("SLURM_JOB_ID")
    if slurm_job:
        job = f"slurm/{slurm_job}"
    elif place.agent not in ("", "none"):
        job = place.agent
    else:
        job = f"{host}/{agent[0]}/{agent[1]}"
    return {
        "host": host,
        "machine": _this_boot(),
        "pid": os.getpid(),
        "job": job,
        "process": process,
        "agent": agent,
    }


def _named(pid):
    """Return a pid and its start in ticks since boot, as it may be used again; None once it has ended."""
    return [pid, start_of(pid)]  # as JSON gives it back


def start_of(pid: int) -> int | None:
    """Return when a process of this machine began, in ticks since boot; None if it does not live."""
    return _state(pid)[0]


def _state(pid):
    """Return (start of one that lives, in ticks since boot; exit status of a zombie), each else None."""
    try:
        state, *fields = Path(f"/proc/{int(pid)}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except (OSError, ValueError):
        return None, None
    if state in DEAD:
        return None, int(fields[48])
    return int(fields[18]), None


def has_ended(holder: Mapping[str, Any], name: str) -> bool:
    """Return whether the holder's "process", or its "agent", has ended: known only on the same machine."""
    if not holder.get("machine") or holder["machine"] != _this_boot():
        return False
    return _named(holder[name][0]) != holder[name]


def how_killed(pid: int) -> str:
    """Say how a process of this machine was killed; nothing if it lives, or has ended by itself.

    A zombie still has its exit code. A fork server reaps its processes at once; then launch/agent.py leaves a
    file with these words.
    """
    started, status = _state(pid)
    notes = here().notes
    if status is not None:
        code = os.waitstatus_to_exitcode(status)
        return in_words(code) if code < 0 else ""
    if started is None and notes:
        with suppress(OSError):
            return (notes / f"death-{pid}").read_text()
    return ""


def began() -> float:
    """Return when this process has begun, by the wall clock; now, if there is no /proc."""
    ticks = start_of(os.getpid())
    if ticks is None:
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def in_words(code: int) -> str:
    """Say how a process has ended: with this code, or if it is negative, by that signal."""
    if code >= 0:
        return f"has left with code {code}"
    if -code in {*signal.Signals}:
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"  # of real time: they have no names
