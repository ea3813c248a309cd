"""The memory tier: a survivor hands its state to the next life of its machine through memory, not the disk.

    /dev/shm/elastic-UID-NAME/      0700, one for each run; NAME follows from its folder and its token
        users                       names that folder; locked by every process of a life
        .life-L/                    where that life writes
        step-N/                     a checkpoint

It is a store like that on the disk: the same files, the same commit, the same fence (each life renames the
staging folders of earlier ones away). Only the hash is quicker. The disk decides when the machine dies: the
next life loads the newest state that verifies, here or on a disk, and saves there what it found here.
"""
import contextlib
import fcntl
import hashlib
import os
import re
import stat
import time
from pathlib import Path

from common.checkpoint.commit import Writer
from common.checkpoint.fence import move_away
from common.checkpoint.files import Damaged, read_small, sealed, unseal
from common.checkpoint.lock_file import record_of
from common.checkpoint.manifest import STEP, checkpoints
from common.errors import UserError
from common.world import send

SHARED = Path("/dev/shm")
MARGIN_BYTES = 1 << 24   # must stay free beside two checkpoints
USERS = "users"
TOLD = "told"            # file in a folder that must be kept: another run has warned of it
JOIN_SECONDS = 5.0       # another run's sweep may hold the folder
PAUSE_SECONDS = 600.0    # after its last save: until then a run may be between two lives


def open_memory(tier, size, world, fence, run_dir, marks, report):
    """The Memory of this machine; call on every rank. `size` is that of a checkpoint."""
    token = send(world, fence and fence.token.encode(), 0).decode()
    token = fence.token if fence else token  # a machine with a run folder of its own has a token of its own
    base = SHARED if tier == "auto" else Path(tier)
    memory = Memory(base, run_dir, token, marks)
    with world.all_or_none("memory"):
        why = "" if tier == "off" or world.local_rank else memory.begin(size, world, report)
        if why and tier != "auto":
            raise UserError(f"--memory-tier {base}: {why}\nname another folder, or use auto or off")
        if why and world.restart == 0:
            report(f"--memory-tier auto: {why}; survivors save to the disk")
    if (token := world.once_per_node("memory", lambda: token if memory.used else "")) and world.local_rank:
        memory = Memory(base, run_dir, token, marks)
        with contextlib.suppress(OSError):
            memory.join()
    return memory


class Memory:
    """The checkpoints of one run in this machine's memory: none, unless it has begun or joined.

    OSError: there is no room, or another life has begun.
    """

    def __init__(self, base, run_dir, token, marks):
        self.base, self.about = base, sealed({"run_dir": os.path.realpath(run_dir), "token": token})
        self.root = base / f"{_prefix()}{hashlib.sha256(self.about).hexdigest()[:16]}"
        self.staging, self.lock = self.root / f".life-{marks['life']}", None
        self.writer = Writer(self.root, self.staging, marks, "sums")

    @property
    def used(self):
        return self.lock is not None

    # ---- at the start of a life -------------------------------------------------------------------
    def begin(self, size, world, report):
        """Makes the folder ready; returns why it cannot be used, or ""."""
        try:
            self._sweep_others(report)
            old = checkpoints(self.root)
            if not old and (world.size == 1 or not world.restarts_left):
                return ""  # there is no survivor, or no agent that starts another life
            info, needed = os.statvfs(self.base), 2 * size + MARGIN_BYTES
            room = {str(self.base): info.f_bavail * info.f_frsize, "this machine's memory": free_memory()}
            where, free = min(room.items(), key=lambda item: item[1])
            if free < needed and not old:
                return f"{where} has {free:,} bytes free, two checkpoints need {needed:,}"
            self.join()
            for path in self.root.iterdir():  # what earlier lives left half done
                if not STEP.fullmatch(path.name) and path not in (self.root / USERS, self.staging):
                    move_away(path)
            self.staging.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            return f"{error.filename or self.root}: {error.strerror or error}"
        return ""

    def join(self):
        """Makes the folder and marks it as in use while this process lives."""
        end = time.monotonic() + JOIN_SECONDS
        while not self.used:
            with contextlib.suppress(FileExistsError):
                self.root.mkdir(mode=0o700)
            info = os.lstat(self.root)
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
                raise PermissionError(f"{self.root} is not a folder of this user alone")
            self.lock = locked(self.root / USERS, fcntl.LOCK_SH, os.O_CREAT)
            if not self.used and time.monotonic() > end:
                raise TimeoutError(f"{self.root} is being deleted")
        os.pwrite(self.lock, self.about, 0)

    def _sweep_others(self, report):
        """Deletes what other runs of this user have left, if they have ended."""
        for path in set(self.base.glob(f"{_prefix()}*")) - {self.root}:
            with contextlib.suppress(OSError):
                _sweep(path, report)

    # ---- later ------------------------------------------------------------------------------------
    def checkpoints(self):
        return checkpoints(self.root) if self.used else []

    def free(self, step):
        """Deletes checkpoints up to this step: the disk has it."""
        for found, folder in self.checkpoints():
            if found <= step:
                move_away(folder)

    def end(self, step):
        """Deletes the folder: the disk has this step, and no life follows. A peer's newer step stays."""
        if self.used and not any(newer > step for newer, _ in self.checkpoints()):
            move_away(self.root)

    def sign_off(self, rank):
        """Notes that this rank ends by itself: for the others, a rank without this note was killed."""
        with contextlib.suppress(OSError):
            self.used and (self.staging / f"left-{rank}").touch()

    def died(self, ranks):
        """Whether these ranks, which have ended, were killed: none of them has signed off."""
        left = [rank for rank in ranks if (self.staging / f"left-{rank}").exists()]
        return bool(self.used and ranks) and not left


def free_memory():
    """Bytes that this machine, or this container, may still use; cached files count as free."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    for folder, most, used in (("", "memory.max", "memory.current"),
                               ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or "max"
            place = Path("/sys/fs/cgroup", folder)
            told = (place / "memory.stat").read_text()
            cached = re.findall(r"^(?:in)?active_file (\d+)", told, re.MULTILINE)
            left = int((place / most).read_text()) - int((place / used).read_text())
            free = min(free, left + sum(map(int, cached)))
    return free


def _prefix():
    return f"elastic-{os.getuid()}-"


def _sweep(path, report):
    """Deletes the folder of a run that has ended, unless it alone holds the run's newest step."""
    lock = locked(path / USERS, fcntl.LOCK_EX)
    if lock is None:
        return  # it is in use
    try:
        about = {}
        with contextlib.suppress(Damaged):  # its process died as it wrote
            about = unseal(read_small(path / USERS), USERS)
        run_dir = Path(about.get("run_dir", ""))
        newest, saved = (max((step for step, _ in checkpoints(root)), default=-1)
                         for root in (path, run_dir / "checkpoints"))
        if newest <= saved or record_of(run_dir).get("token") != about.get("token"):
            move_away(path)
        elif time.time() - path.stat().st_mtime > PAUSE_SECONDS and not (path / TOLD).exists():
            report(f"{path} alone holds step {newest} of {run_dir}: start that run again, or delete it")
            (path / TOLD).touch()
    finally:
        os.close(lock)


def locked(path, kind, flags=0):
    """A descriptor that has the lock and the name, or None."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.lockf(fd, kind | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)
    return None
