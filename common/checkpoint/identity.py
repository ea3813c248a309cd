"""A run's options, data and code, kept in RUN/options.json; a restart that contradicts them is refused."""
import contextlib
import grp
import hashlib
import os
import platform
import pwd
import stat
from pathlib import Path

import torch

from common.checkpoint.files import Damaged, patient, read_small, sealed, sync_folder, to_json, unseal
from common.checkpoint.manifest import checkpoints, read_manifest
from common.errors import UserError
from common.ledger import replace_file
from common.options import Options
from common.world import bit_differences, bit_facts

KEPT_ASIDE = "options.json metrics.jsonl log-to.json ledger.jsonl certificate.json audit tb".split()


def identity_of(opts, fingerprint):
    """One SHA-256 over everything that decides the result."""
    return hashlib.sha256(to_json(opts.identity() | {"data": fingerprint})).hexdigest()


def marks(opts, world, fingerprint):
    """What each manifest says of its run: all that decides the result, and its hash for older versions."""
    return {"decides": opts.identity(), "identity": identity_of(opts, fingerprint), "data": fingerprint,
            "torch": torch.__version__, "pinned": bit_facts(opts, world)}


def contradictions(saved, opts):
    """The options that a manifest or options.json contradicts, with both values; missing: default."""
    fields = saved.get("decides", saved["identity"])  # the first manifests hold a hash: options.json tells
    return [f"--{name.replace('_', '-')} was {was!r}, now {now!r}"
            for name, was, now in (opts.compare(fields) if isinstance(fields, dict) else ())]


def versions(opts: Options, fingerprint: str) -> dict[str, str]:
    """{name: value} of all that must be the same on all ranks of one life."""
    house = next(folder for folder in Path(__file__).parents if folder.name == "common")
    code = hashlib.sha256()
    # .#NAME.py is an editor's link
    for path in sorted([*house.rglob("[!.]*.py"), *house.parent.glob("train_*.py")]):
        code.update(path.relative_to(house.parent).as_posix().encode() + path.read_bytes())
    return {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__,
            "code": code.hexdigest()[:12], "data": fingerprint[:12],
            "options": identity_of(opts, fingerprint)[:12], "your files": " ".join(own_code(opts).values())}


def own_code(opts):
    """{flag: hash of the file} for each flag that names a function of a user's own."""
    files = {name: Path(value.rpartition(":")[0]) for name, value in opts.identity().items()
             if isinstance(value, str) and ".py:" in value}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for name, path in files.items()
            if path.is_file()}


def check_identity(run_dir, opts, world, fingerprint, report):
    """Writes RUN/options.json if there is none; UserError if it, or a checkpoint, has other values.

    As long as nothing is saved, the options may change: then it returns True.
    """
    path, root = run_dir / "options.json", run_dir / "checkpoints"
    ours = {"options": opts.to_json(), "identity": opts.identity(), "data": fingerprint,
            "torch": torch.__version__, "pinned": bit_facts(opts, world), "own_code": own_code(opts)}
    old, saved = _read_options(path, report), dict(_manifests(root))
    first = old or next(iter(saved.values()), ours)
    wrong, was, now = contradictions(first, opts), first["data"][:12], fingerprint[:12]
    data = [f"the data's fingerprint was {was}, now {now}"] * (first["data"] != fingerprint)
    firm, soft = bit_differences(first.get("pinned", {}), ours["pinned"])
    if changes := wrong + data + firm:
        if not any(name.startswith(("step-", "damaged-")) for name in os.listdir(root)):
            report(f"{path}: nothing was saved here yet, so the options may change: {'; '.join(changes)}")
            replace_file(path, sealed(ours), sync=True)
            sync_folder(run_dir)
            return True
    for text in soft:
        report(f"--virtual-ranks: the {text}: from here on the bits may be others")
    if refused := wrong + firm + ([] if opts.accept_data_change else data):
        way = "give the same options" if refused != data else \
            "add --accept-data-change (with another number of samples the epoch begins again)"
        raise UserError(f"{run_dir} is another run: {'; '.join(refused)}\n"
                        f"{way} to go on with it, or another --run-dir\n"
                        f"--run-dir NEW --resume {run_dir} begins another run at its newest checkpoint")
    for name, manifest in saved.items():
        if wrong := contradictions(manifest, opts):
            raise UserError(f"{root / name} is of another run: {'; '.join(wrong)}\n"
                            "give the options of that run, move it away, or use another --run-dir")
    for text in data:
        report(f"--accept-data-change: {text}")
    if first["torch"] != torch.__version__:
        report(f"{run_dir} was begun with torch {first['torch']}, this is {torch.__version__}: "
               "the bits may differ from here on")
    code = first.get("own_code", {})  # older ones have none
    if changed := [name for name, now in ours["own_code"].items() if code.get(name, now) != now]:
        files = ", ".join(dict.fromkeys(opts.identity()[name].rpartition(":")[0] for name in changed))
        report(f"{files}: changed since this run was started last; it resumes with the new code")
    if not old or data or code != ours["own_code"]:
        new = (old or ours) | {"data": fingerprint, "own_code": ours["own_code"]}
        replace_file(path, sealed(new), sync=True)
        sync_folder(run_dir)


def _read_options(path, report):
    """The content of options.json; None if it is lost or torn: the manifests hold the same facts."""
    try:
        old = unseal(read_small(path), path.name) if os.path.lexists(path) else None
        if old and not (isinstance(old.get("identity"), dict) and isinstance(old.get("data"), str)):
            raise Damaged(f"{path.name} has no identity and data")
        return old and {"torch": None} | old
    except (Damaged, OSError) as reason:
        if os.path.islink(path) or os.path.lexists(path) and not os.path.isfile(path):
            raise UserError(f"{path}: {reason}\nremove it, or use another --run-dir") from reason
        report(f"{path}: {reason}; the checkpoints say whose run this is")
        return None


def _manifests(root):
    """(folder's name, manifest) of each checkpoint, newest first; damaged manifests are left out."""
    for step, folder in checkpoints(root):
        with contextlib.suppress(Damaged, OSError):
            yield folder.name, patient(read_manifest)(step, folder)


def set_aside(run_dir, wanted, fresh_job, report):
    """--resume none: moves the old run to before-K/, deletes nothing; True if something was moved.

    If it is killed half way, the next start completes the move.
    """
    aside, steps = run_dir / ".before", checkpoints(run_dir / "checkpoints")
    old = [name for name in KEPT_ASIDE if os.path.lexists(run_dir / name)]
    if not os.path.lexists(aside):
        if wanted and not fresh_job:
            report("--resume none: this is a restart of the same job: it resumes from its own checkpoints")
        if not wanted or not fresh_job or not (old or steps):
            return False
    (aside / "checkpoints").mkdir(mode=0o700, parents=True, exist_ok=True)
    for _, folder in steps:
        os.rename(folder, aside / "checkpoints" / folder.name)
    for name in old:
        os.rename(run_dir / name, aside / name)
    k = next(k for k in range(1, 10**6) if not os.path.lexists(run_dir / f"before-{k}"))
    os.rename(aside, run_dir / f"before-{k}")
    report(f"--resume none: what was in {run_dir} is now in before-{k}/")
    return True


def refuse_an_idle_resume(run_dir, resume):
    """UserError if --resume names an older checkpoint of this very run: it would resume from its newest."""
    found = checkpoints(run_dir / "checkpoints")
    named = [step for step, folder in found if os.path.isdir(resume) and os.path.samefile(folder, resume)]
    if named and named[0] < found[0][0]:
        raise UserError(
            f"--resume {resume}: this run resumes from its newest checkpoint, step {found[0][0]}\n"
            "leave it out to resume there; to go back to that step, give a --run-dir of its own as well")


def trusted(folder: Path) -> None:
    """UserError if other users may write into the folder: it could hold anything. (ssh's rule for its keys.)

    The user's own group may: on Debian and Ubuntu (umask 002) each user has a group of his own.
    """
    info = os.stat(folder)
    others = stat.S_IWOTH if _is_own_group(info.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    if info.st_uid != os.getuid() or info.st_mode & others:
        mode = f"mode {stat.S_IMODE(info.st_mode):04o}"
        raise UserError(f"{folder} is not yours alone: owner {info.st_uid}, group {info.st_gid}, {mode}\n"
                        "chmod 700 it (as its owner), or use another --run-dir")


def _is_own_group(number):
    """Whether this user alone is in the group, as far as its name and members tell."""
    with contextlib.suppress(KeyError):  # neither has a name in many containers
        user, group = pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(number)
        if group.gr_name != user or set(group.gr_mem) - {user}:
            return False
    return number == os.getgid()
