"""How a checkpoint is read: none of its values is used before it is proven right.

From a folder to its facts, its tables, and this rank's tensors. A checkpoint is valid if, in this order,
    1  manifest.json is no larger than ours can be, and matches its own seal         `unsealed`, sealed.py
    2  it has our format; its files have our names, and what they hold are tables    `read_manifest`
    3  state.json has the hash in the manifest, the folder's step, and each fact     `read_facts`
    4  the tables make up the tensors of this run                                    `Layout.check`
    5  each file has the size and the header that follow from its table              `read_file`, tensors.py
    6  each tensor has the hash in its table                                         `read_file`
`verify` makes them all; without a run to compare with, all but the fourth.
So nothing but JSON of a bounded size is parsed before its hash is compared, and no file decides how much
memory is allocated. What fails a check is Damaged. An OSError that stays proves nothing: it may be whole.
"""

import json
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import common.checkpoint.tensors as tensors
from common.checkpoint.disk import Damaged, as_written, compare_hash, opened, parse_json, patient, read_small
from common.checkpoint.folder import FROZEN, MANIFEST, MODEL, OPTIMIZER, STATE
from common.checkpoint.layout import Layout
from common.errors import UserError
from common.sealed import sha, to_json, unsealed

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


def read_manifest(folder: Path) -> dict:
    """Read a checkpoint's manifest; UserError if another version of this code wrote it.

    Its step and its digest are for others: they follow from the facts and the tables, which are compared.
    """
    with opened(folder, stat.S_ISDIR):  # not a link to one
        data = read_small(folder / MANIFEST)
    is_older = data.startswith(b"{\n")  # up to format 6 each value had a line
    manifest = parse_json(data, MANIFEST, json.loads if is_older else unsealed)
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
    """Read (manifest, facts): all of a checkpoint but its tensors, compared with the seal and the hash."""
    manifest = read_manifest(folder)
    text = read_small(folder / STATE)
    compare_hash(STATE, sha(text), manifest["state"])
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
    """Return (tables, facts) of a checkpoint that passes all checks; a `layout` has its tensors then.

    UserError if it is not of this `run`, as a manifest has it. `how` is for `read_file`.
    """
    manifest, facts = read_facts(step, folder)
    if run not in ("", manifest["run"]):
        raise UserError(f"{folder} is of another run\nmove it away, or use another --run-dir")
    files = manifest["files"]
    if layout:
        layout.check(files)
    for path, table in files.items():
        targets = layout.targets(path, table) if layout else None
        tensors.read_file(folder / path, table, targets, **how)
    return files, facts


# ---- checkpoints of a run ------------------------------------------------------------------------------
def digest_of(files: dict[str, dict]) -> str:
    """Return one SHA-256 over all tensors, their names, types and shapes, whether or not they are frozen."""
    rows = sorted(
        (path.replace(FROZEN, MODEL), name, dtype, shape, digest)
        for path, table in files.items()
        for name, (dtype, shape, digest) in table.items()
    )
    return sha(to_json(rows))


def best_of(choices: list[tuple[int, Path]]) -> dict:
    """Return the best evaluation with a checkpoint among `choices`, by the newest of them; {} if none has."""
    for step, folder in choices:
        with suppress(Damaged, OSError):
            best = read_facts(step, folder)[1]["best"]
            if not best["step"]:  # nothing was evaluated up to here
                break
            if best["step"] in dict(choices):
                return best
    return {}
