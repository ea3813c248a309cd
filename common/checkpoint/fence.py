"""Who may write into a run folder: one job at a time, and of that job only the newest life.

The process whose file has the name RUN/lock owns the run: ownership is the inode, nothing else. Each claim
makes another file and renames it over that name. Its counter only tells a new owner how long to wait
(extras/owner.py): one that moves is alive, and no file system's locks are asked. A life writes into a staging
folder of its own, `.life-<id>`, and renames out of it. A new owner first renames away the staging folders of
all earlier lives. A stopped process that wakes up later finds its staging gone, so its rename fails: nothing
can happen between check and act. So a take-over from a process that lives costs that process, never a
checkpoint. No decision depends on another machine's clock.

A claim takes the name, makes its staging, lists those of others, and looks at the name again before it
sweeps them. If two claim at once, the one that takes the name last owns the run. The other one sees that
when it looks again, and stops; or it looked before that, then its staging was there already, and is swept.
"""

import atexit
import json
import math
import os
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from common.checkpoint.disk import (
    NEW,
    NEW_FILE,
    Damaged,
    delete,
    make_folder,
    opened,
    parse_json,
    put,
    read_small,
)
from common.errors import UserError
from common.options import extra
from common.place import has_ended, this_process

BEAT_SECONDS = 0.5  # between two moves of a counter
NODE_BEAT_SECONDS = 10.0  # the same in a node's file: each is a synced write on a disk that many share
LOOK_SECONDS = 1.0  # a look that came later counts as one second: the file server was away
STALE_SECONDS = 8.0  # without a move, on this machine or in our own job: the owner is gone
HUNG_SECONDS = 600.0  # a rescue or a save that writes no byte for so long is given up
NODE_STILL_SECONDS = 12.0  # without a move: that node is gone
NODES_SECONDS = 30.0  # survivors may take to the end of their step, until they announce their rescue
RECORD_BYTES = 1024  # more than a lock's record needs
RESCUE = "rescue.lock"  # end of a file's name in a staging folder: a survivor is saving
WAITING = "waiting."  # begin of a file's name there: a survivor waits for that one
MOST_WAITING = 4  # with one state
NODE = "node."  # file in a staging folder: a rank of another node lives


class Fenced(UserError):
    """Another life has taken over the run of this one."""

    def __init__(self, message):
        super().__init__(message, code=6)


class IdleTimer:
    """For how many seconds a value has not changed."""

    def __init__(self):
        self.value = None
        self.seconds = 0.0
        self.looked = 0.0

    def __call__(self, value):
        now = time.monotonic()
        self.seconds += min(now - self.looked, LOOK_SECONDS)
        if value != self.value or not self.looked:
            self.value = value
            self.seconds = 0.0
        self.looked = now
        return self.seconds

    def hangs(self, value: object) -> bool:
        """Return whether what shows progress by this value is to be given up."""
        return self(value) >= HUNG_SECONDS


class Lock:
    """A new file with a counter that this process moves, so that others see that it lives.

    Ours until `close`, or until another process has put a file of its own under the name. If `progress()`
    stands still for HUNG_SECONDS, the counter stops: this process hangs.
    """

    def __init__(self, path, seconds=None, progress=time.monotonic):
        self.path = path
        self.progress = progress
        self.seconds = seconds or BEAT_SECONDS
        self.record = this_process() | {"beat": 0}
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True, name="fence")
        self.fd = os.open(path, NEW, 0o600)
        try:
            self.write()
        except BaseException:
            os.close(self.fd)
            delete(path)
            raise
        with suppress(RuntimeError):  # no thread can be started: then no beat
            self.thread.start()

    def rename(self, path):
        """Take a name, also from another process."""
        try:
            os.rename(self.path, path)
        except OSError:
            self.close()
            delete(self.path)
            raise
        self.path = path

    def write(self):
        """Write the record, synced: other machines do not see what is only in this machine's memory.

        Spaces fill it up: nobody reads it while its size changes.
        """
        text = json.dumps(self.record).ljust(RECORD_BYTES)
        os.pwrite(self.fd, text.encode(), 0)
        os.fdatasync(self.fd)

    def is_ours(self):
        """Return whether our file still has the name; opened anew, as NFS asks the server only then."""
        with suppress(OSError, Damaged), opened(self.path) as fd:
            return os.path.samestat(os.fstat(self.fd), os.fstat(fd))
        return False

    def close(self):
        """Write that this process has left: a new owner need not wait."""
        if self.stop.is_set():
            return
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join()  # one that wakes in a dying interpreter aborts it
        self.record["left"] = True
        with suppress(OSError):
            self.write()
        os.close(self.fd)

    def _beat(self):
        timer = IdleTimer()
        while not self.stop.wait(self.seconds):
            if not timer.hangs(self.progress()):
                self.record["beat"] += 1
                with suppress(OSError):
                    self.write()


class Fence:
    """`elect` on a process of each node; `claim` and, at the clean end, `release` on those that it names."""

    def __init__(self, run_dir: Path, life: str):
        self.path = run_dir / "lock"
        self.root = run_dir / "checkpoints"
        self.life = life
        self.staging = self.root / f".life-{life}"
        self.lock: Lock | None = None  # says that this process lives

    def elect(self, rank: int) -> bool:
        """Return whether this rank is to own the folder: rank 0, or the first one that sees another folder.

        Any other rank holds a file in the owner's staging folder, so the next life waits for its end, too.
        """
        make_folder(self.root)
        if not rank:
            return True
        try:
            os.mkdir(self.staging, 0o700)  # the file server decides
        except FileExistsError:
            self.lock = Lock(self.staging / f"{NODE}{rank}", NODE_BEAT_SECONDS)
            atexit.register(self.lock.close)
            return False
        return True

    def claim(self) -> None:
        """Take the run, or raise a UserError with the owner's name."""
        looks = watched(self.path)
        if any(looks):
            extra("owner")(self.path, looks, STALE_SECONDS)
        # one that has left may still log a step
        may_log = not has_ended(read_record(self.path) or {}, "process")
        self.lock = Lock(self.path.with_name(f".lock-{uuid.uuid4().hex[:12]}"))
        self.lock.rename(self.path)
        with suppress(FileExistsError):
            os.mkdir(self.staging, 0o700)
        names = os.listdir(self.root)
        if not self.lock.is_ours():
            raise Fenced(
                f"{self.path.parent}: another job has begun in it at the same time\n"
                "this one has stopped; it had saved nothing yet"
            )
        self._sweep([name for name in names if name.startswith(".life-") and name != self.staging.name])
        for left in self.path.parent.glob(f"{NEW_FILE}*"):
            delete(left)
        make_anew(self.path.with_name("metrics.jsonl"), may_log)
        for ledger in self.path.parent.glob("ledger*.jsonl"):
            make_anew(ledger)

    def release(self) -> None:
        with suppress(OSError):  # or the next life does it
            move_away(self.staging)
        self.leave()

    def leave(self) -> None:
        """Tell the next life that it need not wait for this process."""
        if self.lock:
            self.lock.close()

    def _sweep(self, names):
        """Delete what earlier lives left half done; first wait for survivors: they save the last steps."""
        deadline = time.monotonic() + NODES_SECONDS
        for name in names:
            with suppress(FileNotFoundError):
                for node in (self.root / name).glob(f"{NODE}*"):
                    wait_for(node, NODE_STILL_SECONDS, deadline)
                for lock in (self.root / name).glob(f"*{RESCUE}"):
                    wait_for(lock)
                    if any(lock.parent.glob(f"{WAITING}*")) and "left" not in (read_record(lock) or {}):
                        time.sleep(LOOK_SECONDS)  # one that has waited saves in its place
                        wait_for(lock)
            move_away(self.root / name)


@contextmanager
def rescuing(path, progress, needless, lock_state):
    """Let only this process of its node save inside; a new owner waits while it lives and `progress()` grows.

    Takes no file if `needless()`: there is nothing to save, or not any more. False if others of the same
    state, which `lock_state()` names, wait already: the run folder is spared, four deaths in one save are
    none.
    """
    lock = None
    waits = False
    while lock is None and not needless():
        try:
            lock = Lock(path, progress=progress)
        except FileExistsError:  # another one saves; if it is gone, its file goes
            waits = waits or may_wait(path, lock_state())
            if not waits:
                break
            wait_for(path, needless=needless)
            if not needless():
                delete(path)
    try:
        yield lock is not None or waits or needless()
    finally:
        if lock:
            lock.close()


def may_wait(path, state):
    """Return whether this rank is one of the first that wait with this state."""
    for k in range(MOST_WAITING):
        with suppress(FileExistsError):
            os.close(os.open(path.with_name(f"{WAITING}{state}.{k}"), NEW, 0o600))
            return True
    return False


def wait_for(path, seconds=None, deadline=math.inf, needless=lambda: False):
    """Wait until a lock's process has left, has ended or stands still, or there is no need."""
    for _, timer in watched(path):
        if needless() or time.monotonic() > deadline or timer.seconds > (seconds or STALE_SECONDS):
            return


def watched(path):
    """Yield (what it wrote, IdleTimer of its counter), while its process lives."""
    timer = IdleTimer()
    pause = 0.02
    while True:
        record = read_record(path)
        if record is None or record.get("left") or has_ended(record, "process"):
            return
        timer(record.get("beat"))
        yield record, timer
        time.sleep(pause)
        pause = min(1.2 * pause, 0.5)  # a thousand ranks may wait for one file


def read_record(path):
    """Read a lock, opened anew: NFS asks the server. {} if nobody knows whose it is, None without a file."""
    try:
        record = parse_json(read_small(path), path.name)
    except FileNotFoundError:
        return None
    except Damaged:
        return {}
    return record if {"process", "agent"} <= record.keys() else {}


def make_anew(path, may_log=False):
    """Put the same bytes in another file, if an earlier life may still append to it, or a copy shares it."""
    with suppress(OSError):  # there is none
        if may_log or os.stat(path).st_nlink > 1:  # `cp -al`
            with opened(path) as fd, open(fd, "rb", closefd=False) as file:  # no link
                put(path, file.read())


def move_away(path):
    """Rename it in one step, then delete it: no process can rename half a folder out of it."""
    gone = path.with_name(f".life-.gone-{uuid.uuid4().hex[:12]}")  # what stays, the next start tries again
    with suppress(FileNotFoundError):
        os.rename(path, gone)
        delete(gone)
