"""Identifies a process (host, boot, pid, start time) and tells whether the holder of a lock runs, is stopped,
orphaned or gone.
"""
import hashlib
import os
import socket

from common.options import job_id, machine, process_start, process_state, this_agent, this_boot

# states in /proc/PID/stat of a process that does not move by itself, or never will
STOPPED, DEAD = b"Tt", b"ZX"


def this_process():
    return {"host": socket.gethostname(), "machine": this_boot(), "pid": os.getpid(), "started": process_start(os.getpid()),
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
    if owner.get("machine") is None or owner["machine"] != this_boot():
        return "unknown"
    found = process_state(owner.get("pid"))
    if found is None or found[1] != owner.get("started") or found[0] in DEAD:
        return "gone"  # its lock is about to fall, or it is a network's
    stopped = found[0] in STOPPED
    agent, _, started = str(owner.get("agent")).partition("/")
    if str(process_start(agent)) != started:
        return "lost" if stopped else "orphan"
    return "stopped" if stopped else "alive"
