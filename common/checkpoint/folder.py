"""The names in a run's folder of checkpoints, and in each of them.

From the path of a run to its checkpoints, newest first:
    RUN/checkpoints/step-00001200/      model.safetensors optimizer.safetensors state.json manifest.json
                                        frozen.safetensors: weights that do not train, if there are any
                    step-00001200.1/    later facts of the same step
                    damaged-step-N/     not trusted, and kept until a newer one is saved
                    .life-LIFE/         what a life has not finished yet (writer.py)
"""

import os
import re
from pathlib import Path

from common.checkpoint.disk import patient

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
FROZEN = "frozen.safetensors"  # of weights that do not train; a link to that of the checkpoint before
STATE = "state.json"
MANIFEST = "manifest.json"
STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(?:\.([1-9][0-9]{0,8}))?")
ASIDE = "damaged-"  # before the name of a checkpoint that is not trusted


@patient
def checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the committed checkpoints of a run, newest first, as (step, folder); not verified.

    Of one step the latest facts come first: `step-N.2`, `step-N.1`, `step-N`.
    """
    root = run_dir / "checkpoints"
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [(numbers_of(name)[0], root / name) for name in newest_first(names)]


def newest_first(names: list[str]) -> list[str]:
    """Return the names of checkpoints among these; of one step the latest facts come first."""
    return sorted(filter(numbers_of, {*names}), key=numbers_of, reverse=True)


def folder_name(step, k=0):
    return f"step-{step:08d}" + (f".{k}" if k else "")


def numbers_of(name):
    """Return (step, k) of `step-N.k`; None of any other name."""
    found = STEP.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def free_number(root, step):
    """Return the k of a name for a checkpoint of this step that none has or had."""
    rows = [numbers_of(name.removeprefix(ASIDE)) for name in os.listdir(root)]
    return 1 + max((row[1] for row in rows if row and row[0] == step), default=-1)
