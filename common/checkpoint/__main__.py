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

from common.checkpoint.files import parse_json, read_small, room
from common.checkpoint.manifest import STATE, checkpoints, describe, read_manifest
from common.errors import UserError, run_command

EMA = "/ema"  # the end of an average's name


def main(arguments):
    """Exit code 0 if a checkpoint is whole, 3 if none is, 2 if there is no such run."""
    parser = argparse.ArgumentParser("python -m common.checkpoint", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--digest", action="store_true")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--export", metavar="FILE")
    asked = parser.parse_args(arguments)
    if asked.digest and (asked.best or asked.export is not None):
        parser.error("--digest is that of the newest checkpoint, without --best and --export")
    return run_command(lambda: show(asked))


def show(asked):
    found = [choice for choice in checkpoints(asked.run.parent) if choice[1].name == asked.run.name]
    if not found and not (asked.run / "checkpoints").is_dir():
        raise UserError(f"{asked.run} is no run folder: it has no checkpoints/")
    whole, act = [], asked.best or asked.export is not None
    found = found or checkpoints(asked.run / "checkpoints")
    for step, folder in found:
        good, line = describe(step, folder)
        if not act and (good or not asked.digest):
            print(line)
        whole += [(step, folder)] * good
        if good and (act or asked.digest):
            break
    if not whole:
        raise UserError(f"no whole checkpoint in {asked.run}", code=3)
    chosen = best(whole[0][1], found) if asked.best else whole[0]
    if act:
        print(export(*chosen, asked.export) if asked.export is not None else chosen[1])
    return 0


def best(newest, found):
    """(step, folder) of the checkpoint with the best evaluation so far."""
    step = parse_json(read_small(newest / STATE), STATE)["best"]["step"]
    chosen = next((choice for choice in found if choice[0] == step), None)
    if chosen is None or not describe(*chosen)[0]:
        raise UserError(f"no whole checkpoint of the best evaluation, which was at step {step}", code=3)
    return chosen


def export(step, folder, target):
    """Writes the weights of a whole checkpoint to `target`; returns what was written, in words.

    Averages, if there are any, are the weights; tied weights are there once.
    """
    from safetensors.torch import load_file, save
    weights, optimizer = {}, {}
    for name in sorted(read_manifest(step, folder)["files"], key=lambda name: (len(name), name)):
        found = weights if name.endswith("model.safetensors") else optimizer
        for tensor, rows in load_file(folder / name).items() if name.endswith(".safetensors") else ():
            found.setdefault(tensor, []).append(rows)  # of a sharded net the first rows are in the first file
    averages = {name.removesuffix(EMA): rows for name, rows in optimizer.items() if name.endswith(EMA)}
    tied = parse_json(read_small(folder / STATE), STATE).get("tied")
    if averages and tied is None:
        raise UserError(f"{folder} does not say which weights are tied: an earlier version saved it\n"
                        "resume the run, so that it saves again")
    chosen = {name: torch.cat(rows) if len(rows) > 1 else rows[0]
              for name, rows in (weights | averages).items() if name not in (tied or {})}
    aside, content = Path(f"{target}.new"), save(chosen, {"format": "pt"})
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if aside.read_bytes() != content:
            raise UserError(f"{target}: what was written reads back as something else\n"
                            "export to another disk")
        os.rename(aside, target)
    except OSError as error:
        raise UserError(f"--export {room(error, target, len(content))}\nexport to another place") from error
    finally:
        aside.unlink(missing_ok=True)
    notes = [f"{len(chosen)} tensors of step {step}", *["averaged"] * bool(averages),
             *[f"{name} is {first}" for name, first in (tied or {}).items()]]
    return f"{target}: {', '.join(notes)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
