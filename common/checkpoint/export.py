"""The weights of one checkpoint as one safetensors file: averages if there are any, tied weights once."""
import json
import os
import re
from pathlib import Path

from common.checkpoint.files import parse_json, read_small
from common.checkpoint.manifest import STATE, read_manifest
from common.errors import UserError

PIECE_BYTES = 1 << 24
EMA = "/ema"  # the end of an average's name


def export(step, folder, target):
    """Writes the weights of a whole checkpoint to `target`; returns what was written, in words."""
    weights, optimizer = {}, {}
    for name in sorted(read_manifest(step, folder)["files"], key=lambda name: (len(name), name)):
        found = weights if name.endswith("model.safetensors") else optimizer
        if name.endswith(".safetensors"):  # of a sharded net the first rows are in the first file
            for tensor, piece in pieces_of(folder / name):
                found.setdefault(tensor, []).append(piece)
    averages = {name.removesuffix(EMA): found for name, found in optimizer.items() if name.endswith(EMA)}
    tied = parse_json(read_small(folder / STATE), STATE).get("tied")
    if averages and tied is None:
        raise UserError(f"{folder} does not say which weights are tied: an earlier version saved it\n"
                        "resume the run, so that it saves again")
    chosen = {name: found for name, found in (weights | averages).items() if name not in (tied or {})}
    write(Path(target), dict(sorted(chosen.items(), key=lambda item: (-width(item[1][0][0]), item[0]))))
    notes = [f"{len(chosen)} tensors of step {step}", *["averaged"] * bool(averages),
             *[f"{name} is {first}" for name, first in (tied or {}).items()]]
    return f"{target}: {', '.join(notes)}"


def pieces_of(path):
    """(tensor, (type, shape, file, first byte, bytes)) of each tensor of a safetensors file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, (entry["dtype"], entry["shape"], path, 8 + length + begin, end - begin)


def width(dtype):
    """Bytes of one number; in the file the wide ones come first, so that each is aligned."""
    return int((re.findall(r"\d+", dtype) or ["8"])[0]) // 8


def write(target, tensors):
    """Written aside and renamed, so that the file is whole or not there."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, pieces in tensors.items():
        (dtype, shape, *_), size = pieces[0], sum(piece[-1] for piece in pieces)
        rows = [sum(piece[1][0] for piece in pieces)] if shape else []
        header[name] = {"dtype": dtype, "shape": rows + shape[1:], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = target.with_name(f"{target.name}.new")
    with open(aside, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, path, start, size in (piece for pieces in tensors.values() for piece in pieces):
            with open(path, "rb") as file:
                file.seek(start)
                while size:
                    size -= out.write(file.read(min(size, PIECE_BYTES)))
        out.flush()
        os.fsync(out.fileno())
    os.rename(aside, target)
