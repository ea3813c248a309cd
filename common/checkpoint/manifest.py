"""A checkpoint's folder: its manifest, and the check of every byte. No torch, no pickle.

Nothing is parsed before it is verified, and no file decides how much memory is allocated: the manifest is
bounded and sealed, sizes are compared with what this run needs, hashes with what was read; only then is
state.json parsed.
"""
import contextlib
import os
import re
import stat
from functools import partial
from pathlib import Path

import common.checkpoint.blocks as blocks
from common.checkpoint.blocks import put, read_file, root, sha, threads
from common.checkpoint.files import (
    SMALL,
    Damaged,
    parse_json,
    patient,
    proven,
    read_small,
    sealed,
    to_json,
    unseal,
)

TENSORS = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
STATE = "state.json"
MANIFEST = "manifest.json"
FORMATS = (1, 2)  # the last one is written; the first one has no blocks
LINE_BYTES = 120  # of the manifest, for one block
HASH = re.compile("[0-9a-f]{64}")
KINDS = {"format": int, "step": int, "parent": int, "life": str, "digest": str, "files": dict,
         "identity": str, "data": str, "torch": str}
STEP = re.compile("step-([0-9]{8}|[1-9][0-9]{8,17})")


@patient
def checkpoints(root):
    """Committed checkpoints under `root`, newest first, as (step, folder); not verified."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted([(int(name[5:]), Path(root, name)) for name in filter(STEP.fullmatch, names)], reverse=True)


def folder_name(step):
    return f"step-{step:08d}"


def write_manifest(fields, files):
    """The manifest's bytes; `files` is {name: entry} of everything else in the folder (blocks.py)."""
    digest = digest_of({name: files[name]["sha256"] for name in TENSORS.values()})
    return sealed(fields | {"format": FORMATS[-1], "digest": digest, "files": files})


def digest_of(hashes):
    """One SHA-256 over all tensors, from those of the files, which hold them in a fixed order."""
    return sha("".join(hashes[name] for name in TENSORS.values()).encode())


def read_manifest(step, folder):
    """The manifest of the checkpoint of `step`: its seal, and every field's kind and range."""
    with proven(folder):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise Damaged("not a folder")
        size = sum(path.lstat().st_size for path in folder.glob("*.safetensors"))
    limit = SMALL + size // blocks.BLOCK_BYTES * LINE_BYTES
    manifest = unseal(read_small(folder / MANIFEST, limit), MANIFEST)
    if manifest.get("format") not in FORMATS:
        raise Damaged(f"{MANIFEST} has format {str(manifest.get('format'))[:20]}, this code reads {FORMATS}")
    for name, kind in KINDS.items():
        if type(manifest.get(name)) is not kind:
            raise Damaged(f"{MANIFEST} has no {name}")
    for name in ("pinned", "decides"):  # older ones have none
        if not isinstance(manifest.get(name, {}), dict):
            raise Damaged(f"{MANIFEST}: {name} is no object")
    if manifest["step"] != step:
        raise Damaged(f"{MANIFEST} is of step {manifest['step']}, the folder says {step}")
    files = manifest["files"]
    if set(files) != {*TENSORS.values(), STATE}:
        raise Damaged(f"{MANIFEST} lists {sorted(files)[:5]}, expected {sorted([*TENSORS.values(), STATE])}")
    for name, entry in files.items():
        if not (isinstance(entry, dict) and {"bytes", "sha256"} <= set(entry) <= {"bytes", "sha256", "blocks"}
                and type(entry["bytes"]) is int and entry["bytes"] >= 0 and _is_hash(entry["sha256"])):
            raise Damaged(f"{MANIFEST}: no size or SHA-256 for {name}")
        if "blocks" in entry and not _are_blocks(entry):
            raise Damaged(f"{MANIFEST}: the blocks of {name} are not those of its size and SHA-256")
    if manifest["digest"] != digest_of({name: entry["sha256"] for name, entry in files.items()}):
        raise Damaged(f"{MANIFEST}: its digest is not that of its files")
    return manifest


def _is_hash(value):
    return isinstance(value, str) and bool(HASH.fullmatch(value))


def _are_blocks(entry):
    """Whether they follow each other from the file's beginning to its end, and make up its one hash."""
    pairs = entry["blocks"]
    if not (isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
            and len(pairs) > 1):
        return False
    ends, hashes = zip(*pairs, strict=True)
    known = all(type(end) is int for end in ends) and all(map(_is_hash, hashes))
    rising = known and all(a < b for a, b in zip((0, *ends), ends, strict=False))
    return rising and ends[-1] == entry["bytes"] and root(hashes) == entry["sha256"]


@patient
def verify(step, folder, use=None, needed=None, from_disk=False, moved=None, count=1):
    """(manifest, facts), after reading and comparing each byte.

    `use(name, start, data)` gets each piece, on one of `count` threads; `needed` {part: bytes} is the size of
    each file of tensors in this run.
    Damaged: proven wrong. OSError: could not be read, even some seconds later; its content is unknown.
    """
    manifest = read_manifest(step, folder)
    files = manifest["files"]
    for part, size in (needed or {}).items():
        if size != files[TENSORS[part]]["bytes"]:
            raise Damaged(f"{TENSORS[part]} is {files[TENSORS[part]]['bytes']:,} bytes, "
                          f"this model and optimizer need {size:,}")
    if files[STATE]["bytes"] > SMALL:
        raise Damaged(f"{STATE} is {files[STATE]['bytes']:,} bytes, more than {SMALL:,}")
    text = bytearray(files[STATE]["bytes"])
    uses = {STATE: partial(put, text)} | {name: use and partial(use, name) for name in TENSORS.values()}
    for name, act in uses.items():
        read_file(folder / name, files[name], act, None, from_disk, moved, count)
    # Facts of earlier versions do not name the order of their position: the data's fingerprint stands for it.
    return manifest, {"order": [manifest["data"]]} | check_facts(parse_json(bytes(text), STATE), step)


def describe(step, folder):
    """(whether it is whole, a line about it that ends with its digest or the damage)."""
    hashes = {name: {} for name in TENSORS.values()}

    def note(name, start, data):  # checkpoints of format 1 have no hashes of blocks
        hashes[name][start] = sha(data)
    try:
        manifest, _ = verify(step, folder, note, count=threads())
    except Damaged as reason:
        return False, f"{folder.name}  damaged: {reason}"
    except OSError as error:
        return False, f"{folder.name}  could not be read: {error}"
    size = sum(file["bytes"] for file in manifest["files"].values())
    roots = {name: root([each for _, each in sorted(found.items())]) for name, found in hashes.items()}
    return True, f"{folder.name}  whole  {size:,} bytes  {digest_of(roots)}"


@patient
def glance(step, folder):
    """The facts of a checkpoint that a process has just committed; checks all but the tensors' hashes."""
    files = read_manifest(step, folder)["files"]
    with proven(folder):
        for name, file in files.items():
            if os.lstat(folder / name).st_size != file["bytes"]:
                raise Damaged(f"{name} is not {file['bytes']:,} bytes")
    text = read_small(folder / STATE)
    if sha(text) != files[STATE]["sha256"]:
        raise Damaged(f"{STATE} does not have the SHA-256 of its manifest")
    return check_facts(parse_json(text, STATE), step)


def is_there(root, facts):
    """Whether another process of this life has committed this state or a later one."""
    for step, folder in checkpoints(root):
        with contextlib.suppress(Damaged, OSError):
            there = glance(step, folder)
            return step > facts["step"] or there == as_read(facts)
    return False


def check_facts(facts, step):
    """The facts, if each has the type that TrainState.load expects; else Damaged."""
    best, order = facts.get("best"), facts.get("order", [""])
    counters = [facts.get(name) for name in ("step", "epoch", "position")]
    if not all(type(count) is int and 0 <= count < 2**62 for count in counters):
        raise Damaged(f"{STATE} has no step, epoch and position")
    if facts["step"] != step:
        raise Damaged(f"{STATE} is of step {facts['step']}, the folder says {step}")
    records = (facts.get("record"), facts.get("judged", {}))  # older versions have no "judged"
    if not (isinstance(best, dict) and type(best.get("step")) is int
            and all(type(value) in (int, float, type(None)) for value in best.values())
            and isinstance(facts.get("scaler"), (dict, type(None)))
            and all(isinstance(record, dict) and type(record.get("step", 0)) is int for record in records)):
        raise Damaged(f"{STATE} has no best, record and scaler")
    kinds = [type(part) for part in order] if isinstance(order, list) else []
    if kinds not in ([int, int], [int, int, str], [str]):
        raise Damaged(f"{STATE} does not say in which order its position counts")  # older versions have none
    return facts


def facts_to_json(facts):
    """state.json's bytes; NaN and infinity, which JSON does not have, become null."""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return None if isinstance(value, float) and value - value != 0 else value
    return to_json(plain(facts))


def as_read(facts):
    """The facts as a reader of state.json gets them."""
    return parse_json(facts_to_json(facts), STATE)
