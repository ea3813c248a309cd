"""The weights of one checkpoint as one safetensors file: averages if there are any, tied weights once."""
import os

import torch

from common.checkpoint.files import parse_json, read_small
from common.checkpoint.manifest import STATE, read_manifest
from common.errors import UserError

EMA = "/ema"  # the end of an average's name


def export(step, folder, target):
    """Writes the weights of a whole checkpoint to `target`; returns what was written, in words."""
    from safetensors.torch import load_file, save_file
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
    save_file(chosen, f"{target}.new", {"format": "pt"})
    os.rename(f"{target}.new", target)
    notes = [f"{len(chosen)} tensors of step {step}", *["averaged"] * bool(averages),
             *[f"{name} is {first}" for name, first in (tied or {}).items()]]
    return f"{target}: {', '.join(notes)}"
