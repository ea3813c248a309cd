"""Named points of a training at which a process can be told to signal itself; all of it lives here, none in
the product.

The director arms a point by putting a file POINT.RANK (or POINT.any; the names are in __init__.py) into the
folder CHAOS_ARMED, with the signal's name in it. The first process to come by takes the file (a rename: one
process, once), writes a line to the journal, and signals itself.
"""

import atexit
import ctypes
import functools
import json
import os
import random
import signal
import threading
import time

ARMED = os.environ["CHAOS_ARMED"]
JOURNAL = os.environ["CHAOS_JOURNAL"]
REAL = {name: getattr(os, name) for name in ("pwrite", "fsync", "rename", "mkdir")}


def point(name, act=None):
    """Does what is armed here, if anything is."""
    if not name:
        return
    for who in (os.environ.get("RANK", "0"), "any"):
        claimed = f"{ARMED}/claimed-{os.getpid()}-{threading.get_ident()}"
        try:
            REAL["rename"](f"{ARMED}/{name}.{who}", claimed)
        except OSError:
            continue
        with open(claimed) as file:
            what = file.read().strip()
        os.unlink(claimed)
        (act or _signal)(name, what)


def note(name, what):
    """On disk before the signal: a kill that leaves no line has not landed."""
    with open(JOURNAL, "a") as file:
        file.write(json.dumps({"pid": os.getpid(), "point": name, "signal": what}) + "\n")


def _signal(name, what):
    note(name, what)
    if what == "LOCK":  # a lock held in C, and with it Python's own
        python = ctypes.PyDLL(None)
        mutex = ctypes.create_string_buffer(128)
        python.pthread_mutex_lock(mutex)
        python.pthread_mutex_lock(mutex)
    os.kill(os.getpid(), getattr(signal, f"SIG{what}"))


def _soon(name, what):
    """While DDP's buckets are under way: within the next moments, from a thread."""

    def strike():
        time.sleep(random.random() * 0.002)
        _signal(name, what)

    threading.Thread(target=strike, daemon=True).start()


def around(owner, attribute, before=None, after=None):
    real = getattr(owner, attribute)

    @functools.wraps(real)
    def wrapped(*args, **kwargs):
        point(before)
        result = real(*args, **kwargs)
        point(after)
        return result

    setattr(owner, attribute, wrapped)


def plant():
    """Around the names that the loop uses, torch's own hooks, and the system calls of a save."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    import common.elastic
    from common.extras.audit import Audit
    from common.store import CheckpointStore
    from common.training import TrainState
    from common.training.progress import Progress

    around(common.elastic, "join", "join", "joined")
    around(CheckpointStore, "restore", "restore", "restored")
    around(Audit, "begin", "begin")
    around(TrainState, "update", "step-before", "step-after")
    register_optimizer_step_pre_hook(lambda *_: point("step-inside"))
    register_optimizer_step_post_hook(lambda *_: point("step-torn"))
    torch.nn.modules.module.register_module_forward_hook(_after_forward)
    around(common.elastic, "evaluate", "evaluate", "evaluated")
    around(Progress, "end_epoch", "epoch-end", "epoch-ended")
    around(CheckpointStore, "close", "close", "closed")
    around(common.elastic, "leave", "leave", "left")
    atexit.register(point, "exit")
    _plant_in_saves()


def _after_forward(module, inputs, output):
    if type(module).__name__ == "Pace":
        point("forward" if module.training else "evaluating")
    elif type(module).__name__ == "Linear" and output.requires_grad:
        output.register_hook(_in_backward)


def _in_backward(gradient):
    point("backward")
    point("allreduce", _soon)


def _name_of(fd):
    """What is written or synced through this descriptor."""
    name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
    if name.startswith("step-"):
        return "folder"
    return "root" if name == "checkpoints" else name


def _plant_in_saves():
    """A save: a staging folder, files in it, a rename out of it, two folders synced, an older one renamed."""

    def written(fd, data, at):
        def half(name, what):
            REAL["pwrite"](fd, data[: len(data) // 2], at)
            _signal(name, what)

        point(f"write:{_name_of(fd)}", half)
        return REAL["pwrite"](fd, data, at)

    def synced(fd):
        name = _name_of(fd)
        point(f"unsynced:{name}")
        REAL["fsync"](fd)
        point(f"synced:{name}")

    def renamed(source, target, **kwargs):
        before = after = None
        if "/checkpoints/.life" in os.fspath(source) and os.path.basename(target).startswith("step-"):
            before = "rename"
            after = "renamed"
        elif str(target).endswith(".gone"):
            before = "letgo"
            after = "gone"
        point(before)
        REAL["rename"](source, target, **kwargs)
        point(after)

    def made(path, *args, **kwargs):
        REAL["mkdir"](path, *args, **kwargs)
        if os.path.basename(path).startswith("step-"):
            point("mkdir")

    os.pwrite = written
    os.fsync = synced
    os.rename = renamed
    os.mkdir = made
