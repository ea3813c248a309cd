"""What a run is: its options, its data, the code; kept in RUN/options.json. A restart that contradicts it is refused."""
import hashlib
import os
import platform
import stat
from pathlib import Path

import torch

from common import UserError, pinned
from common.files import Damaged, read_small, replace_file, sealed, to_json, unseal
from common.manifest import checkpoints, read_manifest

KEPT_ASIDE = ("options.json", "metrics.jsonl", "ledger.jsonl", "audit", "tb")


def identity_of(opts, fingerprint):
    """One SHA-256 over everything that decides the result; each checkpoint carries it."""
    return hashlib.sha256(to_json(opts.identity() | {"data": fingerprint})).hexdigest()


def versions(opts, fingerprint):
    """What all ranks of one life must have in common, as {what: value}."""
    house = Path(__file__).parent
    code = hashlib.sha256()
    for path in sorted([*house.glob("*.py"), *house.parent.glob("train_*.py")]):
        code.update(path.name.encode() + path.read_bytes())
    return {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__, "code": code.hexdigest()[:12],
            "data": fingerprint[:12], "options": identity_of(opts, fingerprint)[:12]}


def check_identity(run_dir, opts, world, fingerprint, report):
    """Write RUN/options.json where there is none; UserError, naming each value, where it contradicts these options."""
    path, root = run_dir / "options.json", run_dir / "checkpoints"
    ours = {"options": opts.to_json(), "identity": opts.identity(), "data": fingerprint, "torch": torch.__version__,
            "pinned": pinned.facts(opts, world)}
    try:
        old = unseal(read_small(path), path.name) if os.path.lexists(path) else None
        if old and not (isinstance(old.get("identity"), dict) and isinstance(old.get("data"), str)):
            raise Damaged(f"{path.name} has no identity and data")
    except (Damaged, OSError) as reason:
        if os.path.islink(path) or os.path.lexists(path) and not os.path.isfile(path):
            raise UserError(f"{path}: {reason}\nremove it, or use another --run-dir") from reason
        old = None
        report(f"{path}: {reason}; the checkpoints say whose run this is")
    lost = old is None
    old = old or ours | _ask_the_checkpoints(root, path, opts)
    wrong = [f"--{name.replace('_', '-')} was {was!r}, now {now!r}" for name, was, now in opts.compare(old["identity"])]
    was, now = old["data"][:12], fingerprint[:12]
    data = [f"the data's fingerprint was {was}, now {now}"] * (old["data"] != fingerprint)
    firm, soft = pinned.differences(old.get("pinned", {}), ours["pinned"])
    for text in soft:
        report(f"--virtual-ranks: the {text}: from here on the bits may be others")
    if wrong := wrong + firm + ([] if opts.accept_data_change else data):
        way = "give the same options" if wrong != data else \
            "add --accept-data-change (with another number of samples the epoch begins again)"
        raise UserError(f"{run_dir} is another run: {'; '.join(wrong)}\n"
                        f"{way} to go on with it, or another --run-dir\n"
                        f"--run-dir NEW --resume {run_dir} begins another run at its newest checkpoint")
    for text in data:
        report(f"--accept-data-change: {text}")
    if old.get("torch") != torch.__version__:
        report(f"{run_dir} was begun with torch {old.get('torch')}, this is {torch.__version__}: the bits may differ from here on")
    if lost or data:
        replace_file(path, sealed((ours if lost else old) | {"data": fingerprint}))


def _ask_the_checkpoints(root, path, opts):
    """options.json is lost or torn: the sealed manifests know as well whose run it is, and what computed it."""
    for step, folder in checkpoints(root):
        try:
            manifest = read_manifest(step, folder)
        except (Damaged, OSError):
            continue
        if manifest["identity"] != identity_of(opts, manifest["data"]):
            raise UserError(f"{path} cannot be read, and checkpoints/{folder.name} was saved with other "
                            "options\ngive the options of that run to go on with it, or another --run-dir")
        return {"data": manifest["data"], "torch": manifest["torch"], "pinned": manifest.get("pinned", {})}
    return {}


def set_aside(run_dir, report):
    """--resume none loses nothing: what was there moves to before-K/."""
    old = [name for name in KEPT_ASIDE if os.path.lexists(run_dir / name)]
    steps = [folder for _, folder in checkpoints(run_dir / "checkpoints")]
    if not old and not steps:
        return
    k = next(k for k in range(1, 10**6) if not os.path.lexists(run_dir / f"before-{k}"))
    aside = run_dir / f"before-{k}"
    (aside / "checkpoints").mkdir(mode=0o700, parents=True)
    for folder in steps:
        os.rename(folder, aside / "checkpoints" / folder.name)
    for name in old:
        os.rename(run_dir / name, aside / name)
    report(f"--resume none: what was in {run_dir} is now in {aside.name}/")


def trusted(folder):
    """A folder that others may write into can hold anything: ssh's rule for its keys."""
    info = os.stat(folder)
    if info.st_uid != os.getuid() or info.st_mode & stat.S_IWOTH:
        raise UserError(f"{folder} is not yours alone: owner {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}\n"
                        "chmod 700 it (as its owner), or use another --run-dir")
