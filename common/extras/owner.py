"""Who has a run folder that another start wants: one that may still save is waited for, or has it."""

import time

from common.errors import UserError, say
from common.place import has_ended, this_process

LEASE_SECONDS = 90.0  # without a move, of another job on another machine: networks show moves late
MOVING_SECONDS = 6.0  # after so long we refuse a run whose counter another job moves
SAME_JOB_SECONDS = 60.0  # an earlier life of our own job may still save; then the newest takes the run


def wait_for_owner(path, looks, stale_seconds):
    """Wait until the owner has left, has ended or stands still. UserError if a job that lives has the run.

    An earlier life of our own job is waited for, or one whose agent has died: it may save. `looks` at the
    lock end with its process (`watched` in checkpoint/fence.py).
    """
    us = this_process()
    began = time.monotonic()
    reported = False
    seen = []  # what the owner wrote: a counter that moves is another job's that lives
    for owner, timer in looks:
        waited = time.monotonic() - began
        if owner not in seen:
            seen.append(owner)
        earlier = owner.get("job") == us["job"] or has_ended(owner, "agent")
        near = earlier or owner.get("machine") in (us["machine"], None)
        name = f"host {owner.get('host')}, pid {owner.get('pid')}"
        if timer.seconds >= (stale_seconds if near else LEASE_SECONDS):
            return
        if earlier and waited > SAME_JOB_SECONDS:
            return
        if not earlier and len(seen) > 1 and waited > MOVING_SECONDS:
            raise UserError(
                f"{path.parent} is in use by another job: {name}\n"
                "stop that job first, or give this one its own --run-dir",
                code=6,
            )
        if not reported and waited > MOVING_SECONDS / 2:
            say(f"{path.parent}: waiting for {name}, which has the folder")
            reported = True
