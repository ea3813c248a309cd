"""The end of a job: what a survivor left in memory, for a life that does not come, goes to the disk."""
import fcntl
import mmap
import os
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace


def keep(opts, say):
    """Saves the newest state in this machine's memory if the disk lacks it; False if that fails.

    A worker may die in the moment in which the job is told to stop, and a life may end before its first save.
    """
    base = Path("/dev/shm" if opts.memory_tier == "auto" else opts.memory_tier)
    if opts.memory_tier == "off" or not any(base.glob(f"elastic-{os.getuid()}-*/step-*")):
        return True
    from common.checkpoint.fence import Fence, move_away  # torch: a second where nothing has imported it
    from common.checkpoint.files import Damaged
    from common.checkpoint.lock_file import record_of
    from common.checkpoint.manifest import checkpoints
    from common.checkpoint.memory import USERS, Memory, locked
    from common.errors import UserError
    life, where, fence = uuid.uuid4().hex[:12], base, None
    try:
        memory = Memory(base, opts.run_dir, record_of(opts.run_dir).get("token"), {"life": life})
        if (alone := locked(memory.root / USERS, fcntl.LOCK_EX)) is None:
            return True  # there is none, or another launcher of this machine still trains
        os.close(alone)
        saved = max((step for step, _ in checkpoints(opts.run_dir / "checkpoints")), default=-1)
        if left := [found for found in checkpoints(memory.root) if found[0] > saved]:
            where = left[0][1]
            memory.join()
            fence = Fence(opts.run_dir, life)
            fence.claim(say)
            step = _save_newest(left, fence)
            say(f"torchrun: step {step} was in memory and is saved: no other life follows", sys.stderr)
        move_away(memory.root)
        return True
    except (UserError, OSError, Damaged) as error:
        text = str(error).splitlines()[0]
        say(f"torchrun: the newest state is in this machine's memory alone, in {where}: {text}\n"
            "          start the run again here", sys.stderr)
        return False
    finally:
        if fence:
            fence.release()


def _save_newest(left, fence):
    """Saves the newest of these that verifies; returns its step."""
    from common.checkpoint.commit import Writer
    from common.checkpoint.files import Damaged
    from common.checkpoint.manifest import KINDS, TENSORS, verify
    for number, (step, folder) in enumerate(left, 1):
        try:
            manifest, facts = verify(step, folder)
        except Damaged:
            if number == len(left):
                raise
            continue
        images = {}
        for part, name in TENSORS.items():
            with open(folder / name, "rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            images[part] = SimpleNamespace(bytes=view)
        marks = {name: manifest[name] for name in (*KINDS, "decides", "pinned") if name in manifest}
        Writer(fence.root, fence.staging, marks).commit(images, facts)
        return step
