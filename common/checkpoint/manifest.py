"""A checkpoint's folder: its manifest, and the check of every byte. No torch, no pickle.

Nothing is parsed before it is verified, and no file decides how much memory is allocated: the manifest is
bounded and sealed, sizes are compared with what this run needs, hashes with what was read; only then is
state.json parsed.
"""
import contextlib
import os
import re
import stat
from pathlib import Path

from common.checkpoint.blocks import entry_of, kind_of, read_file, read_range, sha, spans, threads
from common.checkpoint.files import SMALL, Damaged, parse_json, patient, proven, read_small, to_json, unseal

TENSORS = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
STATE = "state.json"
MANIFEST = "manifest.json"
FORMATS = (1, 2)  # the last one is written; the first one has no blocks
LONG = 64  # bytes of the manifest for a byte of a tensor: each of many tiny ones may be a block
MOST_BYTES = 1 << 28  # of the manifest
MOST_TRIES = 1000  # to find a name that another survivor does not take first
HASH = re.compile("[0-9a-f]{64}")
KINDS = {"format": int, "step": int, "life": str, "digest": str, "files": dict,
         "identity": str, "data": str, "torch": str}
STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(?:\.([1-9][0-9]{0,8}))?")
ASIDE = "damaged-"  # a checkpoint that is not trusted is kept under this name until a newer one is saved


@patient
def checkpoints(root: Path | str) -> list[tuple[int, Path]]:
    """Committed checkpoints under `root`, newest first, as (step, folder); not verified.

    Of one step the latest facts come first: `step-N.2`, `step-N.1`, `step-N`.
    """
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(*numbers_of(name), name) for name in names if STEP.fullmatch(name)]
    return [(step, Path(root, name)) for step, _, name in sorted(found, reverse=True)]


def free_names(root, step):
    """Names for a checkpoint of this step that no checkpoint has or had, the next one first."""
    names = [name.removeprefix(ASIDE) for name in os.listdir(root)]
    taken = [k for name in names if STEP.fullmatch(name) for at, k in [numbers_of(name)] if at == step]
    first = max(taken, default=-1) + 1
    return (folder_name(step, k) for k in range(first, first + MOST_TRIES))


def folder_name(step, k=0):
    return f"step-{step:08d}" + (f".{k}" if k else "")


def numbers_of(name):
    """(step, k) of `step-N.k`."""
    step, k = STEP.fullmatch(name).groups()
    return int(step), int(k or 0)


def digest_of(roots):
    """One SHA-256 over all tensors, from the one hash of each whole file."""
    return sha("".join(roots[part] for part in TENSORS).encode())


def roots_of(files):
    """{part: the one hash of its file}"""
    return {part: files[name][kind_of(files[name])] for part, name in TENSORS.items()}


def parts_of(files):
    """The folder of each part, with a slash; [""] if there is one part only."""
    count = max(1, len(files) // len(TENSORS))
    return [""] if TENSORS["model"] in files else [part_name(number) + "/" for number in range(count)]


def part_name(number):
    return f"part-{number + 1:05d}"


def read_manifest(step, folder):
    """The manifest of the checkpoint of `step`: its seal, and every field's kind and range."""
    with proven(folder):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise Damaged("not a folder")
        size = sum(path.lstat().st_size for path in folder.rglob("*.safetensors"))
    manifest = unseal(read_small(folder / MANIFEST, min(SMALL + LONG * size, MOST_BYTES)), MANIFEST)
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
    expected = [STATE, *(prefix + name for prefix in parts_of(files) for name in TENSORS.values())]
    if set(files) != set(expected):
        raise Damaged(f"{MANIFEST} lists {sorted(files)[:5]}, expected {sorted(expected)[:5]}")
    for name, entry in files.items():
        if not _is_entry(entry):
            raise Damaged(f"{MANIFEST}: the size, hash and blocks of {name} do not belong together")
    # that of parts is over whole files, which are not there
    digest = digest_of(roots_of(files)) if TENSORS["model"] in files else manifest["digest"]
    if manifest["digest"] != digest or not HASH.fullmatch(digest):
        raise Damaged(f"{MANIFEST}: its digest is not that of its files")
    return manifest


def _is_entry(entry):
    """Whether `entry_of` makes the same entry from its blocks, and each block ends after the one before."""
    try:
        starts, ends, hashes = zip(*spans(entry), strict=True)
        rising = ends == (0,) or all(start < end for start, end in zip(starts, ends, strict=True))
        return (rising and all(map(HASH.fullmatch, hashes))
                and all(type(end) is int for end in (entry["bytes"], *ends))
                and entry_of(ends, hashes, kind_of(entry)) == entry)
    except (TypeError, ValueError, KeyError, AttributeError):
        return False


@patient
def read_facts(step, folder, from_disk=False):
    """(manifest, facts): all of a checkpoint but its tensors, compared with the seal and the hash."""
    manifest = read_manifest(step, folder)
    entry = manifest["files"][STATE]
    if entry["bytes"] > SMALL:
        raise Damaged(f"{STATE} is {entry['bytes']:,} bytes, more than {SMALL:,}")
    text = read_range(folder / STATE, entry, 0, entry["bytes"], from_disk)
    # Facts of earlier versions do not name the order of their position: the data's fingerprint stands for it.
    return manifest, {"order": [manifest["data"]]} | check_facts(parse_json(text, STATE), step)


def verify(step, folder, from_disk=False, moved=None):
    """(manifest, facts), after reading and comparing each byte.

    Damaged: proven wrong. OSError: could not be read, even some seconds later; its content is unknown.
    """
    manifest, facts = read_facts(step, folder, from_disk)
    for name, entry in manifest["files"].items():
        if name != STATE:
            patient(read_file)(folder / name, entry, None, None, from_disk, moved, threads())
    return manifest, facts


def describe(step: int, folder: Path) -> tuple[bool, str]:
    """(whether it is whole, a line about it that ends with its digest or the damage)."""
    try:
        manifest, _ = verify(step, folder)
    except Damaged as reason:
        return False, f"{folder.name}  damaged: {reason}"
    except OSError as error:
        return False, f"{folder.name}  could not be read: {error}"
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    return True, f"{folder.name}  whole  {size:,} bytes  {manifest['digest']}"


def is_there(root, facts):
    """Whether another process of this life has committed this state or a later one."""
    for step, folder in checkpoints(root):
        with contextlib.suppress(Damaged, OSError):
            return _how_far(read_facts(step, folder)[1]) >= _how_far(facts)
    return False


def _how_far(facts):
    """What orders facts; within one step the evaluation comes last."""
    return facts["step"], facts["epoch"], facts.get("judged", {}).get("step", -1)


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
