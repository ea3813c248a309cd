"""How all ranks load the same checkpoint, whichever machine has it.

From the checkpoints that each owner of a folder offers to the tensors and counters of every rank.

All ranks try the offered names together, the newest first. Each rank reads that checkpoint out of the folder
it sees, straight into its tensors, with all checks of checkpoint/reader.py. The first rank that could read it
sends facts and tables to all. A rank that could not, or that has other bytes under this name, gets each
tensor from that one. If no rank has all bytes, all try the next name, which overwrites the tensors. What
cannot be read, though nothing shows that it is damaged, is not passed over: the life ends, and the next one
tries again.
"""

from pathlib import Path
from typing import Any, NamedTuple

from common.checkpoint import Damaged, Layout, checkpoints, newest_first, threads, verify
from common.errors import UserError, say
from common.options import extra
from common.sealed import sha, to_json
from common.world import World, gather


class Loaded(NamedTuple):
    """What was found, and is in the tensors of all ranks."""

    source: str | None = None  # None: nothing was found
    facts: dict[str, Any] = {}  # of a checkpoint
    here: bool = False  # the disk that this rank sees has it
    skipped: list[Path] = []  # the damaged ones that this rank has offered
    steps: list[int] = []  # of all checkpoints that any rank has offered


def layout_of(state):
    """Return the layout of a net's tensors, some of which may be frozen."""
    named = state.net.named_parameters(remove_duplicate=False)
    tensors = state.tensors()
    frozen = {name for name, p in named if not p.requires_grad} & tensors["model"].keys()
    return extra("frozen")(tensors, frozen) if frozen else Layout(tensors)


def load(state, world, layout, run, owns):
    """Load what this start begins with, and tell what it was; call on every rank.

    `run` is this one, by the hash that a manifest has; `owns`: this rank owns the folder that it sees.

    The first of these sources that there is counts, and those after it are ignored:
    1. the run's own folder: the same command starts a run and resumes it
    2. --fork RUN --at STEP or --resume PATH: a checkpoint of another run
    3. --init-from FILE: weights alone, with which the net was built
    """
    opts = state.opts
    choices = checkpoints(opts.run_dir)
    own = load_newest(world, layout, run, choices, owns)
    if own.facts:
        state.load(own.facts, layout.remembered)
        progress = state.progress
        if progress.best["step"] not in (0, *own.steps) or progress.position < own.facts["position"]:
            extra("take_over")(state, world, own.facts, own.steps, choices, owns)
        return own
    if own.steps:
        raise UserError(
            f"{opts.run_dir}/checkpoints: {len(own.steps)} checkpoints found, none verifies "
            f"(python -m common.checkpoint {opts.run_dir} says why)\n"
            f"to start afresh, move {opts.run_dir} away or give --run-dir NEW",
            code=3,
        )
    if opts.at or opts.resume != "auto":
        return extra("another_run")(state, world, layout, owns)
    if opts.init_from:
        return Loaded(opts.init_from)
    return Loaded()


# ---- the newest checkpoint of any node ------------------------------------------------------------------
def load_newest(
    world: World, layout: Layout, run: str, choices: list[tuple[int, Path]], owns: bool
) -> Loaded:
    """Read the newest checkpoint into the tensors of every rank; call on every rank.

    `choices` are those that this rank sees, as (step, folder); owners of a folder offer theirs to all.
    """
    own = {folder.name: (step, folder) for step, folder in choices}
    offered = [[step, name] for name, (step, _) in own.items() if owns]
    steps = {name: step for rows in gather(world, offered) for step, name in rows}
    skipped = []
    for name in newest_first([*steps]):
        choice = own.get(name)
        files, facts, digest, damage = _read(world, layout, run, choice)
        digests, damages = zip(*gather(world, [digest, damage]), strict=True)
        loaded = digest != "" and {*digests} == {digest}
        giver = _first(digests)
        if giver >= 0 and not loaded:
            facts, loaded = extra("relay")(world, layout, giver, choice, [files, facts])
        if damage and world.rank == _first(damages):
            way = "received from another rank" if loaded else "trying the one before"
            say(f"checkpoints/{name}: {damage}; {way}")
        if owns and choice and (damage or not loaded):
            skipped.append(choice[1])
        if loaded:
            here = digest == digests[giver]
            return Loaded(f"checkpoints/{name}", facts, here, skipped, [*steps.values()])
    return Loaded(steps=[*steps.values()])


def _first(texts):
    """Return the first rank that has told something, or -1."""
    return next((rank for rank, text in enumerate(texts) if text), -1)


def _read(world, layout, run, choice):
    """Return (tables, facts, their digest, damage) of what this rank has read; waits for all ranks.

    An OSError of one rank ends this life on all.
    """
    damage = ""
    with world.all_or_none():
        try:
            if choice:
                files, facts = verify(*choice, layout, run, count=threads(world.local_size))
                return files, facts, sha(to_json([files, facts])), ""
        except Damaged as error:
            damage = str(error)
        except OSError as error:
            raise unreadable(choice[1], error) from error
    return {}, {}, "", damage


def unreadable(folder: Path, error: OSError) -> UserError:
    """Return the error with which a life ends that cannot read a checkpoint."""
    return UserError(
        f"{folder}: cannot be read: {error.strerror or error}; nothing shows that it is damaged, "
        "so it is not skipped\nstart again once it can be read, or move that folder away to resume "
        "from the one before",
        code=1,
    )
