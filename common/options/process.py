"""This process and others: who each is (host, boot, pid, start time), whose agent started it, and whether the
holder of a lock runs, is stopped, orphaned or gone. No torch here.
"""
import ctypes
import hashlib
import os
import signal
import socket
import sys

# states in /proc/PID/stat of a process that does not move by itself, or never will
STOPPED, DEAD = b"Tt", b"ZX"


def die_with_the_agent():
    """A SIGKILLed agent would leave its workers training on as orphans, two rank 0 in one run after the next
    start.

    Called before torch is imported too: that takes seconds, in which an agent can die.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    parent = os.getppid()  # it may have died before this line: then init has adopted
    try:  # us, or a user's systemd; in a container an agent can be 1
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            name = os.path.basename(file.read().split(b"\0")[0])
    except OSError:
        return
    if parent == 1 and not name.startswith((b"python", b"torchrun")) or name.startswith(b"systemd"):
        os._exit(1)


def machine():
    """The name of this machine, or of this container on it, in this boot."""
    return f"{socket.gethostname()} {_this_boot()}"


def job_id():
    """What two lives of one job share: Slurm's number, the agent's run id, or (without an agent) this
    process.
    """
    if "SLURM_JOB_ID" in os.environ:
        return f"slurm/{os.environ['SLURM_JOB_ID']}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"{socket.gethostname()}/{this_agent()}"


def queued_again():
    """Whether Slurm has started this very job before: then its agents are others, and it is still no new job.
    """
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def machine_id():
    """The same as a number that ranks can gather."""
    return int.from_bytes(hashlib.sha256(machine().encode()).digest()[:7], "little")


def end_of(pid):
    """How a process of this machine has ended, in words, or None. A zombie still tells by what, until its
    agent clears it away.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
        if fields[0] not in b"ZX":
            return None
        code = os.waitstatus_to_exitcode(int(fields[49]))
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has left with code {code}"
    except (OSError, ValueError, IndexError):
        return "is gone" if os.path.exists("/proc/self/stat") else None


def this_agent():
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return f"{pid}/{_started(pid)}"


def _this_boot():
    """Where a pid means something: this boot of this machine, this container."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _state(pid):
    """(state, start in ticks since boot) of a process, or None: a pid alone may be reused."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
            return fields[0], int(fields[19])
    except (OSError, IndexError, ValueError, TypeError):
        return None


def _started(pid):
    found = _state(pid)
    return found[1] if found else None


def this_process():
    return {"host": socket.gethostname(), "machine": _this_boot(), "pid": os.getpid(), "started": _started(os.getpid()),
            "job": job_id(), "agent": this_agent()}


def agent_id():
    """A 62-bit number of the agent above this process (or of the process itself), on this machine, in this
    boot.
    """
    return int.from_bytes(hashlib.sha256(f"{machine()} {this_agent()}".encode()).digest()[:8], "little") >> 2


def holder_status(owner):
    """What can be said of the process that holds a lock: alive, stopped, orphan, lost, gone or unknown.

    orphan: it lives, and its agent does not. lost: an orphan that stands still, so nobody will ever wake it
    for our good. unknown: it is on another machine.
    """
    if owner.get("machine") is None or owner["machine"] != _this_boot():
        return "unknown"
    found = _state(owner.get("pid"))
    if found is None or found[1] != owner.get("started") or found[0] in DEAD:
        return "gone"  # its lock is about to fall, or it is a network's
    stopped = found[0] in STOPPED
    agent, _, started = str(owner.get("agent")).partition("/")
    if str(_started(agent)) != started:
        return "lost" if stopped else "orphan"
    return "stopped" if stopped else "alive"
