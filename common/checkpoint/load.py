"""Loads the newest checkpoint of any node on every rank: one rank of each folder reads and sends."""
from dataclasses import dataclass
from pathlib import Path

import torch

from common.checkpoint.blocks import put, threads
from common.checkpoint.files import Damaged, parse_json
from common.checkpoint.manifest import STATE, TENSORS, checkpoints, facts_to_json, verify
from common.errors import UserError
from common.world import progress, send


@dataclass(frozen=True)
class Found:
    step: int  # the newest that verifies anywhere, or -1
    own: int   # the newest of this node
    facts: dict
    skipped: list  # this node's damaged folders
    damaged: int   # the number of damaged folders on the node that has most


def load_newest(world, choices, images, key, report):
    """Reads the newest checkpoint into the images of every rank; call on every rank.

    `choices` is None on ranks that do not read.
    """
    read = into(images, progress(world.store))
    own, facts, skipped, unread = newest(choices or [], read, report)
    world.barrier(f"read {key}")  # a collective would not wait as long as reading takes
    layout = sum(image.layout() for image in images.values()) % 2**62
    views = [view.tolist() for view in world.all_gather(torch.tensor([own, len(skipped), layout, unread[0]]))]
    if len({view[2] for view in views}) > 1:
        raise UserError("the ranks have different nets or optimizers: names, shapes or types differ\n"
                        "run the same code and options on every node")
    step = max(view[0] for view in views)
    refuse_to_fall_back(world, f"unread {key}", unread, step)
    if step >= 0:
        source = [view[0] for view in views].index(step)
        facts = send_facts(world, facts, source)
        for image in images.values():
            world.broadcast(image.open(touch=False).buffer, source)
    return Found(step, own, facts, skipped, max(view[1] for view in views))


def send_facts(world, facts, source):
    """The facts of rank `source`, as read from JSON, on every rank."""
    return parse_json(send(world, facts and facts_to_json(facts), source), STATE)


def into(images, moved=None):
    """The `read` of `newest`: every tensor into the images of this rank."""
    buffers = {TENSORS[part]: image for part, image in images.items()}

    def place(name, start, data):
        put(buffers[name].bytes, start, data)

    def read(step, folder):
        needed = {part: image.open(touch=False).size for part, image in images.items()}
        _, facts = verify(step, folder, place, needed, moved=moved, count=threads())
        for part, image in images.items():
            image.check_header(TENSORS[part])
        return facts
    return read


def newest(choices, read, report=print):
    """(step, result of `read(step, folder)`, damaged folders, unread) of the first choice that verifies.

    `unread` is (step, text) of the newest that could not be read; each step is -1 where there is none.
    """
    skipped, unread = [], (-1, "")
    for step, folder in choices:
        place = f"{folder.parent.name}/{folder.name}"
        try:
            return step, read(step, folder), skipped, unread
        except Damaged as reason:
            skipped.append(folder)
            report(f"{place}: {reason}; skipped, trying the one before")
        except OSError as error:
            unread = max(unread, (step, f"{folder}: cannot be read: {error.strerror or error}"))
            report(f"{place}: {error.strerror or error}; trying the one before")
    return -1, None, skipped, unread


def refuse_to_fall_back(world, name, unread, step):
    """UserError on every rank if one could not read a newer checkpoint than `step`.

    Exit code 1: the disk or the server may answer when the agent starts the next life.
    """
    with world.all_or_none(name):
        if unread[0] > step:
            raise UserError(f"{unread[1]}; nothing shows that it is damaged, so it is not skipped\n"
                            "start again once it can be read, or move that folder away to resume from the "
                            "one before", code=1)


def take(state, tensors, facts, data, report):
    """Loads `tensors` and `facts` into the state; `data` is the fingerprint of the present dataset."""
    if facts["order"] == [data]:
        facts["order"] = state.order
    state.load(tensors, facts)
    if state.position < facts["position"] and report:
        report(f"step {state.step} was saved at position {facts['position']:,} of other data or of another "
               f"order; epoch {state.epoch + 1} begins again with {state.samples:,} samples, "
               "some of them for the second time")


def choices_at(path):
    """--resume PATH: that checkpoint, or those of that run, newest first."""
    path = Path(path)
    one = [choice for choice in checkpoints(path.parent) if choice[1].name == path.name]
    return one or checkpoints(path / "checkpoints")


def settle(store, found):
    """Puts aside what is newer than the step that was loaded; a node that lacks that step saves it."""
    for folder in found.skipped:
        ahead = int(folder.name[5:]) - found.step
        again = f"; {ahead} steps after step {found.step} will be made again" if ahead > 0 else ""
        store.report(f"checkpoints/{folder.name}: put aside{again}")
        store.writer.put_aside(folder)
    store.committed = found.own
    if found.own == found.step:
        store.let_go(found.facts)
    else:
        store.report(f"step {found.step} was received from another node and is saved here too")
        store.background.busy.acquire()
        store.start_writing(found.facts)  # this node may be the one that survives
