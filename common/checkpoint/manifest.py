"""A checkpoint's folder: its manifest, and the proof that every byte is the one that was saved. No torch, no
pickle.

Nothing is parsed before it was verified and nothing is allocated because a file said so: the manifest is
bounded and sealed, sizes are compared with what this run needs, hashes with what was read, and only then is
state.json looked at.
"""
import contextlib
import hashlib
import os
import re
import stat
from functools import partial
from pathlib import Path

from common.checkpoint.files import SMALL, Damaged, parse_json, patient, proven, read_into, read_small, sealed, to_json, unseal

TENSORS = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 1
HASH = re.compile("[0-9a-f]{64}")
KINDS = {"format": int, "step": int, "parent": int, "life": str, "digest": str, "files": dict, "identity": str, "data": str,
         "torch": str}


@patient
def checkpoints(root):
    """Committed checkpoints under `root`, newest first, as (step, folder); what they hold is not looked at.
    """
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(int(name[5:]), Path(root, name)) for name in names if re.fullmatch("step-([0-9]{8}|[1-9][0-9]{8,17})", name)]
    return sorted(found, reverse=True)


def folder_name(step):
    return f"step-{step:08d}"


def write_manifest(fields, files):
    """The manifest's bytes; `files` is {name: (size, SHA-256)} of everything else in the folder."""
    return sealed(fields | {"format": FORMAT, "digest": _digest(files),
                            "files": {name: {"bytes": size, "sha256": sha} for name, (size, sha) in files.items()}})


def _digest(files):
    """One SHA-256 over all weights, buffers and optimizer tensors: the files hold names and tensors in a
    fixed order.
    """
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
        if not (isinstance(file, dict) and set(file) == {"bytes", "sha256"} and type(file["bytes"]) is int
                and file["bytes"] >= 0 and isinstance(file["sha256"], str) and HASH.fullmatch(file["sha256"])):
            raise Damaged(f"{MANIFEST}: no size or SHA-256 for {name}")
    if manifest["digest"] != _digest({name: (0, file["sha256"]) for name, file in files.items()}):
        raise Damaged(f"{MANIFEST}: its digest is not that of its files")
    return manifest


@patient
def verify(step, folder, buffers=None, from_disk=False, seen=None):
    """(manifest, facts) once every byte was read and hashed; tensors are left in `buffers`, {part: writable
    memory}.

    `seen(name, at, data)` is called with each piece of each file, in order, before anybody knows whether it
    is right.

    Damaged: proven wrong. OSError: it could not be read, also not some seconds later; what it holds is not
    known.
    """
    manifest = read_manifest(step, folder)
    files = manifest["files"]
    for part, name in TENSORS.items():
        if buffers is not None and len(buffers[part]) != files[name]["bytes"]:
            raise Damaged(f"{name} is {files[name]['bytes']:,} bytes, this model and optimizer need {len(buffers[part]):,}")
    if files[STATE]["bytes"] > SMALL:
        raise Damaged(f"{STATE} is {files[STATE]['bytes']:,} bytes, more than {SMALL:,}")
    text = memoryview(bytearray(files[STATE]["bytes"]))
    places = {STATE: text} | {name: buffers[part] if buffers is not None else None for part, name in TENSORS.items()}
    for name, place in places.items():
        told = seen and partial(seen, name)
        if (sha := read_into(folder / name, files[name]["bytes"], place, from_disk, told)) != files[name]["sha256"]:
            raise Damaged(f"{name} has SHA-256 {sha[:12]}..., manifest says {files[name]['sha256'][:12]}...")
    # Facts of earlier versions do not say in which order their position counts; the data's fingerprint must
    # do.
    return manifest, {"order": [manifest["data"]]} | check_facts(parse_json(bytes(text), STATE), step)


def describe(step, folder):
    """(whole?, a line about it that ends with its digest, or with what is wrong)."""
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
    """The facts of a checkpoint that another process has just committed: all but the tensors' hashes are
    looked at.
    """
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
    """Whether another process of this life has committed this state, or one that is further."""
    for step, folder in checkpoints(root):
        with contextlib.suppress(Damaged, OSError):
            there = glance(step, folder)
            return step > facts["step"] or there == parse_json(facts_to_json(facts), STATE)
    return False


def check_facts(facts, step):
    """The counters of a checkpoint, each of the kind that TrainState.load expects."""
    best, order = facts.get("best"), facts.get("order", [""])
    if not all(type(facts.get(name)) is int and 0 <= facts[name] < 2**62 for name in ("step", "epoch", "position")):
        raise Damaged(f"{STATE} has no step, epoch and position")
    if facts["step"] != step:
        raise Damaged(f"{STATE} is of step {facts['step']}, the folder says {step}")
    if not (isinstance(best, dict) and type(best.get("step")) is int and type(best.get("val_acc")) in (int, float)
            and isinstance(facts.get("scaler"), (dict, type(None)))
            and all(isinstance(line, dict) and type(line.get("step", 0)) is int
                    # older ones have kept no evaluation
                    for line in (facts.get("record"), facts.get("judged", {})))):
        raise Damaged(f"{STATE} has no best, record and scaler")
    if not (isinstance(order, list) and [type(part) for part in order] in ([int, int], [str])):
        raise Damaged(f"{STATE} does not say in which order its position counts")  # older ones say nothing
    return facts


def facts_to_json(facts):
    """What a person may find in a record but JSON cannot hold (NaN, infinity) becomes null."""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return None if isinstance(value, float) and value - value != 0 else value
    return to_json(plain(facts))
