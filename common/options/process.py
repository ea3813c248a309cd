"""Identifies a process (host, boot, pid, start time) and its agent. No torch here."""
import ctypes
import hashlib
import os
import signal
import socket
import sys
from typing import Any, NamedTuple

from common.place import here

DEAD = b"ZX"  # states in /proc/PID/stat: zombie or dead


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


def agent_pid() -> int:
    """The parent, or launch/torchrun.py above its fork server."""
    return int(os.environ.get("LAUNCHER_PID", os.getppid()))


def _machine():
    """The name of this machine, or of this container on it, in this boot."""
    return f"{socket.gethostname()} {_this_boot()}"


def job_id():
    """The same in all lives of a job: Slurm's number, the agent's run id, or (without both) this process."""
    if "SLURM_JOB_ID" in os.environ:
        return f"slurm/{os.environ['SLURM_JOB_ID']}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"{socket.gethostname()}/{this_agent()}"


def machine_id() -> int:
    """This machine, or this container on it, in this boot, as a number that ranks can gather."""
    return int.from_bytes(hashlib.sha256(_machine().encode()).digest()[:7], "little")


class Ending(NamedTuple):
    """How a process has ended."""

    words: str = "is gone"
    killed: bool = False


def end_of(pid: int) -> Ending | None:
    """How a process of this machine has ended, or None; a zombie still has its exit code.

    A fork server reaps its processes at once; then launch/agent.py leaves a file with these words.
    """
    if (found := _state(pid)) is None:
        notes = here().notes
        if notes and (notes / f"death-{pid}").exists():
            return Ending((notes / f"death-{pid}").read_text(), killed=True)
        return Ending() if os.path.exists("/proc/self/stat") else None
    if found[0] not in DEAD:
        return None
    code = os.waitstatus_to_exitcode(found[2])
    if code < 0:
        return Ending(f"was killed by {signal.Signals(-code).name}", killed=True)
    return Ending(f"has left with code {code}")


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
    """What a lock's file tells of its holder."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "machine": _this_boot(), "pid": pid, "job": job_id(),
            "started": _started(pid), "process": f"{pid}/{_started(pid)}", "agent": this_agent()}


def has_ended(holder: dict[str, Any], name: str) -> bool:
    """Whether the holder's "process", or its "agent", is known to have ended: only on the same machine."""
    if not holder.get("machine") or holder["machine"] != _this_boot():
        return False
    pid, _, started = str(holder.get(name)).partition("/")
    found = _state(pid)
    return found is None or str(found[1]) != started or found[0] in DEAD
