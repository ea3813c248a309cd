"""How a checkpoint is read: none of its values is used before it is proven right.

From a folder to its facts, its tables, and this rank's tensors. A checkpoint is valid if, in this order,
    1  manifest.json is no larger than ours can be, and matches its own seal         `unseal`, disk.py
    2  it has our format; its files have our names, and what they hold are tables    `read_manifest`
    3  state.json has the hash in the manifest, the folder's step, and each fact     `read_facts`
    4  the tables make up the tensors of this run                                    `Layout.check`
    5  each file has the size and the header that follow from its table              `read_file`, tensors.py
    6  each tensor has the hash in its table; ranks may share that (store/load.py)   `read_file`
`verify` makes them all; without a run to compare with, all but the fourth.
So nothing but JSON of a bounded size is parsed before its hash is compared, and no file decides how much
memory is allocated. What fails a check is Damaged. An OSError that stays proves nothing: it may be whole.
"""

import stat
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import common.checkpoint.tensors as tensors
from common.checkpoint.disk import Damaged, as_written, opened, parse_json, patient, read_small, unseal
from common.checkpoint.folder import FROZEN, MANIFEST, MODEL, OPTIMIZER, STATE, checkpoints
from common.checkpoint.layout import Layout
from common.errors import UserError
from common.sealed import sha, to_json

FORMATS = (7, 8)  # 8: with FROZEN, so that code which does not know that file does not call it damaged
FACTS: dict[str, Any] = {  # a start reads them all
    "step": int,
    "epoch": int,
    "position": int,
    "order": list,
    "best": dict,
    "record": dict,
    "evaluated": dict,
    "scaler": dict | None,
    "tied": dict,
    "data": dict,
    "origin": dict,  # of the run: its data, what decides its bits, its code, what it began with
}
EMA = "/ema"  # the end of an average's name


def read_manifest(folder: Path) -> dict:
    """A checkpoint's manifest; UserError if another version of this code wrote it.

    Its step and its digest are for others: they follow from the facts and the tables, which are compared.
    """
    with opened(folder, stat.S_ISDIR):  # not a link to one
        data = read_small(folder / MANIFEST)
    is_older = data.startswith(b"{\n")  # up to format 6 each value had a line
    manifest = (parse_json if is_older else unseal)(data, MANIFEST)
    found = manifest.get("format")
    if is_older or found not in FORMATS:
        raise UserError(
            f"{folder} has format {str(found)[:20]}, this code reads {FORMATS[0]} and {FORMATS[1]}\n"
            "resume it with the version that wrote it, which --export brings over here\n"
            "(--init-from FILE), or give another --run-dir"
        )
    with as_written(MANIFEST):
        _check_tables(**manifest)
    return manifest


def _check_tables(files, run, state, **_):
    if {*files} - {FROZEN} != {MODEL, OPTIMIZER}:
        raise Damaged(f"{MANIFEST} lists {str([*files])[:80]}")
    for table in files.values():
        for name, (dtype, shape, digest) in table.items():
            tensors.size_of(dtype, shape)
            if not isinstance(digest, str) or not all(type(count) is int and count >= 0 for count in shape):
                raise Damaged(f"{MANIFEST}: {name[:80]} is {dtype}{shape}")


@patient
def read_facts(step: int, folder: Path) -> tuple[dict, dict]:
    """(manifest, facts): all of a checkpoint but its tensors, compared with the seal and the hash."""
    manifest = read_manifest(folder)
    text = read_small(folder / STATE)
    if sha(text) != manifest["state"]:
        raise Damaged(f"{STATE} has sha256 {sha(text)[:12]}..., manifest says {manifest['state'][:12]}...")
    facts = parse_json(text, STATE)
    if facts.get("step") != step:
        raise Damaged(f"{STATE} is of step {facts.get('step')}, the folder says {step}")
    with as_written(STATE):
        wrong = [name for name, kind in FACTS.items() if not isinstance(facts[name], kind)]
        if wrong or "step" not in facts["best"]:
            raise Damaged(f"{STATE} lacks what a start reads")
    return manifest, facts


def verify(
    step: int, folder: Path, layout: Layout | None = None, run: str = "", **how: Any
) -> tuple[dict, dict]:
    """(tables, facts) of a checkpoint that has passed all checks; the tensors of a `layout` are its own then.

    UserError if it is not of this `run`, as a manifest has it. `how` is for `read_file`: of a `share` (i, n)
    of n ranks only the i-th part of each file has passed the sixth check; they must compare what they have.
    """
    manifest, facts = read_facts(step, folder)
    if run not in ("", manifest["run"]):
        raise UserError(f"{folder} is of another run\nmove it away, or use another --run-dir")
    files = manifest["files"]
    if layout:
        layout.check(files)
    for path, table in files.items():
        buffers = layout.buffers(path, table) if layout else None
        tensors.read_file(folder / path, table, buffers, **how)
    return files, facts


def relay(layout: Layout, files: dict, folder: Path | None, all_sum: Callable[[Tensor], Tensor]) -> bool:
    """Sends each tensor from the rank that names its `folder` to all; whether all bytes are right here.

    `all_sum` adds up the bytes of all ranks, which are zeros but for those of the sender.
    """
    right = True
    for path, table in files.items():
        buffers = layout.buffers(path, table)
        for name, (dtype, shape, stated) in table.items():
            piece = torch.zeros(tensors.size_of(dtype, shape), dtype=torch.uint8)
            data = memoryview(piece.numpy())
            if folder:
                with suppress(Damaged, OSError):  # then the bytes are wrong, and all ranks see that
                    tensors.read_file(folder / path, table, {name: partial(nullcontext, data)})
            all_sum(piece)
            right = right and sha(data) == stated  # a rank that left here would let the others hang
            with buffers[name]() as buffer:
                buffer[:] = data
    return right


# ---- checkpoints of a run ------------------------------------------------------------------------------
def digest_of(files):
    """One SHA-256 over all tensors, their names, types and shapes, whether or not they are frozen."""
    rows = sorted(
        (path.replace(FROZEN, MODEL), name, dtype, shape, digest)
        for path, table in files.items()
        for name, (dtype, shape, digest) in table.items()
    )
    return sha(to_json(rows))


def best_of(choices: list[tuple[int, Path]]) -> dict:
    """The best evaluation of which a checkpoint is among `choices`, by the newest of them; {} if none is."""
    for step, folder in choices:
        with suppress(Damaged, OSError):
            best = read_facts(step, folder)[1]["best"]
            if not best["step"]:  # nothing was evaluated up to here
                break
            if best["step"] in dict(choices):
                return best
    return {}


def describe(step: int, folder: Path) -> tuple[bool, str]:
    """(whether it is whole, a line about it that ends with its digest or the damage); reads each byte."""
    try:
        files, _ = verify(step, folder, count=tensors.threads())
    except Damaged as reason:
        return False, f"{folder.name}  damaged: {reason}"
    except OSError as error:  # even some seconds later: its content is unknown
        return False, f"{folder.name}  could not be read: {error}"
    size = sum(tensors.lay_out(table)[2] for table in files.values())
    return True, f"{folder.name}  whole  {size:,} bytes  {digest_of(files)}"


def choose(path, which):
    """(step, folder, line about it) of the "newest" whole checkpoint at `path`, the "best", or a step's."""
    choices = checkpoints(path)
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


def weights_of(path: Path, which: str | int) -> tuple[dict[str, Tensor], dict]:
    """(weights, facts) of a run's "newest" or "best" checkpoint, or of a step; averages are the weights.

    Tied weights keep their first name.
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
