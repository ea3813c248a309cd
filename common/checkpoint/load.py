"""Loads the newest checkpoint of any node on every rank.

Each owner proposes its newest; the newest of these is agreed on, and its manifest is sent to all. Then each
rank reads what it needs out of the folder it sees, compares it with that manifest, and copies it straight
into its tensors, all ranks side by side. A rank that could not do so gets each block from one that could
(reading.py). If no rank has all bytes, all go on to the next proposal, which overwrites the tensors. So no
rank holds a second copy of the state.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from common.checkpoint.blocks import threads
from common.checkpoint.files import Damaged, parse_json, patient
from common.checkpoint.manifest import STATE, checkpoints, facts_to_json, numbers_of, read_facts
from common.checkpoint.reading import DAMAGED, FINE, LACKS, UNREAD, Reading
from common.errors import UserError
from common.world import progress, send

MOST_SOURCES = 3  # ranks that are asked in turn for what others could not read


@dataclass(frozen=True)
class Found:
    step: int      # the newest that verifies anywhere, or -1
    name: str      # of its folder
    own: bool      # whether the folder that this rank sees has it
    facts: dict
    skipped: list  # damaged ones in the folder that this rank owns
    damaged: int   # how many there are in the folder that has most


def load_newest(world, layout, choices, place, key, report):
    """Reads the newest checkpoint into the tensors of every rank; call on every rank.

    `choices` is None on ranks that own no folder; `place(name)` is a checkpoint's folder on this machine.
    """
    _same_nets(world, layout)
    own, turn = Choices(choices, layout, report), 0
    while True:
        told = own.propose()
        best, source, damaged = _agree(world, own, f"{key} {turn}")
        if best < 0:
            return Found(-1, "", False, {}, own.skipped, damaged)
        told = json.loads(send(world, json.dumps(told).encode() if world.rank == source else None, source))
        reading = Reading(layout, place(told["name"]), told)
        how, text = reading.read(best, progress(world.store), threads(world.local_size))
        world.barrier(f"loaded {key} {turn}")
        loaded, hows = _share_out(world, reading, how)
        if how in (UNREAD, DAMAGED) and hows.index(how) == world.rank:
            way_out = "received from another rank" if loaded else "trying the one before"
            report(f"{reading.folder.parent.name}/{told['name']}: {text}; {way_out}")
        own.judge(told["name"], how, loaded, DAMAGED in hows, world.rank == source, text)
        if loaded:
            return Found(best, told["name"], how == FINE, told["facts"], own.skipped, damaged)
        turn += 1


class Choices:
    """The checkpoints of the folder that this rank owns, newest first; none where it owns no folder."""

    def __init__(self, choices, layout, report):
        self.left, self.layout, self.report = list(choices or []), layout, report
        self.skipped, self.unread = [], (-1, "")  # unread: (step, text) of the newest that could not be read

    def propose(self):
        """All that a rank must know to read the newest one left, or None; what cannot be used is dropped."""
        while self.left:
            step, folder = self.left[0]
            try:
                manifest, facts = read_facts(step, folder)
                return {"name": folder.name, "files": manifest["files"], "facts": facts,
                        "segments": patient(self.layout.segments)(folder, manifest)}
            except Damaged as reason:
                self.skipped.append(folder)
                self._drop(f"{reason}; skipped")
            except OSError as error:
                self.unread = max(self.unread, (step, f"{folder}: cannot be read: {error.strerror or error}"))
                self._drop(error.strerror or error)
        return None

    def _drop(self, text):
        folder = self.left.pop(0)[1]
        self.report(f"{folder.parent.name}/{folder.name}: {text}, trying the one before")

    def judge(self, name, how, loaded, damaged, mine, text):
        """Drops the proposal if it is of this folder and could not be loaded; `mine`: this rank made it."""
        if not self.left or self.left[0][1].name != name or how == LACKS and not mine:
            return
        step, folder = self.left[0]
        if how == DAMAGED or damaged and not loaded:
            self.skipped.append(folder)
        elif not loaded:
            self.unread = max(self.unread, (step, f"{folder}: cannot be read: {text}"))
        if not loaded:
            del self.left[0]

    def numbers(self):
        """[step, k] of the proposal, [-1, 0] if there is none."""
        return numbers_of(self.left[0][1].name) if self.left else (-1, 0)


def _agree(world, own, key):
    """(step of the newest proposal, its rank, the number of damaged ones where there are most)."""
    world.barrier(f"read {key}")  # a collective would not wait as long as reading takes
    mine = torch.tensor([*own.numbers(), len(own.skipped)])
    views = [tuple(view.tolist()) for view in world.all_gather(mine)]
    newest = max(view[:2] for view in views)
    with world.all_or_none(f"unread {key}"):
        if own.unread[0] > newest[0]:  # exit code 1: when the agent starts again, the disk may answer
            raise UserError(f"{own.unread[1]}; nothing shows that it is damaged, so it is not skipped\n"
                            "start again once it can be read, or move that folder away to resume from the "
                            "one before", code=1)
    return newest[0], [view[:2] for view in views].index(newest), max(view[2] for view in views)


def _share_out(world, reading, how):
    """(whether all ranks have their tensors now, how each fared by itself)."""
    views = [tuple(view.tolist()) for view in world.all_gather(torch.tensor([how, world.node]))]
    hows, nodes, sources = [view[0] for view in views], set(), []
    for rank, (how, node) in enumerate(views):
        if how == FINE and node not in nodes:
            nodes.add(node)
            sources.append(rank)
    now = hows
    for source in sources[:MOST_SOURCES]:
        if any(now):
            took = reading.relay(world, source)
            now = [int(view) for view in world.all_gather(torch.tensor([FINE if took else DAMAGED]))]
    if not any(now):
        reading.finish()
    return not any(now), hows


def _same_nets(world, layout):
    marks = {int(mark) for mark in world.all_gather(torch.tensor([layout.mark()]))}
    if len(marks) > 1 or not layout.fits:
        raise UserError("the ranks have different nets or optimizers: names, shapes or types differ\n"
                        "run the same code and options on every node")


def send_facts(world, facts, source):
    """The facts of rank `source`, as read from JSON, on every rank."""
    return parse_json(send(world, facts and facts_to_json(facts), source), STATE)


def take(state, tensors, facts, data, report):
    """Loads the state; `tensors` is None if they are in place, `data` the present dataset's fingerprint."""
    if facts["order"] == [data]:
        facts["order"] = state.order
    state.load(tensors, facts)
    if state.position < facts["position"] and report:
        report(f"step {state.step} was saved at position {facts['position']:,} of other data or of another "
               f"order; epoch {state.epoch + 1} begins again with {state.samples:,} samples, "
               "some of them for the second time")


def choices_at(path):
    """--resume PATH: (the folder of that checkpoint, or of those of that run, its checkpoints)."""
    path = Path(path)
    one = [choice for choice in checkpoints(path.parent) if choice[1].name == path.name]
    return (path.parent, one) if one else (path / "checkpoints", checkpoints(path / "checkpoints"))
