"""A checkpoint's folder: its names, its manifest, how it is written and how it is verified.

Images and facts become one checkpoint on the disk, whole or not at all. A crash (C) between two of these
points leaves the checkpoint before, or both, never neither:
    C  step-N.k/ is made in this life's staging folder        swept by the next life
    C  state, model, optimizer written and synced             swept
    C  manifest.json written and synced, last                 swept: complete, but not under its name
    C  the lines of metrics, ledger and audit synced          they tell of each step in a checkpoint
    C  the folder synced, renamed to checkpoints/step-N       on a power loss N is there whole or not at all
    C  checkpoints/ synced                                    committed: only now may older ones go
    C  older ones renamed into staging, then deleted          extra files only
No name is written twice: later facts of a step become step-N.1, and step-N goes with the older ones.

Nothing is parsed before it is verified, and no file decides how much memory is allocated: the manifest is
bounded and sealed, sizes are compared with what this run needs, hashes with what was read; only then is
state.json parsed.
"""
import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from pathlib import Path

import common.checkpoint.disk as disk
import common.checkpoint.tensors as tensors
from common.checkpoint.disk import SMALL_BYTES, Damaged, delete, parse_json, patient, proven, sealed, to_json
from common.checkpoint.fence import Fenced, exists
from common.checkpoint.tensors import sha, spans
from common.errors import UserError

TENSORS = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
STATE = "state.json"
MANIFEST = "manifest.json"
FORMAT = 4
LONG = 64  # bytes of the manifest for a byte of a tensor: each of many tiny ones has a hash
MOST_BYTES = 1 << 28  # of the manifest
MOST_TRIES = 1000  # to find a name that another survivor does not take first
STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(?:\.([1-9][0-9]{0,8}))?")
ASIDE = "damaged-"  # a checkpoint that is not trusted is kept under this name until a newer one is saved
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


# ---- names --------------------------------------------------------------------------------------------
@patient
def checkpoints(root: Path | str) -> list[tuple[int, Path]]:
    """Committed checkpoints under `root`, newest first, as (step, folder); not verified.

    Of one step the latest facts come first: `step-N.2`, `step-N.1`, `step-N`.
    """
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    choices = [(*numbers_of(name), name) for name in names if STEP.fullmatch(name)]
    return [(step, Path(root, name)) for step, _, name in sorted(choices, reverse=True)]


def choices_at(path):
    """--resume PATH: (the folder of that checkpoint, or of those of that run, its checkpoints)."""
    path = Path(path)
    one = [choice for choice in checkpoints(path.parent) if choice[1].name == path.name]
    return (path.parent, one) if one else (path / "checkpoints", checkpoints(path / "checkpoints"))


def folder_name(step, k=0):
    return f"step-{step:08d}" + (f".{k}" if k else "")


def numbers_of(name):
    """(step, k) of `step-N.k`."""
    step, k = STEP.fullmatch(name).groups()
    return int(step), int(k or 0)


def free_names(root, step):
    """Names for a checkpoint of this step that no checkpoint has or had, the next one first."""
    names = [name.removeprefix(ASIDE) for name in os.listdir(root)]
    taken = [k for name in names if STEP.fullmatch(name) for at, k in [numbers_of(name)] if at == step]
    first = max(taken, default=-1) + 1
    return (folder_name(step, k) for k in range(first, first + MOST_TRIES))


def part_name(number):
    return f"part-{number + 1:05d}"


def parts_of(files):
    """The folder of each part, with a slash; [""] if there is one part only."""
    if TENSORS["model"] in files:
        return [""]
    return [part_name(number) + "/" for number in range(len(files) // len(TENSORS))]


# ---- reading ------------------------------------------------------------------------------------------
def read_manifest(step, folder):
    """The manifest of the checkpoint of `step`; UserError if another version of this code wrote it."""
    with proven(folder):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            raise Damaged("not a folder")
        size = sum(path.lstat().st_size for path in folder.rglob("*.safetensors"))
    text = disk.read_small(folder / MANIFEST, min(SMALL_BYTES + LONG * size, MOST_BYTES))
    manifest = disk.unseal(text, MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(f"{folder} has format {str(manifest.get('format'))[:20]}, this code reads {FORMAT}\n"
                        "resume it with the version that wrote it, which --export brings over here\n"
                        "(--init-from FILE), or give another --run-dir")
    try:
        _check(manifest, step)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} is not as this code writes it ({error!r:.60})") from error
    return manifest


def _check(manifest, step):
    """That these are the files of a checkpoint of `step`, and their pieces follow each other."""
    files = manifest["files"]
    if manifest["step"] != step:
        raise Damaged(f"{MANIFEST} is of step {manifest['step']}, the folder says {step}")
    expected = {STATE, *(prefix + name for prefix in parts_of(files) for name in TENSORS.values())}
    if set(files) != expected:
        raise Damaged(f"{MANIFEST} lists {sorted(files)[:5]}, expected {sorted(expected)[:5]}")
    for name, entry in files.items():  # layout.py compares them with the header that this run needs
        first, *_ = spans(entry)
        if first[0] or not all(0 <= start <= end for _, start, end, _ in spans(entry)):
            raise Damaged(f"{MANIFEST}: the pieces of {name} do not follow each other")
    if files[STATE]["bytes"] != files[STATE]["sha256"][0][1] or files[STATE]["bytes"] > SMALL_BYTES:
        raise Damaged(f"{MANIFEST}: {STATE} is {files[STATE]['bytes']:,} bytes")
    if manifest["digest"] != digest_of(files):
        raise Damaged(f"{MANIFEST}: its digest is not that of its files")


def digest_of(files):
    """One SHA-256 over all tensors, however many files they lie in."""
    hashes = [(path.rpartition("/")[2], name, path, stated) for path, entry in files.items() if path != STATE
              for name, _, _, stated in spans(entry) if name]
    return sha("".join(f"{file} {name} {stated}\n" for file, name, _, stated in sorted(hashes)).encode())


@patient
def read_facts(step, folder):
    """(manifest, facts): all of a checkpoint but its tensors, compared with the seal and the hash."""
    manifest = read_manifest(step, folder)
    text = tensors.read_header_piece(folder / STATE, manifest["files"][STATE])
    facts = parse_json(text, STATE)
    if facts.get("step") != step:
        raise Damaged(f"{STATE} is of step {facts.get('step')}, the folder says {step}")
    return manifest, facts


def verify(step, folder):
    """(manifest, facts), after reading and comparing each byte.

    Damaged: proven wrong. OSError: could not be read, even some seconds later; its content is unknown.
    """
    manifest, facts = read_facts(step, folder)
    for name, entry in manifest["files"].items():
        if name != STATE:
            patient(tensors.read_file)(folder / name, entry, count=tensors.threads())
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
    return facts["step"], facts["epoch"], facts["judged"].get("step", -1)


# ---- writing ------------------------------------------------------------------------------------------
def facts_to_json(facts):
    """state.json's bytes; NaN and infinity, which JSON does not have, become null."""
    def plain(value):
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return None if isinstance(value, float) and value - value != 0 else value
    return to_json(plain(facts))


class Writer:
    """Writes into the staging folder of one life and renames out of it.

    If the folder is gone, another life has taken over (Fenced). `run` is the run's hash, for each manifest.
    """

    def __init__(self, root, life, run):
        self.root, self.life, self.run = root, life, run
        self.staging = root / f".life-{life}"
        self.moved = 0  # chunks written so far: others see that a rescue makes progress
        self.renew = None  # the owner's: makes a staging folder again that a person has removed

    def commit(self, images, facts):
        """The folder of the new checkpoint; None if parts of it are still missing.

        OSError if the disk fails twice, Fenced if another life has taken over. After a failed write or fsync
        everything is written again, once, to other files.
        """
        for attempt in (1, 2):
            aside = self._aside(facts["step"])
            try:
                return self._commit(aside, images, facts)
            except OSError as error:
                shutil.rmtree(aside, ignore_errors=True)
                self.ensure_staging(facts["step"])
                if attempt == 2 or error.errno in FULL:
                    raise

    def _commit(self, aside, images, facts):
        os.mkdir(aside, 0o700)
        written = self._write_tensors(aside, images)
        self._write_manifest(aside, aside, facts, written)
        return self._name(aside, facts["step"])

    def _aside(self, step):
        """A new folder name. A pid is not enough: ranks in two containers may have the same."""
        return self.staging / f"{folder_name(step)}.{uuid.uuid4().hex[:12]}"

    def _write_tensors(self, aside, images):
        return {name: tensors.write_file(aside / name, images[part].bytes, images[part].pieces, self._move)
                for part, name in TENSORS.items()}

    def _write_manifest(self, aside, final, facts, written):
        """Written aside, so that two ranks may do it at once; then renamed to `final`."""
        written |= {STATE: tensors.write_file(aside / STATE, facts_to_json(facts))}
        manifest = {"format": FORMAT, "run": self.run, "step": facts["step"], "digest": digest_of(written),
                    "files": written}
        tensors.write_file(aside / MANIFEST, sealed(manifest))
        if aside != final:
            os.rename(aside / STATE, final / STATE)
            os.rename(aside / MANIFEST, final / MANIFEST)
        disk.sync_folder(final)

    def _name(self, aside, step):
        disk.sync_lines(self.root.parent, self.life)
        for name in free_names(self.root, step):
            try:
                os.rename(aside, self.root / name)
            except OSError as error:
                if error.errno not in THERE:
                    raise
            else:
                disk.sync_folder(self.root)
                return self.root / name

    def ensure_staging(self, step):
        """Fenced if another life has moved the staging folder away; makes it again if a person deleted it."""
        if exists(self.staging):
            return
        if self.renew is None:
            raise Fenced(f"{self.root.parent} was taken over by another life: "
                         f"step {step} of this one is not saved")
        self.renew()

    def _move(self):
        self.moved += 1

    def put_aside(self, folder):
        """Renames a checkpoint, so that no start takes it; it is kept until a newer one is saved."""
        aside = self.root / f"{ASIDE}{folder.name}"
        delete(aside)
        with contextlib.suppress(OSError):
            os.rename(folder, aside)

    def prune(self, keep, protected):
        """Deletes all but the newest `keep` and the `protected` steps; of each step the latest facts stay."""
        choices = checkpoints(self.root)
        latest = dict(reversed(choices))
        kept = {*sorted(latest)[-keep:], *protected}
        extra = [folder for step, folder in choices if step not in kept or latest[step] != folder]
        if extra:
            extra += [path for path in self.root.iterdir() if path.name.startswith(ASIDE)]
        for folder in extra:
            gone = self.staging / f"{uuid.uuid4().hex[:12]}.gone"
            with contextlib.suppress(OSError):
                os.rename(folder, gone)  # a crash in mid-deletion leaves no half checkpoint
                delete(gone)
