"""A file that a process keeps locked and in which it moves a counter, so that others see that it lives.

The POSIX lock dies with its process and, unlike flock, is not inherited by data workers. But a network file
system may lose it or never share it. So the lock alone decides nothing: the process whose file has the name
is the owner, and a new owner puts its own file there.
"""
import contextlib
import errno
import fcntl
import json
import os
import threading
import time

from common.errors import UserError
from common.options import holder_status

BEAT_SECONDS = 0.5       # between two moves of the counter
LOOK_SECONDS = 1.0       # at most between two looks, if the file server answers
RECORD_BYTES = 1 << 18   # most bytes of a file: it names the agents of the job
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Held:
    """Ours until `close`, or until another process has put a file of its own under the name."""

    def __init__(self, path, record, aside=None, moved=None):
        """Made as `aside` and renamed over any file with the name; without `aside` the name must be free.

        `moved()`, if given, grows while this process makes progress; others read it in the file.
        """
        self.path, self.record, self.moved, self.looks = path, record, moved, []
        self.stop, self.guard, self.count, self.thread = threading.Event(), threading.Lock(), 0, None
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
        with contextlib.suppress(RuntimeError):  # no thread can be started: then no beat
            thread = threading.Thread(target=self._beat, daemon=True, name="fence")
            thread.start()
            self.thread = thread

    def write(self, **news):
        """Synced, because other machines do not see what is only in this machine's memory."""
        with self.guard:
            self.record |= news
            moved = {"moved": self.moved()} if self.moved else {}
            os.pwrite(self.fd, _line(self.record | moved | {"beat": self.count}), 0)
            os.fdatasync(self.fd)

    def is_ours(self):
        """Whether our file still has the name; opened anew, as NFS compares with the server only then."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        if ours := os.path.samestat(os.fstat(self.fd), os.fstat(fd)):
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
        while not self.stop.wait(BEAT_SECONDS):
            self.count += 1
            with contextlib.suppress(OSError):
                self.write()


class Still:
    """Tells for how many seconds a value has not changed, and counts its changes.

    A look that came late counts as one second: while the file server was away, no value could move.
    """

    def __init__(self):
        self.value, self.seconds, self.changes, self.looked = None, 0.0, -1, 0.0

    def __call__(self, value):
        now = time.monotonic()
        self.seconds, self.looked = self.seconds + min(now - self.looked, LOOK_SECONDS), now
        if self.changes < 0 or value != self.value:
            self.value, self.seconds, self.changes = value, 0.0, self.changes + 1
        return self.seconds


def look(path, flags=0):
    """(a descriptor with the lock if it is free, the record); opened anew, so that NFS asks the server."""
    fd, keep = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600), False
    try:
        owner = read(fd)
        if _lock(fd, path):
            with contextlib.suppress(FileNotFoundError):  # else a new file was put in place: look again
                keep = os.path.samestat(os.fstat(fd), os.stat(path))
        return (fd, owner) if keep else (None, owner)
    finally:
        if not keep:
            os.close(fd)


def is_mine(owner):
    """Whether the record is of this very process, which has not left."""
    alive = owner.get("pid") == os.getpid() and holder_status(owner) in ("alive", "orphan")
    return alive and not owner.get("left")


def read(fd):
    """The record; {} if the file holds none."""
    try:
        value = json.loads(os.pread(fd, RECORD_BYTES, 0).partition(b"\n")[0])  # then an older, longer one
        return value if isinstance(value, dict) else {}
    except (ValueError, RecursionError):
        return {}


def record_of(run_dir):
    """The record of a run's owner, {} if there is none. Not for a run that is ours: its lock would go."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        fd = os.open(run_dir / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return read(fd)
        finally:
            os.close(fd)
    return {}


def _line(value):
    text = json.dumps(value).encode()
    return text.ljust(len(text) // 512 * 512 + 511) + b"\n"


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
