"""Who died, and of what, in words."""
import re
import time

from common.errors import UserError
from common.options import end_of, machine_id

ZOMBIE_SECONDS = 0.05      # from a connection's end until the process behind it tells how it ended


def dead_peer(places):
    """(rank, pid, how it ended) of a process of this machine, one that was killed first; or None."""
    deadline = time.monotonic() + ZOMBIE_SECONDS
    while time.monotonic() < deadline:
        here = [(rank, pid) for rank, (pid, machine) in enumerate(places) if machine == machine_id()]
        ends = [(rank, pid, how) for rank, pid in here if (how := end_of(pid))]
        if ends:
            return next((end for end in ends if "killed" in end[2]), ends[0])
        time.sleep(0.002)


def in_words(error):
    """One line that names the cause; for an error in a loading process, the last line of its traceback."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, UserError):
        return lines[0]
    if "Original Traceback" in str(error):
        return lines[-1][:120]
    first = re.sub(r"^\[\S+\] ", "", lines[0])  # gloo begins with a path
    return f"{type(error).__name__}: {first}"[:120]
