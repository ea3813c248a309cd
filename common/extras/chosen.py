"""One checkpoint of a run: the newest whole one, the best one or that of a step, in a line or as weights.

For a person, and for what begins with the weights of a run; a training chooses by itself (store/load.py).
"""

from safetensors.torch import load_file

from common.checkpoint import (
    OPTIMIZER,
    Damaged,
    best_of,
    checkpoints,
    digest_of,
    newest_first,
    read_facts,
    threads,
    verify,
)
from common.errors import UserError

EMA = "/ema"  # the end of an average's name


def describe(step, folder):
    """Read each byte; return (whether it is whole, a line that ends with its digest or the damage)."""
    try:
        files, _ = verify(step, folder, count=threads())
        size = sum((folder / path).stat().st_size for path in files)
    except Damaged as reason:
        return False, f"{folder.name}  damaged: {reason}"
    except OSError as error:  # even some seconds later: its content is unknown
        return False, f"{folder.name}  could not be read: {error}"
    return True, f"{folder.name}  whole  {size:,} bytes  {digest_of(files)}"


def choices_at(path):
    """Return the checkpoints of the run at `path`; if that is itself a checkpoint, it is the only one."""
    if newest_first([path.name]) and path.is_dir() and not (path / "checkpoints").is_dir():
        return [(step_of(path.name), path)]
    return checkpoints(path)


def step_of(name):
    """Return the step in the name of a checkpoint, step-N or step-N.k."""
    return int(name[5:].partition(".")[0])


def choose(path, which):
    """Return (step, folder, line) of the "newest" whole checkpoint at `path`, the "best", or a step's."""
    choices = choices_at(path)
    if not choices and not (path / "checkpoints").is_dir():
        raise UserError(
            f"{path} is no run folder: it has no checkpoints/\n"
            "python -m common.checkpoint RUN lists those of a run"
        )
    step = which
    if which == "best":
        best = best_of(choices)
        if not best:
            raise UserError(f"{path}: it has no evaluated checkpoint\ntake the newest one", code=3)
        step = best["step"]
    for number, folder in choices:
        if step in (number, "newest"):
            whole, line = describe(number, folder)
            if whole:
                return number, folder, line
            if not folder.exists():  # a run that trains has deleted it: it has a newer one
                return choose(path, which)
    raise UserError(
        f"{path}: no whole checkpoint ({step})\npython -m common.checkpoint {path} lists them", code=3
    )


def weights_of(path, which):
    """Return (weights, facts) of a run's "newest" or "best" checkpoint, or of a step.

    Averages are the weights. Tied weights keep their first name.
    """
    step, folder, _ = choose(path, which)
    manifest, facts = read_facts(step, folder)
    weights = {}
    for file in manifest["files"].keys() - {OPTIMIZER}:
        weights |= load_file(folder / file)
    for name, tensor in load_file(folder / OPTIMIZER).items():
        if name.endswith(EMA):
            weights[name.removesuffix(EMA)] = tensor
    return {name: tensor for name, tensor in weights.items() if name not in facts["tied"]}, facts
