"""A checkpoint's folder: its manifest, and the check of every byte. No torch, no pickle.

Nothing is parsed before it is verified, and no file decides how much memory is allocated: the manifest is
bounded and sealed, sizes are compared with what this run needs, hashes with what was read; only then is
state.json parsed.
"""
import contextlib
import hashlib
import os
import re
import stat
from functools import partial
from pathlib import Path

from common.checkpoint.files import (
    SMALL,
    Damaged,
    parse_json,
    patient,
    proven,
    read_into,
    read_small,
    sealed,
    to_json,
    unseal,
)

TENSORS = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 1
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
    """The manifest's bytes; `files` is {name: (size, SHA-256)} of everything else in the folder."""
    entries = {name: {"bytes": size, "sha256": sha} for name, (size, sha) in files.items()}
    return sealed(fields | {"format": FORMAT, "digest": _digest(files), "files": entries})


def _digest(files):
    """One SHA-256 over all tensors; the files hold them in a fixed order."""
    return hashlib.sha256("".join(files[name][1] for name in TENSORS.values()).encode()).hexdigest()


def read_manifest(step, folder):
    """The manifest of the checkpoint of `step`: its seal, and every field's kind and range."""
    with proven(folder):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise Damaged("not a folder")
    manifest = unseal(read_small(folder / MANIFEST), MANIFEST)
    if manifest.get("format") != FORMAT:
        raise Damaged(f"{MANIFEST} has format {str(manifest.get('format'))[:20]}, this code reads {FORMAT}")
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
    for name, file in files.items():
        if not (isinstance(file, dict) and set(file) == {"bytes", "sha256"}
                and type(file["bytes"]) is int and file["bytes"] >= 0
                and isinstance(file["sha256"], str) and HASH.fullmatch(file["sha256"])):
            raise Damaged(f"{MANIFEST}: no size or SHA-256 for {name}")
    if manifest["digest"] != _digest({name: (0, file["sha256"]) for name, file in files.items()}):
        raise Damaged(f"{MANIFEST}: its digest is not that of its files")
    return manifest


@patient
def verify(step, folder, buffers=None, from_disk=False, seen=None):
    """(manifest, facts), after reading and hashing each byte; `buffers`, {part: memory}, receive the tensors.

    `seen(name, at, data)` is called with each piece of each file, in order, before it is verified.
    Damaged: proven wrong. OSError: could not be read, even some seconds later; its content is unknown.
    """
    manifest = read_manifest(step, folder)
    files = manifest["files"]
    for part, name in TENSORS.items():
        if buffers is not None and len(buffers[part]) != files[name]["bytes"]:
            raise Damaged(f"{name} is {files[name]['bytes']:,} bytes, "
                          f"this model and optimizer need {len(buffers[part]):,}")
    if files[STATE]["bytes"] > SMALL:
        raise Damaged(f"{STATE} is {files[STATE]['bytes']:,} bytes, more than {SMALL:,}")
    text = memoryview(bytearray(files[STATE]["bytes"]))
    places = {STATE: text} | {name: (buffers or {}).get(part) for part, name in TENSORS.items()}
    for name, place in places.items():
        told, size, stated = seen and partial(seen, name), files[name]["bytes"], files[name]["sha256"]
        if (sha := read_into(folder / name, size, place, from_disk, told)) != stated:
            raise Damaged(f"{name} has SHA-256 {sha[:12]}..., manifest says {stated[:12]}...")
    # Facts of earlier versions do not name the order of their position: the data's fingerprint stands for it.
    return manifest, {"order": [manifest["data"]]} | check_facts(parse_json(bytes(text), STATE), step)


def describe(step, folder):
    """(whether it is whole, a line about it that ends with its digest or the damage)."""
    try:
        manifest, _ = verify(step, folder)
    except Damaged as reason:
        return False, f"{folder.name}  damaged: {reason}"
    except OSError as error:
        return False, f"{folder.name}  could not be read: {error}"
    size = sum(file["bytes"] for file in manifest["files"].values())
    return True, f"{folder.name}  whole  {size:,} bytes  {manifest['digest']}"


@patient
def glance(step, folder):
    """The facts of a checkpoint that a process has just committed; checks all but the tensors' hashes."""
    files = read_manifest(step, folder)["files"]
    with proven(folder):
        for name, file in files.items():
            if os.lstat(folder / name).st_size != file["bytes"]:
                raise Damaged(f"{name} is not {file['bytes']:,} bytes")
    text = read_small(folder / STATE)
    if hashlib.sha256(text).hexdigest() != files[STATE]["sha256"]:
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
            and type(best.get("val_acc")) in (int, float)
            and isinstance(facts.get("scaler"), (dict, type(None)))
            and all(isinstance(record, dict) and type(record.get("step", 0)) is int for record in records)):
        raise Damaged(f"{STATE} has no best, record and scaler")
    if not (isinstance(order, list) and [type(part) for part in order] in ([int, int], [str])):
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
