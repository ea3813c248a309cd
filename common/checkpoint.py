"""The store on disk: atomic, asynchronous, verified, fenced.

    python -m common.checkpoint RUN             # every checkpoint, verified
    python -m common.checkpoint RUN --digest    # one SHA-256 over weights, optimizer and buffers of the newest whole one

A save walks through these points; a crash (C) between any two leaves the checkpoint before, or both, never neither:
    C  step-N.k/ is made in this life's staging folder        swept by the next life
    C  model, optimizer, state written and synced             swept
    C  manifest.json written and synced, last                 swept: complete, but without a name that counts
    C  the folder synced, renamed to checkpoints/step-N       on a power loss N is there whole or not at all
    C  checkpoints/ synced                                    committed
    C  N read back and verified, older ones renamed into staging, then deleted      extra files only
"""
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import threading
import time
from pathlib import Path

import torch

from common import UserError, pinned
from common.fence import Fence
from common.files import (
    MANIFEST,
    Damaged,
    checkpoints,
    read_json,
    replace_file,
    room,
    sync_folder,
    to_json,
    verify,
    write_file,
)
from common.image import Image

TENSORS = {"model": "model.safetensors", "optimizer": "optimizer.safetensors"}
NAMES = (*TENSORS.values(), "state.json")
FAILURES = 3                                     # saves that may fail in a row before the run stops with exit code 4
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


class Fenced(Exception):
    """This life was declared dead and its run goes on without it."""


class CheckpointStore:
    """Of the processes that see one run folder, one owns it and writes; the others only ever write a rescue."""

    def __init__(self, opts, world, fingerprint="", report=print):
        self.opts, self.world, self.fingerprint, self.report = opts, world, fingerprint, report
        self.run_dir, self.root = opts.run_dir, opts.run_dir / "checkpoints"
        self.staging = self.root / f".life-{world.life}"
        self.fence, self.images, self.thread = None, {}, None
        self.committed, self.error, self.failures = -1, None, 0
        self.saved_at, self.saved_step = time.monotonic(), 0

    # ---- at the start of a life: who owns, what is there, everybody the same -------------------------------------
    def restore(self, state):
        """The newest checkpoint that verifies on any node, in every rank's state; returns where it came from, or None."""
        self._claim()
        self.images = {part: Image(tensors) for part, tensors in state.tensors().items()}
        step, facts, skipped = self._newest()
        layout = sum(image.layout() for image in self.images.values()) % 2**62
        views = [v.tolist() for v in self.world.all_gather(torch.tensor([step, skipped, layout]))]
        if len({view[2] for view in views}) > 1:
            raise UserError("the ranks have different nets or optimizers: names, shapes or types differ\n"
                            "run the same code and options on every node")
        best = max(view[0] for view in views)
        if best < 0 and any(view[1] for view in views):
            raise UserError(f"{self.root}: {max(view[1] for view in views)} checkpoints found, none verifies "
                            f"(python -m common.checkpoint {self.run_dir} says why)\n"
                            "use --resume none to start afresh (they are kept aside), or another --run-dir", code=3)
        source = None
        if best >= 0:
            self._receive(state, facts, [view[0] for view in views].index(best))
            source = f"checkpoints/step-{best:08d}"
        elif self.opts.resume not in ("auto", "none"):
            source = self._start_from(state)
        elif self.opts.init_from:
            source = load_weights(state, self.opts.init_from)
        if not self.fence:
            self.images = {}
        self.committed = self.saved_step = state.step if best >= 0 else -1
        self.agree(state)
        return source

    def agree(self, state):
        """Every rank holds the same weights, or this life ends without saving: the next one starts from the disk."""
        if self.world.size > 1:
            mine = torch.tensor([fingerprint_of(state)])
            theirs = [int(t) for t in self.world.all_gather(mine)]
            if len(set(theirs)) > 1:
                state.torn = True
                odd = [rank for rank, value in enumerate(theirs) if theirs.count(value) <= len(theirs) // 2]
                raise RuntimeError(f"step {state.step}: the weights of rank {odd or 'any'} differ from the others; going back "
                                   "to the newest checkpoint")

    def _claim(self):
        """Rank 0 owns the folder; a node that cannot see rank 0's staging there has a folder of its own."""
        world = self.world
        with world.together("owner"):
            if world.rank == 0:
                self._own()
        with world.together("owners"):
            if world.local_rank == 0 and world.rank != 0 and not _appears(self.staging):
                self._own()

    def _own(self):
        try:
            for folder in (self.run_dir, self.root):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _trusted(folder)
            fence = Fence(self.run_dir, self.world.life)
            fence.claim()
        except OSError as error:
            raise UserError(f"--run-dir {self.run_dir}: {error.strerror} ({error.filename})\n"
                            "choose a folder that can be written to") from error
        self.fence = fence
        if self.opts.resume == "none" and fence.fresh_job:          # a restart of the same job goes on instead
            self._set_aside()
        self._check_identity()

    def _set_aside(self):
        """--resume none loses nothing: what was there moves to before-K/."""
        old = [n for n in ("options.json", "metrics.jsonl", "ledger.jsonl", "audit", "tb") if os.path.lexists(self.run_dir / n)]
        steps = [folder for _, folder in checkpoints(self.root)]
        if old or steps:
            k = next(k for k in range(1, 10**6) if not (self.run_dir / f"before-{k}").exists())
            aside = self.run_dir / f"before-{k}"
            (aside / "checkpoints").mkdir(mode=0o700, parents=True)
            for folder in steps:
                os.rename(folder, aside / "checkpoints" / folder.name)
            for name in old:
                os.rename(self.run_dir / name, aside / name)
            self.report(f"--resume none: what was in {self.run_dir} is now in {aside.name}/")

    def _check_identity(self):
        path = self.run_dir / "options.json"
        if not os.path.lexists(path):
            replace_file(path, to_json({"options": self.opts.to_json(), "identity": self.opts.identity(),
                                        "data": self.fingerprint, "torch": torch.__version__,
                                        "pinned": pinned.facts(self.opts, self.world)}))
            return
        try:
            old = read_json(path)
        except Damaged as reason:
            if not checkpoints(self.root):
                os.unlink(path)                                     # torn at birth: nothing was trained yet
                return self._check_identity()
            raise UserError(f"{path} cannot be read: {reason}\nrestore it, or use another --run-dir", code=3) from reason
        wrong = [f"--{name.replace('_', '-')} was {was!r}, now {now!r}" for name, was, now in self.opts.compare(old["identity"])]
        if old.get("data") != self.fingerprint:
            wrong.append(f"the data's fingerprint was {str(old.get('data'))[:12]}, now {self.fingerprint[:12]}")
        firm, soft = pinned.differences(old.get("pinned", {}), pinned.facts(self.opts, self.world))
        for text in soft:
            self.report(f"--virtual-ranks: the {text}: from here on the bits may be others")
        if wrong or firm:
            raise UserError(f"{self.run_dir} is another run: {'; '.join(wrong + firm)}\n"
                            "give the same options to go on with it, or another --run-dir")

    def _newest(self):
        """(step, facts, skipped) of what this node can read, its tensors left in the images; read by one rank per folder."""
        skipped = 0
        if self.fence:
            buffers = {TENSORS[part]: image.bytes for part, image in self.images.items()}
            for step, folder in checkpoints(self.root):
                try:
                    manifest = verify(step, folder, NAMES, buffers)
                    for part, image in self.images.items():
                        image.check_header(TENSORS[part])
                    if manifest["identity"] != _identity(self.opts, self.fingerprint):
                        raise Damaged("it was saved by a run with other options")
                    return step, _facts(folder), skipped
                except Damaged as reason:
                    skipped += 1
                    self.report(f"checkpoints/{folder.name}: {reason}; skipped, trying the one before")
        return -1, None, skipped

    def _receive(self, state, facts, source):
        """Over tensors, not pickles: the owner's bytes, whoever has a folder of his own or none."""
        text = to_json(facts) if facts else b""
        length = self.world.broadcast(torch.tensor([len(text)]), source)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if self.world.rank == source:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        facts = json.loads(bytes(self.world.broadcast(data, source).tolist()))
        for image in self.images.values():
            self.world.broadcast(image.buffer, source)
        state.load({part: image.views for part, image in self.images.items()}, facts)

    def _start_from(self, state):
        """--resume PATH: another run's checkpoint, or that run's newest; on every rank, each from its own path."""
        path = Path(self.opts.resume)
        choices = [(int(path.name[5:]), path)] if path.name.startswith("step-") else checkpoints(path / "checkpoints")
        buffers = {TENSORS[part]: image.bytes for part, image in self.images.items()}
        for step, folder in choices:
            try:
                verify(step, folder, NAMES, buffers)
                for part, image in self.images.items():
                    image.check_header(TENSORS[part])
                state.load({part: image.views for part, image in self.images.items()}, _facts(folder))
                return str(folder)
            except Damaged as reason:
                self.report(f"{folder}: {reason}; skipped")
        raise UserError(f"--resume {path}: {len(choices)} checkpoints there, none verifies", code=3)

    # ---- saving ---------------------------------------------------------------------------------------------------
    def due(self, state):
        """Only the owner asks its clock, and saving is no collective: nobody has to agree."""
        opts = self.opts
        return bool(self.fence) and state.step != self.saved_step and (
            (opts.save_every and state.step % opts.save_every == 0)
            or (opts.save_seconds and time.monotonic() - self.saved_at >= opts.save_seconds))

    def save(self, state):
        """Copy the state, leave the rest to the writer thread; waits for the save before. Quiet on ranks that do not own."""
        if not self.fence or state.step == self.saved_step:
            return
        self.wait()
        facts = self._snapshot(state)
        self.saved_at, self.saved_step = time.monotonic(), state.step
        self.thread = threading.Thread(target=self._write_noting, args=(facts,), name="writer")
        self.thread.start()

    def rescue(self, state):
        """The newest whole step on disk before this returns, by whichever process of this node comes first; no collective."""
        self.wait()
        lock = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)                        # dies with its holder
            with state.lock:
                if state.torn or state.step <= max([self.committed, *(step for step, _ in checkpoints(self.root))]):
                    return False
                self.images = self.images or {part: Image(tensors) for part, tensors in state.tensors().items()}
                facts = self._snapshot(state)
            self._write(facts)
            return True
        finally:
            os.close(lock)

    def wait(self):
        """Until the save under way is on the disk or has failed."""
        if self.thread and self.thread is not threading.current_thread():
            self.thread.join()
            self.thread = None

    def check(self):
        """Failed saves are said at the next step; training goes on, until too many have failed in a row."""
        if self.error:
            error, self.error = self.error, None
            if isinstance(error, Fenced):
                raise error
            self.report(f"save failed ({self.failures} in a row), training goes on: {error}")
            if self.failures >= FAILURES:
                raise UserError(f"{self.failures} saves in a row have failed, the last one: {error}\n"
                                f"the newest good checkpoint is step {self.committed}; make room, then start again", code=4)

    def close(self):
        self.wait()
        self.check()
        if self.fence:
            self.fence.release()
            self.fence = None

    def _snapshot(self, state):
        with state.lock:
            for part, tensors in state.tensors().items():
                self.images[part].copy(tensors)
            return state.facts()

    def _write_noting(self, facts):
        try:
            self._write(facts)
            self.failures = 0
        except OSError as error:
            self.failures += 1
            self.error = room(error, self.root, sum(len(image.bytes) for image in self.images.values()))
        except (Fenced, Damaged) as error:
            self.failures += 1
            self.error = error

    def _write(self, facts):
        """Commit images and facts, then let older ones go. A failed fsync is not retried on the same file: all is written anew."""
        final = self.root / f"step-{facts['step']:08d}"
        for attempt in (1, 2):
            aside = self.staging / f"{final.name}.{os.getpid()}.{attempt}"
            try:
                self._write_aside(aside, facts)
                os.rename(aside, final)
                sync_folder(self.root)
                break
            except OSError as error:
                shutil.rmtree(aside, ignore_errors=True)
                if not os.path.isdir(self.staging):
                    raise Fenced(f"life {self.world.life} no longer owns {self.run_dir}: another life has taken over") from error
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    break                                           # this very step is committed already, by another survivor
                if attempt == 2 or error.errno in FULL:
                    raise
        self.committed = facts["step"]
        self._let_go(facts)

    def _write_aside(self, aside, facts):
        os.mkdir(aside, 0o700)
        files, digest = {}, hashlib.sha256()
        for part, name in TENSORS.items():
            size, sha = write_file(aside / name, self.images[part].bytes)
            files[name] = {"bytes": size, "sha256": sha}
            digest.update(sha.encode())                             # the files hold names and tensors in a fixed order and nothing else
        size, sha = write_file(aside / "state.json", to_json(facts))
        files["state.json"] = {"bytes": size, "sha256": sha}
        manifest = {"format": 1, "step": facts["step"], "parent": self.committed, "life": self.world.life, "digest": digest.hexdigest(),
                    "files": files, "identity": _identity(self.opts, self.fingerprint), "torch": torch.__version__}
        manifest["seal"] = hashlib.sha256(to_json(manifest)).hexdigest()
        write_file(aside / MANIFEST, to_json(manifest))
        sync_folder(aside)

    def _let_go(self, facts):
        """Older ones go only after the new one was read back and verified; the newest `keep` and the best stay."""
        there = checkpoints(self.root)
        extra = [f for step, f in there[self.opts.keep:] if step not in (facts["step"], facts["best"]["step"])]
        if extra:
            verify(facts["step"], self.root / f"step-{facts['step']:08d}", NAMES)
        for folder in extra:
            gone = self.staging / f"{folder.name}.gone"
            with contextlib.suppress(OSError):
                os.rename(folder, gone)
                shutil.rmtree(gone)


def _identity(opts, fingerprint):
    return hashlib.sha256(to_json(opts.identity() | {"data": fingerprint})).hexdigest()


def _facts(folder):
    facts = read_json(folder / "state.json")
    if not all(type(facts.get(name)) is int and facts[name] >= 0 for name in ("step", "epoch", "position")):
        raise Damaged("state.json has no step, epoch and position")
    return facts


def _appears(folder, patience=3.0):
    """Whether a folder that another machine has just made is seen here: network file systems take a moment."""
    deadline = time.monotonic() + patience
    while not os.path.isdir(folder):
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)                               # makes NFS look again
        time.sleep(0.1)
    return True


def _trusted(folder):
    """A folder that others may write into can hold anything: ssh's rule for its keys."""
    info = os.stat(folder)
    if info.st_uid != os.getuid() or info.st_mode & stat.S_IWOTH:
        raise UserError(f"{folder} is not yours alone: owner {info.st_uid}, mode {stat.S_IMODE(info.st_mode):04o}\n"
                        f"chmod 700 it (as its owner), or use another --run-dir")


def fingerprint_of(state):
    """A cheap 62-bit sum over every bit of the weights: equal weights give equal sums, on every device."""
    total = 0
    for index, tensor in enumerate(state.tensors()["model"].values()):
        flat = tensor.detach().contiguous().view(-1)
        total += (index + 1) * int(flat.view(torch.uint8).long().sum() if flat.element_size() != 4 else
                                   flat.view(torch.int32).long().sum())
    return total % 2**62


def load_weights(state, path):
    """--init-from: a foreign .pt file, weights only; wrapped names are stripped. Explicit, because this one is a pickle."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"--init-from {path}: not a file of weights ({str(error).splitlines()[0][:120]})") from error
    for key in ("state_dict", "model", "model_state_dict"):
        loaded = loaded.get(key, loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(loaded, dict) or not all(torch.is_tensor(v) for v in loaded.values()):
        raise UserError(f"--init-from {path}: holds no dict of tensors\nsave it with torch.save(net.state_dict(), path)")
    weights = {name.replace("_orig_mod.", "").removeprefix("module."): tensor for name, tensor in loaded.items()}
    ours = state.net.state_dict()
    wrong = sorted(n for n in ours.keys() | weights.keys()
                   if n not in ours or n not in weights or ours[n].shape != weights[n].shape)
    if wrong:
        raise UserError(f"--init-from {path}: {len(wrong)} tensors do not fit this model, the first: {wrong[0]}\n"
                        "choose the --model these weights belong to")
    state.net.load_state_dict(weights)
    state.take_buffers()
    return str(path)


def main(arguments):
    """List and verify the checkpoints of a run; exit code 0 when the newest is whole, 3 when none is, 2 for no such run."""
    paths = [a for a in arguments if not a.startswith("-")]
    if len(paths) != 1 or set(arguments) - set(paths) - {"--digest"}:
        print("usage: python -m common.checkpoint RUN [--digest]", file=sys.stderr)
        return 2
    root = Path(paths[0]) / "checkpoints"
    if not root.is_dir():
        print(f"error: {paths[0]} is no run folder: it has no checkpoints/", file=sys.stderr)
        return 2
    whole = 0
    for step, folder in checkpoints(root):
        try:
            manifest = verify(step, folder, NAMES)
            whole += 1
            size = sum(file["bytes"] for file in manifest["files"].values())
            line = f"{folder.name}  whole  {size:,} bytes  {manifest['digest']}"
        except Damaged as reason:
            line = f"{folder.name}  damaged: {reason}"
        if "--digest" not in arguments:
            print(line)
        elif "  whole  " in line:
            print(line)
            return 0
    if not whole:
        print(f"error: no whole checkpoint in {root}", file=sys.stderr)
    return 0 if whole else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
