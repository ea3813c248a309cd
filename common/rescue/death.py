"""Who died, and of what, in words."""
import os
import re
import time

from common.errors import UserError
from common.options import end_of, machine_id

ZOMBIE_SECONDS = 0.05      # from a connection's end until the process behind it tells how it ended


def dead_peer(places):
    """(rank, pid, how it ended) of a process of this machine, one that was killed first; or None."""
    deadline = time.monotonic() + ZOMBIE_SECONDS
    while time.monotonic() < deadline:
        if ends := ended_here(places):
            return next((end for end in ends if "killed" in end[2]), ends[0])
        time.sleep(0.002)


def ended_here(places):
    """(rank, pid, how it ended) of each process of this machine that has ended."""
    return [(rank, place[0], how) for rank, place in enumerate(places)
            if place[1] == machine_id() and (how := end_of(place[0]))]


def restart_is_sure(rescue):
    """Whether another life begins here: then memory may keep the state, and nothing waits for the disk.

    Sure is only: processes of this machine have died, none of them has left by itself, their agent lives,
    and each agent may start another life. It ends this one with SIGTERM; other signals are a person's.
    """
    if rescue.asked not in (None, "SIGTERM"):
        return False
    killed = rescue.store.memory.died([rank for rank, _, _ in ended_here(rescue.places)])
    return killed and os.getppid() == rescue.agent and min(left for *_, left in rescue.places) > 0


def in_words(error):
    """One line that names the cause; for an error in a loading process, the last line of its traceback."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, UserError):
        return lines[0]
    if "Original Traceback" in str(error):
        return lines[-1][:120]
    first = re.sub(r"^\[\S+\] ", "", lines[0])  # gloo begins with a path
    return f"{type(error).__name__}: {first}"[:120]
