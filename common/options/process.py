"""Identifies a process (host, boot, pid, start time) and its agent.

Also tells whether the holder of a lock runs, is stopped, orphaned or gone. No torch here.
"""
import ctypes
import hashlib
import os
import signal
import socket
import sys
from typing import Any

STOPPED, DEAD = b"Tt", b"ZX"  # states in /proc/PID/stat: stopped or traced; zombie or dead


def die_with_the_agent() -> None:
    """Lets the kernel end this process when its agent dies.

    Workers of a SIGKILLed agent would go on training: after the next start a run would have two ranks 0. Also
    called before torch is imported, for an agent can die in those seconds.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    parent = os.getppid()  # if it died before this line: init or a user's systemd
    try:  # in a container the agent itself can be process 1
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            name = os.path.basename(file.read().split(b"\0")[0])
    except OSError:
        return
    if parent == 1 and not name.startswith((b"python", b"torchrun")) or name.startswith(b"systemd"):
        os._exit(1)


def _machine():
    """The name of this machine, or of this container on it, in this boot."""
    return f"{socket.gethostname()} {_this_boot()}"


def job_id():
    """The same in all lives of a job: Slurm's number, the agent's run id, or (without both) this process."""
    if "SLURM_JOB_ID" in os.environ:
        return f"slurm/{os.environ['SLURM_JOB_ID']}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"{socket.gethostname()}/{this_agent()}"


def queued_again() -> bool:
    """Whether Slurm has requeued this job: it has new agents, but it is the same job."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def machine_id() -> int:
    """This machine, or this container on it, in this boot, as a number that ranks can gather."""
    return int.from_bytes(hashlib.sha256(_machine().encode()).digest()[:7], "little")


def end_of(pid: int) -> str | None:
    """How a process of this machine has ended, in words, or None; a zombie still has its exit code."""
    if (found := _state(pid)) is None:
        return "is gone" if os.path.exists("/proc/self/stat") else None
    if found[0] not in DEAD:
        return None
    code = os.waitstatus_to_exitcode(found[2])
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has left with code {code}"


def this_agent():
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return f"{pid}/{_started(pid)}"


def _this_boot():
    """Names the boot and the container in which a pid is unique."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _state(pid):
    """(state, start in ticks since boot, exit status) of a process, or None; a pid alone may be reused."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
            return fields[0], int(fields[19]), int(fields[49])
    except (OSError, IndexError, ValueError, TypeError):
        return None


def _started(pid):
    found = _state(pid)
    return found[1] if found else None


def this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _this_boot(), "pid": pid, "started": _started(pid),
            "job": job_id(), "agent": this_agent()}


def agent_id() -> int:
    """A 62-bit number of the agent above this process, or of itself; unique to machine and boot."""
    return int.from_bytes(hashlib.sha256(f"{_machine()} {this_agent()}".encode()).digest()[:8], "little") >> 2


def holder_status(owner: dict[str, Any]) -> str:
    """The process that holds a lock is alive, stopped, orphan, lost, gone or unknown.

    orphan: its agent has died. lost: an orphan that is stopped (SIGSTOP), so nothing will resume it. unknown:
    it is on another machine.
    """
    if owner.get("machine") is None or owner["machine"] != _this_boot():
        return "unknown"
    found = _state(owner.get("pid"))
    if found is None or found[1] != owner.get("started") or found[0] in DEAD:
        return "gone"  # the kernel is about to drop its lock, or a network file system keeps it
    stopped = found[0] in STOPPED
    agent, _, started = str(owner.get("agent")).partition("/")
    if str(_started(agent)) != started:
        return "lost" if stopped else "orphan"
    return "stopped" if stopped else "alive"
