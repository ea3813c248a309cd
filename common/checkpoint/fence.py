"""Who may write into a run folder: one job at a time, and of that job only the newest life.

The process whose file has the name RUN/lock owns the run: ownership is the inode, nothing else. Each claim
makes another file and renames it over that name. Its lock and its counter only tell a new owner how long to
wait. A life writes into a staging folder of its own, `.life-<id>`, and renames out of it. A new owner first
renames away the staging folders of all earlier lives. A stopped process that wakes up later finds its staging
gone, so its rename fails: nothing can happen between check and act. So a staging folder is never usable after
its owner has lost the run, and a take-over from a process that lives costs that process, never a checkpoint.
No decision depends on another machine's clock.

A claim makes its staging before it looks for that of others, and looks at the name last. So of two that claim
at once, the later one sweeps the earlier one, or the earlier one sees the later one.
"""
import atexit
import contextlib
import errno
import fcntl
import json
import math
import os
import threading
import time
import uuid

from common.checkpoint.disk import delete
from common.errors import UserError
from common.place import has_ended, this_process

BEAT_SECONDS = 0.5         # between two moves of a counter
NODE_BEAT_SECONDS = 10.0   # the same in a node's file: each is a synced write on a disk that many share
LOOK_SECONDS = 1.0         # a look that came later counts as one second: the file server was away
STALE_SECONDS = 8.0        # without a move: the owner is stopped, or another life of our own job
LEASE_SECONDS = 90.0       # the same, of another job on another machine: networks show moves late
MOVING_SECONDS = 6.0       # another job's counter has moved for so long: its run is refused
SAME_JOB_SECONDS = 60.0    # an earlier life of our own job may still save; then the newest takes the run
RESCUE_SECONDS = 10.0      # without a move: a rescue under way is given up
HUNG_SECONDS = 600.0       # a rescue or a save is given up, too, if it writes no byte for so long
NODE_STILL_SECONDS = 12.0  # without a move: that node is gone
NODES_SECONDS = 30.0       # survivors may take to the end of their step, until they announce their rescue
RESCUE = "rescue.lock"     # end of a file's name in a staging folder: held while a survivor saves
NODE = "node."             # file in a staging folder: held by a rank of each other node while it lives
RECORD_BYTES = 1 << 16     # at most, of a file
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Fenced(UserError):
    """Another life has taken over the run of this one."""

    def __init__(self, message):
        super().__init__(message, code=6)


class Held:
    """A file that this process keeps locked, with a counter that it moves: so others see that it lives.

    Ours until `close`, or until another process has put a file of its own under the name. The POSIX lock dies
    with its process and, unlike flock, is not inherited by data workers. But a network file system may lose
    it or never share it. So the lock alone decides nothing.
    """

    def __init__(self, path, aside=None, moved=None, seconds=None):
        """Made as `aside` and renamed over any file with the name; without `aside` the name must be free.

        `moved()`, if given, grows while this process makes progress; others read it in the file.
        """
        self.path, self.moved = path, moved
        self.seconds = seconds or BEAT_SECONDS
        self.record = this_process()
        self.looks = []
        self.stop, self.guard = threading.Event(), threading.Lock()
        self.count = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(aside or path, flags, 0o600)
        try:
            if not _lock(self.fd, path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            self.write()
            if aside:
                os.rename(aside, path)
        except BaseException:
            os.close(self.fd)
            with contextlib.suppress(OSError):
                os.unlink(aside or "")
            raise
        self.thread = threading.Thread(target=self._beat, daemon=True, name="fence")
        try:
            self.thread.start()
        except RuntimeError:  # no thread can be started: then no beat
            self.thread = None

    def write(self, **news):
        """Synced, because other machines do not see what is only in this machine's memory."""
        with self.guard:
            self.record |= news | {"beat": self.count}
            if self.moved:
                self.record["moved"] = self.moved()
            text = json.dumps(self.record).encode()
            os.pwrite(self.fd, text.ljust(len(text) // 512 * 512 + 511) + b"\n", 0)
            os.fdatasync(self.fd)

    def is_ours(self):
        """Whether our file still has the name; opened anew, as NFS compares with the server only then."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        ours = os.path.samestat(os.fstat(self.fd), os.fstat(fd))
        if ours:
            self.looks.append(fd)  # closing it would drop our lock on the file
        else:
            os.close(fd)
        return ours

    def close(self):
        """Writes that this process has left: a new owner need not wait."""
        self.stop.set()
        if self.thread:
            self.thread.join()  # one that wakes in a dying interpreter aborts it
        with contextlib.suppress(OSError):
            self.write(left=True)
        for fd in (*self.looks, self.fd):
            os.close(fd)

    def _beat(self):
        while not self.stop.wait(self.seconds):
            self.count += 1
            with contextlib.suppress(OSError):
                self.write()


class Still:
    """Tells for how many seconds a value has not changed, and whether it ever has."""

    def __init__(self):
        self.value, self.moves = None, False
        self.seconds, self.looked = 0.0, 0.0

    def __call__(self, value):
        now = time.monotonic()
        self.seconds += min(now - self.looked, LOOK_SECONDS)
        if value != self.value or not self.looked:
            self.moves = bool(self.looked)
            self.value, self.seconds = value, 0.0
        self.looked = now
        return self.seconds


class Fence:
    """Claim once, on the one process that writes into this folder; `release` at the clean end."""

    def __init__(self, run_dir, life):
        self.path, self.root = run_dir / "lock", run_dir / "checkpoints"
        self.staging = self.root / f".life-{life}"
        self.held = None

    def elect(self):
        """Makes the staging folder; True for the first process of its life (the file server decides)."""
        try:
            os.mkdir(self.staging, 0o700)
        except FileExistsError:
            return False
        return True

    def attend(self, rank):
        """For the first rank of a node that shares the owner's folder: the next life waits for its end."""
        atexit.register(Held(self.staging / f"{NODE}{rank}", seconds=NODE_BEAT_SECONDS).close)

    def claim(self, report=print):
        """Takes the run, or raises UserError with the owner's name."""
        fd = self._wait(report)
        try:
            self.held = Held(self.path, self.root / f"{self.staging.name}.lock")
        except FileNotFoundError:  # another claim has swept it
            raise self._fenced() from None
        finally:
            if fd is not None:
                os.close(fd)
        self.elect()
        self._sweep()
        self.elect()  # another claim may have swept it
        self._check()

    def renew(self):
        """For a staging folder that is gone: Fenced if a new owner moved it, else makes it again."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # a file has the name; _check tells whether it is ours
            held = Held(self.path)
            self.held.close()
            self.held = held
        self.elect()
        self._check()

    def release(self):
        with contextlib.suppress(OSError):  # or the next life does it
            move_away(self.staging)
        if self.held:
            self.held.close()
            self.held = None

    def _check(self):
        if not self.held.is_ours():
            move_away(self.staging)
            raise self._fenced()

    def _fenced(self):
        owner = {}
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            owner = read_record(fd)
            os.close(fd)
        return Fenced(f"{self.path.parent} was taken over by another job while this one stood still: "
                      f"host {owner.get('host')}, pid {owner.get('pid')}\n"
                      "this job has stopped; what it had saved before is kept")

    def _wait(self, report):
        """The lock of a file without an owner, or None where the owner is given up. UserError: it lives.

        An owner that has left or ended is not waited for, one that does not move only for a while. One that
        moves is waited for if it is an earlier life of our own job, or if its agent has died: it may save.
        """
        began, counter, reported = time.monotonic(), Still(), False
        us = this_process()
        while True:
            fd, owner = look(self.path, os.O_CREAT)
            earlier = owner.get("job") == us["job"] or has_ended(owner, "agent")
            ended = owner.get("left") or has_ended(owner, "process")
            ours = earlier or not owner.get("job") or owner.get("process") == us["process"]
            if ended or fd is not None and ours:
                return fd
            near = earlier or fd is not None or owner.get("machine") == us["machine"]
            if fd is not None:
                os.close(fd)
            still, waited = counter(owner.get("beat")), time.monotonic() - began
            if still >= (STALE_SECONDS if near else LEASE_SECONDS) or earlier and waited > SAME_JOB_SECONDS:
                return None
            who = f"host {owner.get('host')}, pid {owner.get('pid')}"
            if not earlier and counter.moves and waited > MOVING_SECONDS:
                raise UserError(f"{self.path.parent} is in use by another job: {who}\n"
                                "stop that job first, or give this one its own --run-dir", code=6)
            if not reported and waited > MOVING_SECONDS / 2:
                report(f"{self.path.parent}: waiting for {who}, which has the folder")
                reported = True
            time.sleep(0.05)

    def _sweep(self):
        """Deletes what earlier lives left half done; first waits for survivors: they save the last steps."""
        deadline = time.monotonic() + NODES_SECONDS
        for name in os.listdir(self.root):
            if name.startswith(".life-") and name != self.staging.name:
                with contextlib.suppress(OSError):
                    for node in (self.root / name).glob(f"{NODE}*"):
                        wait_for(node, still=NODE_STILL_SECONDS, deadline=deadline)
                    for lock in (self.root / name).glob(f"*{RESCUE}"):
                        wait_for(lock)
                move_away(self.root / name)


@contextlib.contextmanager
def rescuing(path, moved, needless):
    """Inside, only this process of its node saves. A new owner waits while it lives and `moved()` grows.

    It takes no lock if `needless()`: there is nothing to save, or not any more. Each part of a net has a lock
    of its own at `path`.
    """
    fd = wait_for(path, os.O_CREAT, needless)
    if fd is None and needless():
        yield
        return
    try:
        held = Held(path, path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}"), moved)
    finally:
        if fd is not None:
            os.close(fd)
    try:
        yield
    finally:
        held.close()


def wait_for(path, flags=0, needless=lambda: False, still=None, deadline=math.inf):
    """The lock, if `flags` ask for it; None if there is no need, or its holder is given up."""
    beat, moved = Still(), Still()
    pause = 0.02
    while not needless():
        fd, owner = look(path, flags)
        if fd is not None and not flags:
            os.close(fd)
        hung = "moved" in owner and moved(owner["moved"]) > HUNG_SECONDS
        gone = beat(owner.get("beat")) > (still or RESCUE_SECONDS)
        if fd is not None or hung or gone or time.monotonic() > deadline:
            return fd
        pause = min(1.2 * pause, 0.5)  # a thousand ranks may wait for one lock
        time.sleep(pause)
    return None


def look(path, flags=0):
    """(a descriptor with the lock if it is free, the record); opened anew, so that NFS asks the server."""
    fd, keep = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600), False
    try:
        owner = read_record(fd)
        if _lock(fd, path):
            with contextlib.suppress(FileNotFoundError):  # else a new file was put in place: look again
                keep = os.path.samestat(os.fstat(fd), os.stat(path))
        return (fd, owner) if keep else (None, owner)
    finally:
        if not keep:
            os.close(fd)


def read_record(fd):
    """What the holder wrote; {} if the file holds no record."""
    try:
        value = json.loads(os.pread(fd, RECORD_BYTES, 0).partition(b"\n")[0])  # then an older, longer one
        return value if isinstance(value, dict) else {}
    except (ValueError, RecursionError):
        return {}


def _lock(fd, path):
    """Takes the lock; False if another process has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise UserError(f"{path}: this file system has no locks ({error.strerror})\nmount it with them "
                        "(Lustre: -o flock, NFS: with its lock service), or use another --run-dir") from error


def exists(staging):
    """Whether the folder exists. isdir may see this machine's old copy; mkdir asks the file server."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.mkdir(staging, 0o700)
        os.rmdir(staging)
        return False
    return os.path.isdir(staging)


def move_away(path):
    """Renames it in one step, then deletes it: no process can rename half a folder out of it."""
    gone = path.with_name(f"{path.name}.gone-{uuid.uuid4().hex[:12]}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
        delete(gone)
