"""Lists and verifies the checkpoints of a run, names the best one, exports weights.

    python -m common.checkpoint RUN                                # every checkpoint, verified
    python -m common.checkpoint RUN --digest                       # one SHA-256 over the newest
    python -m common.checkpoint RUN --best                         # the folder with the best evaluation
    python -m common.checkpoint RUN --best --export w.safetensors  # its weights, averaged with --ema-decay

RUN may also be the folder of one checkpoint. Without --best the newest one is exported. A FILE that ends in
.pt is written with torch.save. The last word of --digest is the digest.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from common.errors import UserError, say
from common.extras.chosen import choices_at, choose, describe, weights_of
from common.extras.command import parser_of, run_command
from common.options import as_imagefolder, read_options


def main(arguments=None):
    """Return exit code 0 if a checkpoint is whole, 3 if none is, 2 if there is no such run."""
    parser = parser_of("python -m common.checkpoint", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--export", type=Path, metavar="FILE")
    asked = parser.parse_args(arguments)
    return run_command(lambda: show(asked))


def show(asked):
    which = "best" if asked.best else "newest"
    if asked.export:
        print(export(asked.run, which, asked.export))
    elif asked.digest or asked.best:
        _, folder, line = choose(asked.run, which)
        print(line if asked.digest else folder)
    else:
        found = [(*describe(*choice), choice[1]) for choice in choices_at(asked.run)]
        # a run that trains may have deleted one meanwhile
        found = [row for row in found if row[0] or row[-1].exists()]
        for _, line, _ in found:
            say(line)
        damaged = sum(not whole for whole, *_ in found)
        if damaged == len(found):
            choose(asked.run, which)  # says what is missing
        elif damaged:
            say(f"{damaged} of {len(found)} damaged: a start takes the newest whole one", sys.stderr)
    return 0


def export(run, which, target):
    """Write the weights of a checkpoint to `target`; return what was written, in words."""
    if target.suffix not in (".safetensors", ".pt", ".pth"):
        raise UserError(
            f"--export {target}: in which format?\nend the name in .safetensors, or in .pt for torch.save"
        )
    weights, facts = weights_of(run, which)
    aside = Path(f"{target}.new")
    try:
        if target.suffix == ".safetensors":
            save_file(weights, aside, {"format": "pt"})
        else:
            torch.save(weights, aside)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.rename(aside, target)
    except Exception as error:  # safetensors' own, too
        raise UserError(f"--export {target}: {error}\nexport to another place") from error
    finally:
        aside.unlink(missing_ok=True)
    tied = "".join(f", {name} is {first}" for name, first in facts["tied"].items())
    return f"{target}: {len(weights)} tensors of step {facts['step']}{tied}{wanted_pictures(run)}"


def wanted_pictures(run):
    """Say what was done to the pictures that the net was trained for, as another program must do it, too."""
    with suppress(UserError):  # `run` may be the folder of one checkpoint
        options = read_options(run)
        if options["dataset"] == "imagefolder":
            return f"\nits pictures: {as_imagefolder(options['image_size'])}"
    return ""
