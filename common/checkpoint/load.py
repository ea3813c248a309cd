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
from common.checkpoint.files import Damaged, patient
from common.checkpoint.manifest import checkpoints, numbers_of, read_facts
from common.checkpoint.reading import DAMAGED, FINE, LACKS, UNREAD, Reading
from common.errors import UserError
from common.world import progress, send

MOST_SOURCES = 3  # ranks that are asked in turn for what others could not read


@dataclass(frozen=True)
class Found:
    step: int      # the newest that verifies anywhere, or -1
    name: str      # where it lies: checkpoints/step-N, memory/step-N
    own: bool      # whether the disk that this rank sees has it
    facts: dict
    skipped: list  # damaged ones among the choices of this rank
    damaged: int   # how many a rank has, at most


def load_newest(world, layout, choices, places, key, report):
    """Reads the newest checkpoint into the tensors of every rank; call on every rank.

    `choices` are (step, folder, kind) of what this rank proposes; on this machine those of a kind lie in
    `places[kind]`.
    """
    own, turn = Choices(choices, layout, report), 0
    while True:
        told = own.propose()
        best, source, damaged = _agree(world, own, f"{key} {turn}")
        if best < 0:
            return Found(-1, "", False, {}, own.skipped, damaged)
        told = json.loads(send(world, json.dumps(told).encode() if world.rank == source else None, source))
        kind, name = told["name"].split("/")
        reading = Reading(layout, places[kind] / name, told)
        how, text = reading.read(best, progress(world.store), threads(world.local_size))
        world.barrier(f"loaded {key} {turn}")
        loaded, hows = _share_out(world, reading, how)
        if how in (UNREAD, DAMAGED) and hows.index(how) == world.rank:
            way_out = "received from another rank" if loaded else "trying the one before"
            report(f"{told['name']}: {text}; {way_out}")
        own.judge(told["name"], how, loaded, DAMAGED in hows, world.rank == source, text)
        if loaded:
            own_disk = how == FINE and kind != "memory"
            return Found(best, told["name"], own_disk, told["facts"], own.skipped, damaged)
        turn += 1


class Choices:
    """The checkpoints that this rank proposes, newest first; none where it owns no folder."""

    def __init__(self, choices, layout, report):
        # of one step, what a survivor left in memory is no older than what the disk has
        self.left = sorted(((step, kind == "memory", numbers_of(folder.name)[1]),
                            f"{kind}/{folder.name}", folder) for step, folder, kind in choices)
        self.layout, self.report = layout, report
        self.skipped, self.unread = [], (-1, "")  # unread: (step, text) of the newest that could not be read

    def propose(self):
        """All that a rank must know to read the newest one left, or None; what cannot be used is dropped."""
        while self.left:
            (step, *_), name, folder = self.left[-1]
            try:
                manifest, facts = read_facts(step, folder)
                return {"name": name, "files": manifest["files"], "facts": facts,
                        "segments": patient(self.layout.segments)(folder, manifest)}
            except Damaged as reason:
                self._drop(DAMAGED, text := f"{reason}; skipped")
            except OSError as error:
                self._drop(UNREAD, text := error.strerror or str(error))
            self.report(f"{name}: {text}, trying the one before")
        return None

    def _drop(self, how, text):
        (step, *_), _, folder = self.left.pop()
        if how == DAMAGED:
            self.skipped.append(folder)
        else:
            self.unread = max(self.unread, (step, f"{folder}: cannot be read: {text}"))

    def judge(self, name, how, loaded, damaged, mine, text):
        """Drops the proposal if it is of this folder and could not be loaded; `mine`: this rank made it."""
        failed = how == DAMAGED or not loaded and (mine or how != LACKS)
        if failed and self.left and self.left[-1][1] == name:
            self._drop(DAMAGED if damaged else UNREAD, text)

    def numbers(self):
        """What tells which proposal is the newest; -1 comes first if there is none."""
        return self.left[-1][0] if self.left else (-1, 0, 0)


def _agree(world, own, key):
    """(step of the newest proposal, its rank, the number of damaged ones where there are most)."""
    world.barrier(f"read {key}")  # a collective would not wait as long as reading takes
    mine = torch.tensor([*own.numbers(), len(own.skipped)])
    views = [tuple(view.tolist()) for view in world.all_gather(mine)]
    newest = max(view[:-1] for view in views)
    with world.all_or_none(f"unread {key}"):
        if own.unread[0] > newest[0]:  # exit code 1: when the agent starts again, the disk may answer
            raise UserError(f"{own.unread[1]}; nothing shows that it is damaged, so it is not skipped\n"
                            "start again once it can be read, or move that folder away to resume from the "
                            "one before", code=1)
    return newest[0], [view[:-1] for view in views].index(newest), max(view[-1] for view in views)


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


def leave_out(state, steps):
    """--skip: the samples of so many steps, all of this epoch, are left out."""
    state.end_epoch()
    last = state.position + (steps - 1) * state.opts.global_batch_size
    if last >= state.samples:
        raise UserError(f"--skip {state.opts.skip} does not end in this epoch\nskip less")
    state.position = min(state.samples, last + state.opts.global_batch_size)


def choices_at(path):
    """--resume PATH: (the folder of that checkpoint, or of those of that run, its checkpoints)."""
    path = Path(path)
    one = [choice for choice in checkpoints(path.parent) if choice[1].name == path.name]
    return (path.parent, one) if one else (path / "checkpoints", checkpoints(path / "checkpoints"))
