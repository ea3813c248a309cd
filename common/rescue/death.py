"""Which process died, and how, in words."""
import os
import re
import time

from common.errors import UserError
from common.options import end_of, machine_id

PEER_SECONDS = 1.0         # from a peer's end until all know: those in a collective, and those that hang
AGENT_SECONDS = 2.0        # after a peer's death: the agent's SIGTERM tells a planned change of the world
ZOMBIE_SECONDS = 0.05      # from a connection's end until the process behind it tells how it ended


def dead_peer(places):
    """(rank, pid, how it ended) of a process of this machine that has ended, a killed one if any; or None."""
    deadline = time.monotonic() + ZOMBIE_SECONDS
    while time.monotonic() < deadline:
        if ends := ended_here(places):
            return next((end for end in ends if "killed" in end[2]), ends[0])
        time.sleep(0.002)


def peers_end(rescue, error):
    """Which other rank has ended, and how if that is known here; None if none has."""
    end = time.monotonic() + PEER_SECONDS
    while isinstance(error, RuntimeError) and rescue.lines and not rescue.lost and time.monotonic() < end:
        time.sleep(0.002)  # a collective fails before the thread hears of the end
    own = isinstance(error, UserError)  # all ranks have this error, and some have left already
    if own or not rescue.lost or rescue.asked and not error:
        return None
    if (dead := dead_peer(rescue.places)) is None:
        return f"a peer is gone ({in_words(error)})" if error else "a peer is gone"
    rescue.dead = {"rank": dead[0], "why": dead[2]}
    return f"rank {dead[0]} (pid {dead[1]}) {dead[2]}"


def await_the_agent(rescue):
    """Waits for a signal: leaving before it would count a planned change of the world as a failure."""
    deadline = time.monotonic() + AGENT_SECONDS
    while not rescue.asked and time.monotonic() < deadline:
        time.sleep(0.02)


def ended_here(places):
    """(rank, pid, how it ended) of each process of this machine that has ended."""
    return [(rank, place[0], how) for rank, place in enumerate(places)
            if place[1] == machine_id() and (how := end_of(place[0]))]


def restart_is_sure(rescue):
    """Whether another life begins here: then memory may keep the state, and nothing waits for the disk.

    Processes of this machine have died, none has left by itself, their agent lives, and each agent may start
    another life. It ends this one with SIGTERM; other signals are a person's.
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
