"""diff: the first step, slice and tensor in which two runs part."""
import bisect
import subprocess
import tempfile

import torch

from common.errors import UserError, say
from common.replay.run import Run, interpreter


def diff(given):
    """Bisects the kept checkpoints, makes the steps between two of them again, and looks at the odd one."""
    runs = Run(given.run), Run(given.other)
    say("; ".join(f"{run.folder}: torch {run.facts['torch']}" for run in runs))
    low, high = _apart(*runs)
    if high is None:
        say(f"the two runs are the same up to step {low}")
        return 0
    say(f"the same at step {low}, different at step {high}")
    with tempfile.TemporaryDirectory() as scratch:
        sides = list(zip(runs, (f"{scratch}/a", f"{scratch}/b"), (given.with_a, given.with_b), strict=True))
        a, b = (run.again(low, high, place, made=made, every=1)[0].digests for run, place, made in sides)
        if odd := [step for step in sorted(a) if a[step] != b.get(step)]:
            say(_difference(f"step {odd[0]}", *(_look(run, odd[0], f"{place}.pt", made)
                                                for run, place, made in sides)))
        else:
            say("made again here, both take the same steps: one was made by other code, torch or hardware\n"
                "--with-a PYTHON:FOLDER (or --with-b) names its interpreter and the folder of its code")
    return 1


def _apart(a, b):
    """(the last step at which both keep the same state, the first at which not): by bisection."""
    steps = [step for step in a.kept if step in b.kept]
    first = bisect.bisect_left(steps, True, key=lambda step: a.digest(step) != b.digest(step))
    if not steps or first == 0 and not a.steps[0] == b.steps[0] == 0:
        raise UserError(f"{a.folder} and {b.folder} keep no step from which both were the same\n"
                        "train both with --keep-every N")
    return [0, *steps][first], [*steps, None][first]


def _look(run, step, dump, made):
    """What `step --dump` keeps."""
    head, house = interpreter(made)
    command = [*head, house / "common/replay/__main__.py", "step", run.folder, step, f"--dump={dump}"]
    if subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL).returncode:
        raise UserError(f"step {step} of {run.folder} cannot be made again (see above)")
    return torch.load(dump, weights_only=True)


def _difference(step, a, b):
    """In words, what differs first in two looks at a step."""
    pairs = [(f"the state before {step}", a["state"][part], b["state"][part]) for part in a["state"]]
    for old, new in zip(a["slices"], b["slices"], strict=False):
        pairs += [(f"{step}, slice {old['slice']}: {kind}", old[kind], new[kind])
                  for kind in ("ids", "outputs", "gradients", "loss")]
    for where, x, y in [*pairs, (f"{step}, learning rate", a["lr"], b["lr"])]:
        if isinstance(x, dict):
            names = [n for n in {**x, **y} if n not in x or n not in y or not torch.equal(x[n], y[n])]
            if names:
                return f"{where}: {names[0] or 'the net'} differs"
        elif x != y:
            return f"{where}: {x} and {y}"
    return f"{step}: the same gradients, but another update"
