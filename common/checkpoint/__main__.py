"""Lists and verifies the checkpoints of a run, names the best one, exports weights.

    python -m common.checkpoint RUN                                # every checkpoint, verified
    python -m common.checkpoint RUN --digest                       # one SHA-256 over the newest
    python -m common.checkpoint RUN --best                         # the folder with the best evaluation
    python -m common.checkpoint RUN --best --export w.safetensors  # its weights, averaged with --ema-decay

RUN may also be the folder of one checkpoint. Without --best the newest one is exported.
"""
import argparse
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.checkpoint.disk import parse_json, read_small, sync_folder
from common.checkpoint.folder import STATE, choices_at, describe, read_manifest
from common.errors import UserError, run_command

EMA = "/ema"  # the end of an average's name


def main(arguments):
    """Exit code 0 if a checkpoint is whole, 3 if none is, 2 if there is no such run."""
    parser = argparse.ArgumentParser("python -m common.checkpoint", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, or of one checkpoint")
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--digest", action="store_true",
                     help="print the newest whole checkpoint; the last word is its digest")
    act.add_argument("--export", type=Path, metavar="FILE",
                     help="write the weights to FILE.safetensors, or with torch.save to FILE.pt")
    parser.add_argument("--best", action="store_true",
                        help="of the checkpoint with the best evaluation; alone: print its folder")
    asked = parser.parse_args(arguments)
    if asked.digest and asked.best:
        parser.error("--digest is that of the newest checkpoint, without --best")
    return run_command(lambda: show(asked))


def show(asked):
    root, choices = choices_at(asked.run)
    if not root.is_dir():
        raise UserError(f"{asked.run} is no run folder: it has no checkpoints/")
    if asked.export:
        check_suffix(asked.export)
    newest = None
    for step, folder in choices:
        whole, line = describe(step, folder)
        newest = newest or (step, folder) * whole
        if asked.digest and whole or not (asked.digest or asked.best or asked.export):
            print(line)
        if whole and (asked.digest or asked.best or asked.export):
            break
    if not newest:
        raise UserError(f"no whole checkpoint in {asked.run}", code=3)
    chosen = best(newest[1], choices) if asked.best else newest
    if asked.export:
        print(export(*chosen, asked.export))
    elif asked.best:
        print(chosen[1])
    return 0


def best(newest, choices):
    """(step, folder) of the checkpoint with the best evaluation so far."""
    step = parse_json(read_small(newest / STATE), STATE)["best"]["step"]
    chosen = next((choice for choice in choices if choice[0] == step), None)
    if chosen is None or not describe(*chosen)[0]:
        raise UserError(f"no whole checkpoint of the best evaluation, which was at step {step}", code=3)
    return chosen


def check_suffix(target):
    if target.suffix not in (".safetensors", ".pt", ".pth"):
        raise UserError(f"--export {target}: in which format?\n"
                        "end the name in .safetensors, or in .pt for torch.save")


def export(step, folder, target):
    """Writes the weights of a whole checkpoint to `target`; returns what was written, in words.

    Averages, if there are any, are the weights; tied weights are there once.
    """
    weights, averages = {}, {}
    for name in sorted(read_manifest(step, folder)["files"]):
        if not name.endswith(".safetensors"):
            continue
        for tensor, rows in load_file(folder / name).items():
            if name.endswith("model.safetensors"):
                weights.setdefault(tensor, []).append(rows)  # of a sharded net the first part has the first
            elif tensor.endswith(EMA):
                averages.setdefault(tensor.removesuffix(EMA), []).append(rows)
    tied = parse_json(read_small(folder / STATE), STATE)["tied"]
    chosen = {name: torch.cat(rows) if len(rows) > 1 else rows[0]
              for name, rows in (weights | averages).items() if name not in tied}
    aside = Path(f"{target}.new")
    try:
        if target.suffix == ".safetensors":
            save_file(chosen, aside, {"format": "pt"})
        else:
            torch.save(chosen, aside)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.rename(aside, target)
        sync_folder(target.absolute().parent)
    except Exception as error:  # safetensors' own, too
        raise UserError(f"--export {target}: {error}\nexport to another place") from error
    finally:
        aside.unlink(missing_ok=True)
    notes = [f"{len(chosen)} tensors of step {step}", *["averaged"] * bool(averages),
             *[f"{name} is {first}" for name, first in tied.items()]]
    return f"{target}: {', '.join(notes)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
