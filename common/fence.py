"""Who may write into a run folder: one job at a time, and of that job only the newest life.

The owner holds a POSIX lock, which dies with the process (and, unlike flock, is not inherited by data workers), and moves a
counter in the locked file. What a life writes is staged in a folder of its own, `.life-<id>`, and renamed out of it; whoever
takes over moves the staging of everybody before out of the way. A stopped process that wakes up later finds its staging
gone, so its rename fails: there is no moment between check and act. No decision looks at a clock that others set.

Staging is made first and the lock looked at afterwards: whoever took it in between either saw that staging and moved it, or
is seen. So there is never a staging folder that counts and whose owner lost the run.
"""
import contextlib
import fcntl
import json
import os
import shutil
import threading
import time
import uuid

from common import UserError
from common.processes import about_me, fate_of

BEAT = 0.5               # seconds between two moves of the counter
REFUSE_AFTER = 3         # moves seen before a second job is turned away
STALE_AFTER = 8.0        # seconds without a move: the owner is stopped, cut off or gone
SAME_JOB_WAIT = 60.0     # a life of our own job may still be saving
ORPHAN_WAIT = 10.0       # and so may one whose agent has just died
RESCUE_WAIT = 10.0       # seconds without a byte written until a rescue under way is given up
RECORD = 1 << 18         # bytes of a lock file, at most: it names the agents of the job
RESCUE = "rescue.lock"   # in a staging folder: held while a survivor saves


class Fenced(UserError):
    """This life was declared dead and its run goes on without it."""


class Shared(Exception):
    """The lock is held by a rank of this very life: this is one folder, seen from two machines."""


class Fence:
    """Claim once, on the one process that writes into this folder; `release` at the clean end."""

    def __init__(self, run_dir, life, agents=()):
        self.path, self.root = run_dir / "lock", run_dir / "checkpoints"
        self.staging = self.root / f".life-{life}"
        self.life, self.fd, self.fresh_job = life, None, False
        self.me = about_me() | {"life": life, "agents": list(agents)}
        self.stop, self.thread = threading.Event(), None

    def claim(self):
        """Ours from here on, or UserError naming the owner."""
        self.fd = self._lock()
        previous = _read(self.fd)
        # One run id may be used for job after job; an agent that was there before tells a restart from a new start.
        self.fresh_job = previous.get("job") != self.me["job"] or not set(previous.get("agents", ())) & set(self.me["agents"])
        self._write(0)
        self.thread = threading.Thread(target=self._beat, daemon=True, name="fence")
        self.thread.start()
        self._sweep()
        os.mkdir(self.staging, 0o700)
        self._check()

    def renew(self):
        """Somebody has removed the staging. A successor: Fenced. A person cleaning up: it is made again."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.path.lexists(self.path):
            fd = _open(self.path)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise self._fenced() from None
            os.close(self.fd)
            self.fd = fd
            self._write(0)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.staging, 0o700)
        self._check()

    def release(self):
        if self.fd is not None:
            self.stop.set()
            self.thread.join()                                      # a thread that wakes in a dying interpreter aborts it
            if self._is_ours():
                with contextlib.suppress(OSError):                  # or the next life does it
                    _move_away(self.staging)
            os.close(self.fd)
            self.fd = None

    def _is_ours(self):
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.path))
        except OSError:
            return False

    def _check(self):
        if not self._is_ours():
            _move_away(self.staging)
            raise self._fenced()

    def _fenced(self):
        owner = {}
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            owner = _read(fd)
            os.close(fd)
        return Fenced(f"{self.path.parent} was taken over by another job while this one stood still: host {owner.get('host')}, "
                      f"pid {owner.get('pid')}\nthis job has stopped; what it had saved before is kept")

    def _sweep(self):
        """What earlier lives left half done. A rescue under way is waited for: those steps are what a survivor has left."""
        for name in os.listdir(self.root):
            if name.startswith("."):
                if name.startswith(".life-"):
                    _wait_for_rescue(self.root / name)
                _move_away(self.root / name)

    def _lock(self):
        fd, began, beat, moves, still, orphan = _open(self.path), time.monotonic(), None, 0, time.monotonic(), None
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    return fd
                os.close(fd)                                        # somebody put a new file in place: queue up there
                fd = _open(self.path)
                continue
            except (BlockingIOError, PermissionError):
                pass
            except FileNotFoundError:
                os.close(fd)
                fd = _open(self.path)
                continue
            owner, now = _read(fd), time.monotonic()
            if owner.get("life") == self.life:
                os.close(fd)
                raise Shared
            if owner.get("beat") != beat:
                beat, moves, still = owner.get("beat"), moves + 1, now
            fate = fate_of(owner)
            if fate == "orphan":
                orphan = orphan or now
            same_job = owner.get("job") == self.me["job"]
            if (fate == "lost" or (orphan and now - orphan > ORPHAN_WAIT)
                    or (now - still > STALE_AFTER and fate in ("stopped", "unknown"))):
                os.close(fd)
                return self._take_over()
            if (moves > REFUSE_AFTER or now - began > STALE_AFTER + 1) and fate != "orphan" and (
                    not same_job or now - began > SAME_JOB_WAIT) and not (fate == "stopped" and now - still <= STALE_AFTER):
                os.close(fd)
                raise UserError(f"{self.path.parent} is in use by another job: host {owner.get('host')}, pid {owner.get('pid')}, "
                                f"life {owner.get('life')}\nstop that job first, or give this one its own --run-dir")
            time.sleep(0.05)

    def _take_over(self):
        """The old owner keeps its lock on a file that no longer has a name. Of two who do this, the later one has the run."""
        aside = f"{self.path}.{uuid.uuid4().hex[:12]}"
        fd = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(self.path, "rb") as old:
            os.pwrite(fd, old.read(RECORD), 0)                      # whose it was decides whether --resume none is new
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(aside, self.path)
        return fd

    def _beat(self):
        count = 0
        while not self.stop.wait(BEAT):
            count += 1
            with contextlib.suppress(OSError):
                self._write(count)

    def _write(self, count):
        os.pwrite(self.fd, _record(self.me | {"beat": count}), 0)


@contextlib.contextmanager
def rescuing(staging):
    """Inside, this process alone of its node saves, and a successor waits for it; ends with the process at the latest."""
    fd = _open(staging / RESCUE)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        os.pwrite(fd, _record(about_me()), 0)
        yield
    finally:
        os.close(fd)


def _wait_for_rescue(staging):
    try:
        fd = os.open(staging / RESCUE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        size, still = -1, time.monotonic()
        while time.monotonic() - still < RESCUE_WAIT:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return                                              # done, or dead: its lock died with it
            except OSError:
                pass
            if fate_of(_read(fd)) in ("lost", "stopped"):
                return
            if (now := _size(staging)) != size:
                size, still = now, time.monotonic()
            time.sleep(0.05)
    finally:
        os.close(fd)


def _size(folder):
    total = 0
    for path, folders, names in os.walk(folder):
        total += len(folders) + len(names)
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def _move_away(path):
    """First out of everybody's reach in one step, then deleted: nobody can rename half a folder out of it."""
    gone = path.parent / f".gone-{uuid.uuid4().hex[:12]}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
        if os.path.isdir(gone) and not os.path.islink(gone):
            shutil.rmtree(gone, ignore_errors=True)
        else:
            os.unlink(gone)


def _open(path):
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _record(value):
    text = json.dumps(value).encode()
    return text.ljust(len(text) // 512 * 512 + 511) + b"\n"


def _read(fd):
    try:
        value = json.loads(os.pread(fd, RECORD, 0).partition(b"\n")[0])      # a longer one may have been there
        return value if isinstance(value, dict) else {}
    except (ValueError, RecursionError):
        return {}
