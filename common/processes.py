"""What can be said of a process, ours or another: who it is, and whether it will ever move again."""
import contextlib
import ctypes
import hashlib
import os
import resource
import socket

from common.errors import UserError
from common.options import job_id, machine, process_start, process_state, this_agent, this_boot

STOPPED, DEAD = b"Tt", b"ZX"     # states in /proc/PID/stat of a process that does not move by itself, or never will
TRIM, MMAP = -1, -3      # mallopt's names for when memory goes back to the kernel, and from which size on at once


def keep_memory():
    """What a step frees stays with the process, for the next step.

    glibc gives freed tensors back to the kernel, which clears each page before the next step may have it: a quarter of the
    time of a ResNet on CPUs.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):                                    # glibc; other libraries have no such habit, or no such choice
        libc.mallopt(TRIM, 2**31 - 1)
        libc.mallopt(MMAP, 1 << 30) or libc.mallopt(MMAP, 1 << 25)  # the most that older ones take


def allow_open_files(number, whose):
    """Raise this process's limit to what the system allows; a UserError where that is less than `number`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):                  # where none is said to be infinite, and is not
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < number:
        raise UserError(f"{whose} need {number} open files, but this machine allows each of them {hard}\n"
                        "raise the hard limit (ulimit -Hn, LimitNOFILE), or start fewer processes")


def about_me():
    return {"host": socket.gethostname(), "machine": this_boot(), "pid": os.getpid(), "started": process_start(os.getpid()),
            "job": job_id(), "agent": this_agent()}


def agent_id():
    """A 62-bit number of the agent above this process (or of the process itself), on this machine, in this boot."""
    return int.from_bytes(hashlib.sha256(f"{machine()} {this_agent()}".encode()).digest()[:8], "little") >> 2


def fate_of(owner):
    """What can be said of the process that holds a lock: alive, stopped, orphan, lost, gone or unknown.

    orphan: it lives, and its agent does not. lost: an orphan that stands still, so nobody will ever wake it for our
    good. unknown: it is on another machine.
    """
    if owner.get("machine") is None or owner["machine"] != this_boot():
        return "unknown"
    found = process_state(owner.get("pid"))
    if found is None or found[1] != owner.get("started") or found[0] in DEAD:
        return "gone"                                               # its lock is about to fall, or it is a network's
    stopped = found[0] in STOPPED
    agent, _, started = str(owner.get("agent")).partition("/")
    if str(process_start(agent)) != started:
        return "lost" if stopped else "orphan"
    return "stopped" if stopped else "alive"
