"""A start from a checkpoint of another run: --fork RUN --at STEP, or --resume PATH."""

from pathlib import Path

from common.checkpoint import checkpoints
from common.errors import UserError
from common.store import Loaded, load_newest, take_over


def load(state, world, layout, owns):
    """Load the newest checkpoint that was asked for; return where it came from. Call on every rank."""
    opts = state.opts
    source = opts.fork or opts.resume
    choices = [choice for choice in checkpoints(Path(source)) if opts.at in (0, choice[0])]
    other = load_newest(world, layout, "", choices, owns)
    if not other.facts:
        raise UserError(
            f"{source}: no whole checkpoint of {f'step {opts.at}' if opts.at else 'any step'}\n"
            f"python -m common.checkpoint {source} says why",
            code=2 if opts.at else 3,
        )
    state.load(other.facts, layout.remembered)
    take_over(state, world, other.facts, [], [], owns)
    return Loaded(source)


def refuse_an_older_one(opts):
    """Refuse a --resume that names a checkpoint of this very run, unless it is the newest."""
    choices = checkpoints(opts.run_dir)
    root = (opts.run_dir / "checkpoints").resolve()
    if Path(opts.resume).resolve() in [root / folder.name for _, folder in choices[1:]]:
        raise UserError(
            f"--resume {opts.resume}: this run resumes from its newest checkpoint, step {choices[0][0]}\n"
            "leave it out to resume there; to go back to that step, give a --run-dir of its own too"
        )
