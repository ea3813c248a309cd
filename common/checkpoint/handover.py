"""How a state gets from one life to the next through memory: who leaves it, and who takes it.

memory.py has the images. Without a memory tier each method here does nothing.
"""
import contextlib
import os
import re
from functools import partial
from pathlib import Path

import torch

from common.checkpoint.files import Damaged
from common.checkpoint.load import send_facts
from common.checkpoint.manifest import checkpoints, folder_name, is_there
from common.checkpoint.memory import Memory, images_in, read_image, remove
from common.errors import UserError
from common.world import send

SHARED = Path("/dev/shm")
MARGIN_BYTES = 1 << 24   # must stay free beside two images
ALONE = "there is no survivor, or no agent that starts another life"


class Handover:
    """The store's side of the memory tier."""

    def __init__(self, tier):
        self.tier, self.memory, self.where = tier, None, "disk"
        self.unsaved, self.begun = None, False  # facts and images that the disk lacks

    def load(self, store):
        """Loads the state if memory has a newer one than any disk, and names it; call on every rank."""
        if self.tier == "off":
            return None
        self.memory = open_memory(self.tier, store)
        own = checkpoints(store.root) if store.fence else []
        saved = own[0][0] if own else -1
        found = load_from_memory(store.world, self.memory, store.images, saved, store.report)
        if found is None:
            return None
        step, facts, images = found
        store.take(images, facts)
        if store.fence:
            store.committed, store.saved, self.unsaved = saved, store.state.facts(), (facts, images)
        return f"memory/{folder_name(step)}"

    def begin(self, store):
        """Once a step is made, which it would slow down: saves what was loaded, makes pages."""
        if not self.begun:
            self.begun = True
            if self.unsaved:
                store.background.busy.acquire()
                store.start_writing(*self.unsaved)
                self.unsaved = None
            store.background.do(partial(self._make_pages, store))

    def leave(self, store, state):
        """Whether this rank left its state in memory; None if it cannot."""
        if self.memory is None:
            return None
        with contextlib.suppress(OSError), state.lock:  # no room: the disk has some
            facts = state.facts()
            new = not (state.half_updated or self.memory.has(facts) or is_there(store.root, facts))
            if new:
                self.memory.write(store.images, state.tensors(), facts, store.refuse_infinite)
                self.where = "memory"
            return new

    def _make_pages(self, store):
        """Neither a save nor a death should wait for new pages of memory."""
        for image in store.images.values():
            image.touch()
        if self.memory and store.world.local_rank == 0:
            self.memory.make_spare(store.images, lambda: not store.background.closing)

    def free(self, step):
        """The disk has this step."""
        if self.memory:
            self.memory.free(step)

    def sign_off(self, rank):
        """This rank ends by itself: no peer takes it for killed."""
        if self.memory:
            self.memory.sign_off(rank)

    def died(self, ranks):
        """Whether these ranks, which have ended, were killed: none of them has signed off."""
        return bool(self.memory and ranks) and not any(map(self.memory.has_signed_off, ranks))

    def end(self, step):
        """The disk has this step, and no life follows: nothing stays in memory but a newer one of a peer."""
        if self.memory and not any(newer > step for newer, _ in images_in(self.memory.folder)):
            remove(self.memory.folder)


def open_memory(tier, store):
    """The Memory of this machine, or None; call on every rank."""
    world, fence, run_dir, why = store.world, store.fence, store.run_dir, ""
    token = send(world, fence and fence.token.encode(), 0).decode()
    token = fence.token if fence else token  # a machine with a run folder of its own has a token of its own
    base = SHARED if tier == "auto" else Path(tier)
    with world.all_or_none("memory"):
        if world.local_rank == 0:
            memory = Memory(base, run_dir, token, world.life)
            why = _begin(memory, world, sum(image.size for image in store.images.values()), store.report)
            if why not in ("", ALONE) and tier != "auto":
                raise UserError(f"--memory-tier {base}: {why}\nname another folder, or use auto or off")
            if why not in ("", ALONE) and world.restart == 0:
                store.report(f"--memory-tier auto: {why}; survivors save to the disk")
    token = world.once_per_node("memory", lambda: "" if why else token)
    if token and world.local_rank:
        memory = Memory(base, run_dir, token, world.life)
        with contextlib.suppress(OSError):
            memory.join()
    return memory if token and memory.lock is not None else None


def _begin(memory, world, size, report):
    """Makes the folder ready; returns why it cannot be used, or ""."""
    try:
        memory.sweep_others(report)
        if not images_in(memory.folder) and (world.size == 1 or not world.restarts_left):
            return ALONE
        info, needed = os.statvfs(memory.base), 2 * size + MARGIN_BYTES
        room = {str(memory.base): info.f_bavail * info.f_frsize, "this machine's memory": free_memory()}
        where, free = min(room.items(), key=lambda item: item[1])
        if free < needed and not images_in(memory.folder):
            return f"{where} has {free:,} bytes free, two images need {needed:,}"
        memory.join()
        memory.sweep()
    except OSError as error:
        return f"{error.filename or memory.folder}: {error.strerror or error}"
    return ""


def free_memory():
    """Bytes that this machine, or this container, may still use; cached files count as free."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    for folder, most, used in (("", "memory.max", "memory.current"),
                               ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or "max"
            place = Path("/sys/fs/cgroup", folder)
            told = (place / "memory.stat").read_text()
            cached = re.findall(r"^(?:in)?active_file (\d+)", told, re.MULTILINE)
            left = int((place / most).read_text()) - int((place / used).read_text())
            free = min(free, left + sum(map(int, cached)))
    return free


def load_from_memory(world, memory, images, saved, report):
    """(step, facts, {part: image}) if memory has a newer state than any disk, else None; call on every rank.

    `saved` is the newest step on this rank's disk. Each rank reads the image of its machine, all at once; a
    machine without it gets it from another one.
    """
    while True:
        step, content, folder = memory.newest() if memory else (-1, 0, None)
        views = [v.tolist() for v in world.all_gather(torch.tensor([step, content, saved]))]
        best = max(view[:2] for view in views)
        if best[0] <= max(view[2] for view in views):
            return None
        facts = found = None
        if best == [step, content]:
            try:
                facts, found = read_image(step, folder, images)
            except FileNotFoundError:
                pass  # another rank of this machine found it damaged first
            except Damaged as reason:
                report(f"{folder}: {reason}; deleted")
                remove(folder)
        whole = [bool(v) for v in world.all_gather(torch.tensor([found is not None]))]
        if any(whole):
            break
    if not all(whole):
        facts = send_facts(world, facts, whole.index(True))
        for part, image in images.items():
            buffer = found[part].buffer if found else image.open(touch=False).buffer
            world.broadcast(buffer, whole.index(True))
    return best[0], facts, found or images
