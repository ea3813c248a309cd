"""Loads the newest checkpoint of any node on every rank.

Each owner tells the names of its checkpoints. So all ranks have one table, and try it row by row, the newest
first: the rank that has it sends its manifest to all. Then each rank reads what it needs out of the folder it
sees, compares it with that manifest, and copies it straight into its tensors, all ranks side by side. A rank
that could not do so gets each block from one that could (reading.py). If no rank has all bytes, all try the
next row, which overwrites the tensors. So no rank holds a second copy of the state.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from common.checkpoint.blocks import threads
from common.checkpoint.files import Damaged, patient
from common.checkpoint.manifest import checkpoints, folder_name, numbers_of, read_facts
from common.checkpoint.reading import DAMAGED, FINE, LACKS, UNREAD, Reading
from common.errors import UserError
from common.world import progress, send

PLACES = ("checkpoints", "memory")
MOST_SOURCES = 3  # ranks that are asked in turn for what others could not read


@dataclass(frozen=True)
class Found:
    step: int      # the newest that verifies anywhere, or -1
    name: str      # where it lies: checkpoints/step-N, memory/step-N
    own: bool      # whether the disk that this rank sees has it
    facts: dict
    skipped: list  # the damaged ones of this rank
    offered: int   # how many names there were on all ranks


def load_newest(world, layout, roots, own, key, report):
    """Reads the newest checkpoint into the tensors of every rank; call on every rank.

    `own` are (step, folder) that this rank offers. One that another rank offers may lie here too, under the
    same of `roots`: on the disk, and then in memory.
    """
    own = [(step, roots.index(folder.parent), numbers_of(folder.name)[1]) for step, folder in own]
    rows, skipped, unread = _table(world, own), [], (-1, "")
    offered = len({row for row, _ in rows}) - 1
    while True:
        row, source = rows[0]
        step, place, k = row
        folder, mine = roots[place] / folder_name(step, k), world.rank == source
        name, told, how, text = f"{PLACES[place]}/{folder.name}", {}, LACKS, ""
        with world.all_or_none(f"offer {key} {rows[0]}"):  # it waits longer than a collective
            if unread[0] > step:  # exit code 1: when the agent starts again, the disk may answer
                raise UserError(
                    f"{unread[1]}; nothing shows that it is damaged, so it is not skipped\n"
                    "start again once it can be read, or move that folder away to resume from the one before",
                    code=1)
            if mine and step >= 0:
                told, how, text = _offer(layout, step, folder)
        if step < 0:
            return Found(-1, "", False, {}, skipped, offered)
        told = json.loads(send(world, json.dumps(told).encode(), source))
        if told:
            reading = Reading(layout, folder, told)
            how, text = reading.read(step, progress(world.store), threads(world.local_size))
        world.barrier(f"read {key} {rows[0]}")
        hows, loaded = _share_out(world, reading if told else None, how)
        if how in (UNREAD, DAMAGED) and hows.index(how) == world.rank:
            report(f"{name}: {text}; {'received from another rank' if loaded else 'trying the one before'}")
        if row in own and (how == DAMAGED or not loaded and (mine or how != LACKS)):
            own.remove(row)
            if DAMAGED in hows:
                skipped.append(folder)
            else:
                unread = max(unread, (step, f"{folder}: cannot be read: {text}"))
        if loaded:
            return Found(step, name, how == FINE and place == 0, told["facts"], skipped, offered)
        # a rank that lacks it may have another checkpoint of that name
        rows = [other for other in rows[1:] if other[0] != row or hows[other[1]] == LACKS]


def _table(world, own):
    """[((step, place, k), a rank that has it)] of all ranks, newest first; its last step is -1.

    Of one step, what a survivor left in memory is no older than what the disk has.
    """
    most = max(int(count) for count in world.all_gather(torch.tensor([len(own)])))
    views = world.all_gather(torch.tensor(own + [(-1, 0, 0)] * (most + 1 - len(own))))
    rows = {(tuple(row), rank) for rank, view in enumerate(views) for row in view.tolist()}
    return sorted(rows, key=lambda row: (row[0], -row[1]), reverse=True)


def _offer(layout, step, folder):
    """All that a rank must know to read this checkpoint, or {}; how it went, and why."""
    try:
        manifest, facts = read_facts(step, folder)
        segments = patient(layout.segments)(folder, manifest)
        return {"files": manifest["files"], "facts": facts, "segments": segments}, FINE, ""
    except Damaged as reason:
        return {}, DAMAGED, str(reason)
    except OSError as error:
        return {}, UNREAD, error.strerror or str(error)


def _share_out(world, reading, how):
    """(how each rank's own reading went, whether all ranks have their tensors now)."""
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
    return hows, not any(now)


def leave_out(state, steps):
    """--skip: moves the position over the samples of so many steps, all in this epoch."""
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
