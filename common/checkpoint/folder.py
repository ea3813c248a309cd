"""A checkpoint's folder: its names, its manifest, how it is written and how it is verified.

Images and facts become one checkpoint on the disk, whole or not at all. A crash (C) between two of these
points leaves the checkpoint before, or both, never neither:
    C  step-N.ID/ is made in this life's staging folder       swept by the next life
    C  model and optimizer written and synced                 swept
    C  state.json, manifest.json, last, and the folder synced swept: complete, but not under its name
    C  both read back, as the next start will read them       swept
    C  the lines of metrics, ledger and audit synced          they tell of each step in a checkpoint
    C  the folder renamed to checkpoints/step-N               on a power loss N is there whole or not at all
    C  checkpoints/ synced                                    committed: only now may older ones go
    C  older ones renamed into staging, then deleted          extra files only
No name is written twice: later facts of a step become step-N.1, and step-N goes with the older ones.

Parts of a net split over ranks are written side by side into the same folder while it is still in staging,
and the last rank to finish names it:
    .life-L/gathered-N-STATE/part-00001/    one rank's tensors, facts and manifest
    .life-L/gathered-N-STATE/part-00002/    another's
    step-N/                                 the same folder, once it holds all parts and a manifest of all
No rank waits for another, there is no lock and no collective. Of two ranks with the same part the first is
taken; of those that see all parts, the one that renames the folder to a name of its own completes it. If a
part never comes, the checkpoint before stays the newest.

Nothing is parsed before it is verified, and no file decides how much memory is allocated: the manifest is
bounded and sealed, its tables are compared with what this run needs, hashes with what was read.
"""

import errno
import json
import os
import re
import stat
import uuid
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import common.checkpoint.disk as disk
import common.checkpoint.tensors as tensors
from common.checkpoint.disk import (
    Damaged,
    as_written,
    delete,
    parse_json,
    patient,
    sealed,
    sha,
    to_json,
    unseal,
)
from common.checkpoint.fence import Fenced
from common.errors import UserError

TENSORS = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
FILE = re.compile(r"(part-[0-9]{5}/)?(model|optimizer)\.safetensors")
STATE = "state.json"
MANIFEST = "manifest.json"
FACTS = "step epoch position order best record evaluated scaler tied data".split()  # a start reads them all
FORMAT = 6
STEP = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})(?:\.([1-9][0-9]{0,8}))?")
ASIDE = "damaged-"  # a checkpoint that is not trusted is kept under this name until a newer one is saved
EMA = "/ema"  # the end of an average's name
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
    rows = sorted(filter(None, map(numbers_of, names)), reverse=True)
    return [(step, Path(root, folder_name(step, k))) for step, k in rows]


def choices_at(path):
    """(folder, its checkpoints) of the run at `path`; or that one, if `path` is a checkpoint."""
    one = [choice for choice in checkpoints(path.parent) if choice[1].name == path.name]
    root = path.parent if one else path / "checkpoints"
    return root, one or checkpoints(root)


def folder_name(step, k=0):
    return f"step-{step:08d}" + (f".{k}" if k else "")


def numbers_of(name):
    """(step, k) of `step-N.k`; None of any other name."""
    found = STEP.fullmatch(name)
    return (int(found[1]), int(found[2] or 0)) if found else None


def free_number(root, step):
    """The k of a name for a checkpoint of this step that none has or had."""
    rows = [numbers_of(name.removeprefix(ASIDE)) for name in os.listdir(root)]
    return 1 + max((row[1] for row in rows if row and row[0] == step), default=-1)


def part_name(number):
    return f"part-{number + 1:05d}"


def part_of(path):
    """Whether a file of tensors is of the "model" or of the "optimizer"."""
    return Path(path).stem


# ---- reading ------------------------------------------------------------------------------------------
def read_manifest(folder):
    """A checkpoint's manifest; UserError if another version of this code wrote it.

    Its step and its digest are for others: they follow from the facts and the tables, which are compared.
    """
    with disk.opened(folder, stat.S_ISDIR):  # not a link to one
        manifest = unseal(disk.read_small(folder / MANIFEST), MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{folder} has format {str(manifest.get('format'))[:20]}, this code reads {FORMAT}\n"
            "resume it with the version that wrote it, which --export brings over here\n"
            "(--init-from FILE), or give another --run-dir"
        )
    with as_written(MANIFEST):
        _check(**manifest)
    return manifest


def _check(files, run, state, **_):
    """That these are tables of tensors."""
    for path, table in files.items():
        if not FILE.fullmatch(path):
            raise Damaged(f"{MANIFEST} lists {path[:80]}")
        for name, (dtype, shape, first, _) in table.items():
            tensors.size_of(dtype, shape)
            if not all(type(count) is int and count >= 0 for count in (first, *shape)):
                raise Damaged(f"{MANIFEST}: {name[:80]} is {dtype}{shape} from row {first}")


def digest_of(files):
    """One SHA-256 over all tensors, their names, types and shapes, however many files they lie in."""
    rows = sorted(
        (path.rpartition("/")[2], name, first, dtype, shape, digest)
        for path, table in files.items()
        for name, (dtype, shape, first, digest) in table.items()
    )
    return sha(to_json(rows))


@patient
def read_facts(step: int, folder: Path) -> tuple[dict, dict]:
    """(manifest, facts): all of a checkpoint but its tensors, compared with the seal and the hash."""
    manifest = read_manifest(folder)
    text = disk.read_small(folder / STATE)
    if sha(text) != manifest["state"]:
        raise Damaged(f"{STATE} has sha256 {sha(text)[:12]}..., manifest says {manifest['state'][:12]}...")
    facts = parse_json(text, STATE)
    if facts.get("step") != step:
        raise Damaged(f"{STATE} is of step {facts.get('step')}, the folder says {step}")
    with as_written(STATE):
        if {*FACTS} - facts.keys() or "step" not in facts["best"]:
            raise Damaged(f"{STATE} lacks what a start reads")
    return manifest, facts


def best_of(choices):
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
        manifest, _ = read_facts(step, folder)
        for path, table in manifest["files"].items():
            tensors.read_file(folder / path, table, count=tensors.threads())
    except Damaged as reason:
        return False, f"{folder.name}  damaged: {reason}"
    except OSError as error:  # even some seconds later: its content is unknown
        return False, f"{folder.name}  could not be read: {error}"
    size = sum(tensors.lay_out(table)[2] for table in manifest["files"].values())
    return True, f"{folder.name}  whole  {size:,} bytes  {digest_of(manifest['files'])}"


def choose(path, which):
    """(step, folder, line about it) of the "newest" whole checkpoint at `path`, the "best", or a step's."""
    root, choices = choices_at(path)
    if not root.is_dir():
        raise UserError(
            f"{path} is no run folder: it has no checkpoints/\n"
            "python -m common.checkpoint RUN lists those of a run"
        )
    if which == "best":
        which = best_of(choices).get("step", "evaluated")
    for step, folder in choices:
        if which in (step, "newest"):
            whole, line = describe(step, folder)
            if whole:
                return step, folder, line
    raise UserError(
        f"{path}: no whole checkpoint ({which})\npython -m common.checkpoint {path} lists them", code=3
    )


def weights_of(path: Path, which: str | int) -> tuple[dict[str, Tensor], dict]:
    """(weights, facts) of a run's "newest" or "best" checkpoint, or of a step; averages are the weights.

    Tied weights keep their first name.
    """
    step, folder, _ = choose(path, which)
    manifest, facts = read_facts(step, folder)
    found = {"model": {}, "optimizer": {}}
    for file in sorted(manifest["files"]):  # of a sharded net the first part has the first rows
        for name, rows in load_file(folder / file).items():
            found[part_of(file)].setdefault(name, []).append(rows)
    averages = {
        name.removesuffix(EMA): rows for name, rows in found["optimizer"].items() if name.endswith(EMA)
    }
    weights = {
        name: torch.cat(rows) if len(rows) > 1 else rows[0]
        for name, rows in (found["model"] | averages).items()
        if name not in facts["tied"]
    }
    return weights, facts


def is_there(root, facts):
    """Whether the newest checkpoint that can be read has this state or a later one."""
    for step, folder in checkpoints(root):
        with suppress(Damaged, OSError):
            return _how_far(read_facts(step, folder)[1]) >= _how_far(facts)
    return False


def _how_far(facts):
    """What orders facts; within one step the evaluation comes last."""
    return facts["step"], facts["epoch"], facts["evaluated"].get("step", -1)


# ---- writing ------------------------------------------------------------------------------------------
def facts_to_json(facts):
    """state.json's bytes; NaN and infinity, which JSON does not have, become null."""
    return to_json(json.loads(json.dumps(facts), parse_constant=lambda name: None))


def _rename(source, target):
    """False if another one has the name already."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in THERE:
            raise
        return False
    return True


class Writer:
    """Writes into the staging folder of one life and renames out of it.

    If the folder is gone, another life has taken over (Fenced). `run` is the run's hash, for each manifest.
    """

    def __init__(self, root, life, run, layout):
        self.root = root
        self.life = life
        self.run = run
        self.layout = layout
        self.staging = root / f".life-{life}"
        self.moved = 0  # chunks written so far: others see that a rescue makes progress

    def commit(self, sources, facts):
        """The folder of the new checkpoint; None if other ranks' parts of it are still missing.

        Raises what has failed twice, as OSError of the disk; Fenced if another life has taken over. After a
        failed write or fsync everything is written again, once, to other files.
        """
        for attempt in (1, 2):
            aside = self._aside(facts["step"])
            try:
                os.mkdir(aside, 0o700)
                files = {
                    name: tensors.write_file(aside / name, sources[part], self.layout.rows, self._move)
                    for part, name in TENSORS.items()
                }
                self._describe(aside, files, facts)
                if self.layout.parts > 1:
                    return self._gather(aside, facts)
                return self._name(aside, facts["step"])
            except Exception:  # no memory, too
                delete(aside)
                self.check_staging(facts["step"])
                if attempt == 2:
                    raise

    def check_staging(self, step):
        """Fenced if the folder is gone. A look may see an old copy of the name; making it asks the server."""
        try:
            self.staging.touch(exist_ok=False)  # a file: no other rank can save into it meanwhile
            self.staging.unlink()
        except FileExistsError:
            return
        except FileNotFoundError:  # the folder above is gone, too
            pass
        raise Fenced(
            f"{self.root.parent} was taken over by another life, or removed: "
            f"step {step} of this one is not saved"
        )

    def _aside(self, step):
        """A new folder name. A pid is not enough: ranks in two containers may have the same."""
        return self.staging / f"{folder_name(step)}.{uuid.uuid4().hex[:12]}"

    def _move(self):
        self.moved += 1

    def put(self, path, data):
        """A small file, whole or not at all; two ranks may do it at once."""
        aside = self.staging / uuid.uuid4().hex
        with disk.new_file(aside) as fd:
            disk.write_at(fd, data, 0)
        os.rename(aside, path)

    def _describe(self, folder, files, facts):
        """Adds facts and manifest to a folder of this process alone, syncs it, and reads both back."""
        state = facts_to_json(facts)
        manifest = {
            "format": FORMAT,
            "run": self.run,
            "step": facts["step"],
            "digest": digest_of(files),
            "state": sha(state),
            "files": files,
        }
        self.put(folder / STATE, state)
        self.put(folder / MANIFEST, sealed(manifest))
        disk.sync_folder(folder)
        read_facts(facts["step"], folder)

    def _name(self, folder, step):
        disk.sync_lines(self.root.parent, self.life)
        k = free_number(self.root, step)
        while not _rename(folder, self.root / folder_name(step, k)):
            k += 1
        disk.sync_folder(self.root)
        return self.root / folder_name(step, k)

    # ---- parts of a net --------------------------------------------------------------------------------
    def _gather(self, aside, facts):
        """Adds this rank's part; names the checkpoint if it was the last one."""
        step = facts["step"]
        state = sha(facts_to_json(facts | {"record": None}))[:12]  # what ranks noted last may differ
        gathered = self.staging / f"gathered-{step:08d}-{state}"
        with suppress(FileExistsError):
            os.mkdir(gathered, 0o700)
        if not _rename(aside, gathered / part_name(self.layout.number)):
            delete(aside)
        mine = self._aside(step)
        files = {}
        records = []
        names = [part_name(number) for number in range(self.layout.parts)]
        try:
            disk.sync_folder(gathered)
            for name in names:
                os.stat(gathered / name)
            os.rename(gathered, mine)  # of those that see all parts one has them; later ones begin anew
            for name in names:
                tables = read_manifest(mine / name)["files"]
                files |= {f"{name}/{file}": table for file, table in tables.items()}
                records.append(parse_json(disk.read_small(mine / name / STATE), STATE)["record"])
            record = max(records, key=lambda record: record.get("step", -1))
            self._describe(mine, files, facts | {"record": record})
            folder = self._name(mine, step)
        except OSError as error:
            with suppress(OSError):
                os.rename(mine, gathered)
            if not isinstance(error, FileNotFoundError):
                raise
            self.check_staging(step)  # a part is missing, or another rank names the checkpoint
            return None
        for old in self.staging.glob("gathered-*"):  # its missing part will not come any more
            if int(old.name.split("-")[1]) < step:
                delete(old)
        return folder

    # ---- what goes -------------------------------------------------------------------------------------
    def put_aside(self, folder):
        """Renames a checkpoint, so that no start takes it; it is kept until a newer one is saved.

        By way of our staging: once that is gone, the checkpoint may be a newer life's, and stays.
        """
        aside = self.root / f"{ASIDE}{folder.name}"
        passing = self.staging / folder.name
        with suppress(OSError):
            os.rename(folder, passing)
            delete(aside)
            os.rename(passing, aside)

    def prune(self, extra):
        """Deletes these checkpoints, and with them what was put aside."""
        if extra:
            extra += self.root.glob(f"{ASIDE}*")
        for folder in extra:
            gone = self.staging / f"{uuid.uuid4().hex[:12]}.gone"
            with suppress(OSError):
                os.rename(folder, gone)  # a crash in mid-deletion leaves no half checkpoint
                delete(gone)
