"""The memory tier: a survivor hands its state to the next life of its machine through memory, not the disk.

    /dev/shm/elastic-UID-NAME/      0700, one for each run; NAME follows from its folder and its token
        users                       names that folder; locked by every process of a life
        .life-L/                    what that life writes, and `spare`: pages that are used again
        step-N.K/                   a whole state, as an image: the files of a checkpoint, and a seal

The rules are those of the disk: written aside in a folder of this life, which the next life renames away
first, so that an older one can finish nothing; sealed last, then renamed; the newest that verifies wins. Only
the hash is another one: over a sum of each 4 KB, as fast as a copy. The disk decides when the machine dies:
the next life saves there what it loads from here, and then keeps the pages for the next death.
"""
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from common.checkpoint.files import Damaged, read_small, sealed, unseal
from common.checkpoint.lock_file import token_of
from common.checkpoint.manifest import TENSORS, as_read, check_facts, checkpoints, folder_name

SEAL, USERS, SPARE = "seal.json", "users", "spare"
STEP = re.compile(r"step-([0-9]{8,18})\.([0-9]{1,9})")
ROW_BYTES = 1 << 12      # one sum for each
PIECE_BYTES = 1 << 26    # a thread adds up so much at once
MOST_THREADS = 4
JOIN_SECONDS = 5.0       # another run's sweep may hold the folder


class Memory:
    """The images of one run on this machine. OSError: there is no room, or another life has begun."""

    def __init__(self, base, run_dir, token, life):
        self.base, self.about = base, sealed({"run_dir": os.path.realpath(run_dir), "token": token})
        self.folder = base / f"{_prefix()}{hashlib.sha256(self.about).hexdigest()[:16]}"
        self.staging, self.lock = self.folder / f".life-{life}", None

    # ---- at the start of a life -------------------------------------------------------------------
    def join(self):
        """Makes the folder and marks it as in use while this process lives."""
        end = time.monotonic() + JOIN_SECONDS
        while self.lock is None:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            info = os.lstat(self.folder)
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
                raise PermissionError(f"{self.folder} is not a folder of this user alone")
            self.lock = _locked(self.folder / USERS, fcntl.LOCK_SH, os.O_CREAT)
            if self.lock is None and time.monotonic() > end:
                raise TimeoutError(f"{self.folder} is being deleted")
        os.pwrite(self.lock, self.about, 0)

    def sweep(self):
        """Deletes what earlier lives left half done."""
        images = {folder for _, folder in images_in(self.folder)}
        for path in set(self.folder.iterdir()) - images - {self.folder / USERS, self.staging}:
            remove(path)
        self.staging.mkdir(mode=0o700, exist_ok=True)

    def sweep_others(self, report):
        """Deletes what runs of this user left that have ended."""
        for path in set(self.base.glob(f"{_prefix()}*")) - {self.folder}:
            with contextlib.suppress(OSError):
                _sweep(path, report)

    # ---- a death: write; the next life: read, free -------------------------------------------------
    def has(self, facts):
        """Whether another process of this life has left this state or a later one here."""
        for step, folder in images_in(self.folder):
            with contextlib.suppress(Damaged, OSError):
                return step > facts["step"] or _seal_of(step, folder)["facts"] == as_read(facts)
        return False

    def write(self, images, tensors, facts, check):
        """One copy of the tensors, and a sum; `check` may refuse the copied model."""
        aside = self._own_folder()
        try:
            sums = {}
            for part, image in images.items():
                _reserve(aside / TENSORS[part], image.size)
                twin = image.mapped(aside / TENSORS[part], keep=True)
                twin.copy(tensors[part])
                twin.wait()
                if part == "model":
                    check(twin, facts)
                sums[part] = sum_of(twin.buffer)
            seal = {"step": facts["step"], "facts": as_read(facts), "sums": sums}
            (aside / SEAL).write_bytes(sealed(seal))
            name = folder_name(facts["step"])
            taken = [int(path.suffix[1:]) for _, path in images_in(self.folder) if path.stem == name]
            os.rename(aside, self.folder / f"{name}.{max(taken, default=0) + 1}")
        except BaseException:
            remove(aside)
            raise

    def _own_folder(self):
        aside = self.staging / uuid.uuid4().hex[:12]
        try:
            os.rename(self.staging / SPARE, aside)
        except FileNotFoundError:
            aside.mkdir(mode=0o700)
        return aside

    def newest(self):
        """(step, a number for its content, its folder) of the newest image, or (-1, 0, None)."""
        for step, folder in images_in(self.folder):
            with contextlib.suppress(Damaged, OSError):
                content = hashlib.sha256(sealed(_seal_of(step, folder))).digest()
                return step, int.from_bytes(content[:7], "little"), folder
        return -1, 0, None

    def free(self, step):
        """The disk has this step: no image up to it is needed, but the pages of one may be used again."""
        for found, folder in images_in(self.folder):
            if found <= step:
                aside = self.staging / folder.name
                try:
                    os.rename(folder, aside)
                    os.unlink(aside / SEAL)
                    os.rename(aside, self.staging / SPARE)
                except OSError:  # there is one
                    remove(aside)

    def make_spare(self, images, go_on):
        """Makes the pages that a death will need, while `go_on()`: new ones may take seconds a GB."""
        aside, zeros = self.staging / uuid.uuid4().hex[:12], bytes(1 << 22)
        with contextlib.suppress(OSError):  # without a spare a death makes them
            if (self.staging / SPARE).exists():
                return
            aside.mkdir(mode=0o700)
            for part, image in images.items():
                with open(aside / TENSORS[part], "xb", buffering=0) as file:
                    for at in range(0, image.size, len(zeros)):
                        if not go_on():
                            return remove(aside)
                        file.write(zeros[:image.size - at])
            os.rename(aside, self.staging / SPARE)

    def sign_off(self, rank):
        """Notes that this rank ends by itself; the others take one without a note for killed."""
        with contextlib.suppress(OSError):
            (self.staging / f"left-{rank}").touch()

    def has_signed_off(self, rank):
        return (self.staging / f"left-{rank}").exists()


def read_image(step, folder, images):
    """(facts, {part: the image that is there}); Damaged if it is not what was written."""
    seal, found = _seal_of(step, folder), {}
    for part, image in images.items():
        found[part] = image.mapped(folder / TENSORS[part], keep=False)
        if sum_of(found[part].buffer) != seal["sums"].get(part):
            raise Damaged(f"{TENSORS[part]} does not have the sum of its seal")
        found[part].check_header(TENSORS[part])
    return seal["facts"], found


@torch.no_grad()
def sum_of(buffer):
    """A hash over the sums of each 4 KB: finds a changed bit, a torn write, pages that changed places."""
    whole = len(buffer) // ROW_BYTES * ROW_BYTES
    rows = buffer[:whole].view(torch.int64).view(-1, ROW_BYTES // 8).split(PIECE_BYTES // ROW_BYTES)
    digest = hashlib.sha256(bytes(buffer[whole:].tolist()))
    with ThreadPoolExecutor(MOST_THREADS) as pool:
        for sums in pool.map(lambda piece: piece.sum(1), rows):
            digest.update(sums.numpy())
    return digest.hexdigest()


def images_in(folder):
    """(step, folder) of each image, the newest first; not verified."""
    try:
        found = sorted([(int(m[1]), int(m[2]), m[0]) for m in map(STEP.fullmatch, os.listdir(folder)) if m])
    except FileNotFoundError:
        return []
    return [(step, folder / name) for step, _, name in reversed(found)]


def _prefix():
    return f"elastic-{os.getuid()}-"


def _sweep(path, report):
    """Deletes the folder of a run that has ended, unless it alone holds the run's newest step."""
    lock = _locked(path / USERS, fcntl.LOCK_EX)
    if lock is None:
        return  # it is in use
    try:
        about = {}
        with contextlib.suppress(Damaged):  # its process died as it wrote
            about = unseal(read_small(path / USERS), USERS)
        run_dir, (newest, _) = Path(about.get("run_dir", "")), (*images_in(path), (-1, None))[0]
        saved = max((step for step, _ in checkpoints(run_dir / "checkpoints")), default=-1)
        if newest > saved and token_of(run_dir) == about.get("token"):
            report(f"{path} alone holds step {newest} of {run_dir}: start that run again, or delete it")
        else:
            remove(path)
    finally:
        os.close(lock)


def remove(path):
    """Renames it in one step, then deletes it: nothing is ever half there."""
    gone = path.with_name(f"{path.name}.gone-{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(OSError):
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _locked(path, kind, flags=0):
    """A descriptor that has the lock and the name, or None."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.lockf(fd, kind | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)
    return None


def _reserve(path, size):
    """A file with all its pages: a write to a map without them would kill the process when memory is full."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _seal_of(step, folder):
    seal = unseal(read_small(folder / SEAL), SEAL)
    if seal.get("step") != step or not isinstance(seal.get("sums"), dict) \
            or not isinstance(seal.get("facts"), dict):
        raise Damaged(f"{SEAL} is not one of step {step}")
    check_facts(seal["facts"], step)
    return seal
