"""What a run is: its options and data, in RUN/options.json; a restart that contradicts them is refused."""
import contextlib
import os
import platform
from pathlib import Path

import torch

from common.checkpoint.disk import Damaged, read_small, sealed, sync_folder, to_json, unseal
from common.checkpoint.folder import checkpoints, read_manifest
from common.checkpoint.tensors import sha, write_file
from common.errors import UserError
from common.options import Options
from common.world import bit_differences, bit_facts


def run_of(opts: Options) -> str:
    """The run's hash, for each manifest: over all fixed options that are not at their defaults."""
    defaults = Options().identity()
    decided = {name: value for name, value in opts.identity().items() if value != defaults[name]}
    files = {name: value.rpartition("/")[2] for name, value in decided.items() if isinstance(value, str)}
    return sha(to_json(decided | files))  # a user's file may lie elsewhere now


def versions(opts: Options, fingerprint: str) -> dict[str, str]:
    """{name: value} of all that must be the same on all ranks of one life."""
    return {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__,
            "data": fingerprint[:12], "options": run_of(opts)[:12]}


def refuse_other_formats(root):
    """Before anything is touched: UserError if another version of this code has saved here."""
    for step, folder in checkpoints(root):
        with contextlib.suppress(Damaged, OSError):
            read_manifest(step, folder)


def check_identity(staging, opts, world, fingerprint, report):
    """Keeps options.json up to date; UserError if it, or a checkpoint, has other values.

    As long as nothing is saved, the options may change. The free ones may always: the file has the newest.
    """
    path, root = opts.run_dir / "options.json", opts.run_dir / "checkpoints"
    ours = {"options": opts.to_json(), "identity": opts.identity(), "data": fingerprint,
            "torch": torch.__version__, "pinned": bit_facts(opts, world)}
    begun = any(name.startswith(("step-", "damaged-")) for name in os.listdir(root))
    saved = _read(path, begun)
    first = saved or ours
    wrong = [f"--{name.replace('_', '-')} was {was!r}, now {now!r}"
             for name, was, now in opts.compare(first["identity"])]
    data = []
    if first["data"] != fingerprint:
        data = [f"the data's fingerprint was {first['data'][:12]}, now {fingerprint[:12]}"]
    firm, soft = bit_differences(first["pinned"], ours["pinned"])
    if not begun:
        if changes := wrong + data + firm:
            report(f"{path}: nothing was saved here yet, so the options may change: {'; '.join(changes)}")
        return _write(path, ours, saved, staging)
    for text in soft:
        report(f"--virtual-ranks: the {text}: from here on the bits may be others")
    if refused := wrong + firm + ([] if opts.accept_data_change else data):
        way = "give the same options" if refused != data else \
            "add --accept-data-change (with another number of samples the epoch begins again)"
        raise UserError(f"{opts.run_dir} is another run: {'; '.join(refused)}\n"
                        f"{way} to go on with it, or another --run-dir\n"
                        f"--run-dir NEW --resume {opts.run_dir} begins another run at its newest checkpoint")
    for step, folder in checkpoints(root):
        with contextlib.suppress(Damaged, OSError):
            if read_manifest(step, folder)["run"] != run_of(opts):
                raise UserError(f"{folder} is of another run than {path}\n"
                                "move it away, or use another --run-dir")
    for text in data:
        report(f"--accept-data-change: {text}")
    if first["torch"] != torch.__version__:
        report(f"{opts.run_dir} was begun with torch {first['torch']}, this is {torch.__version__}: "
               "the bits may differ from here on")
    _write(path, first | {"options": ours["options"], "data": fingerprint}, saved, staging)


def refuse_an_idle_resume(root: Path, resume: str) -> None:
    """UserError if --resume names an older checkpoint of this very run: it would resume from its newest."""
    choices = checkpoints(root)
    named = [step for step, folder in choices if os.path.isdir(resume) and os.path.samefile(folder, resume)]
    if named and named[0] < choices[0][0]:
        raise UserError(
            f"--resume {resume}: this run resumes from its newest checkpoint, step {choices[0][0]}\n"
            "leave it out to resume there; to go back to that step, give a --run-dir of its own as well")


def _read(path, needed):
    """The content of options.json, which is written at once or not at all; None before the first save."""
    if not (needed or os.path.lexists(path)):
        return None
    try:
        return unseal(read_small(path), path.name)
    except Damaged as reason:
        raise UserError(f"{path}: {reason}; without it this could be another run\n"
                        f"bring it back; or --run-dir NEW --resume {path.parent} begins another run at its "
                        "newest checkpoint") from reason


def _write(path, facts, saved, staging):
    if facts != saved:
        aside = staging / path.name
        write_file(aside, sealed(facts))
        os.rename(aside, path)
        sync_folder(path.parent)
