"""Who may write into a run folder: one job at a time, and of that job only the newest life.

The owner holds a POSIX lock, which dies with the process (and, unlike flock, is not inherited by data workers), and moves a
counter in the locked file. What a life writes is staged in a folder of its own, `.life-<id>`, and renamed out of it; whoever
takes over removes the staging of everybody before. A stopped process that wakes up later finds its staging gone, so its
rename fails: there is no moment between check and act. No decision looks at a clock that others set.
"""
import contextlib
import fcntl
import json
import os
import shutil
import socket
import threading
import time

from common import UserError

BEAT = 0.5               # seconds between two moves of the counter
REFUSE_AFTER = 3         # moves seen before a second job is turned away
STALE_AFTER = 8.0        # seconds without a move: the owner is stopped, cut off or gone
SAME_JOB_WAIT = 60.0     # a life of our own job may still be saving


class Fence:
    """Claim once, on the one process that writes into this folder; `release` at the clean end."""

    def __init__(self, run_dir, life):
        self.path, self.root = run_dir / "lock", run_dir / "checkpoints"
        self.staging = self.root / f".life-{life}"
        self.life, self.fd, self.fresh_job = life, None, False
        self.stop, self.thread = threading.Event(), None

    def claim(self):
        """Ours from here on, or UserError naming the owner."""
        self.fd = self._lock()
        me = {"host": socket.gethostname(), "pid": os.getpid(), "job": job(), "life": self.life, "agent": _agent()}
        previous = _read(self.fd)
        self.fresh_job = previous.get("job") != me["job"]
        self._write(me, 0)
        self.thread = threading.Thread(target=self._beat, args=(me,), daemon=True, name="fence")
        self.thread.start()
        for entry in os.scandir(self.root):
            if entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
        os.mkdir(self.staging, 0o700)

    def release(self):
        if self.fd is not None:
            self.stop.set()
            self.thread.join()                                      # a thread that wakes in a dying interpreter aborts it
            with contextlib.suppress(OSError):
                os.rmdir(self.staging)
            os.close(self.fd)
            self.fd = None

    def lost(self):
        """Somebody else has taken over; an early answer, the staging folder is the one that cannot be wrong."""
        return not os.path.isdir(self.staging)

    def _lock(self):
        fd, waited, beat, moves, still = _open(self.path), time.monotonic(), None, 0, time.monotonic()
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_ino == os.stat(self.path).st_ino:
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
            if owner.get("beat") != beat:
                beat, moves, still = owner.get("beat"), moves + 1, now
            same_job = owner.get("job") == job()
            if _orphan(owner) or now - still > STALE_AFTER:
                os.close(fd)
                return self._take_over()
            if moves > REFUSE_AFTER and (not same_job or now - waited > SAME_JOB_WAIT):
                os.close(fd)
                raise UserError(f"{self.path.parent} is in use by another job: host {owner.get('host')}, pid {owner.get('pid')}, "
                                f"life {owner.get('life')}\nstop that job first, or give this one its own --run-dir")
            time.sleep(0.05)

    def _take_over(self):
        """The old owner keeps its lock on a file that no longer has a name."""
        aside = f"{self.path}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        fd = _open(aside)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(aside, self.path)
        return fd

    def _beat(self, me):
        count = 0
        while not self.stop.wait(BEAT):
            count += 1
            with contextlib.suppress(OSError):
                self._write(me, count)

    def _write(self, me, count):
        text = json.dumps(me | {"beat": count}).encode().ljust(512) + b"\n"
        os.pwrite(self.fd, text, 0)


def job():
    """What two lives of one job share: the agent's run id, or this process where there is no agent."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return run_id if run_id != "none" else f"{socket.gethostname()}/{_agent()}"


def _agent():
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    return f"{pid}/{_started(pid)}"


def _started(pid):
    """When a process began, in ticks since boot: a pid alone may be reused."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rsplit(b")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _orphan(owner):
    """The owner's agent is gone: what is left of that job was declared dead with it."""
    if owner.get("host") != socket.gethostname() or "/" not in str(owner.get("agent")):
        return False
    pid, started = owner["agent"].split("/")
    return str(_started(pid)) != started if os.path.isdir("/proc/self") else False


def _open(path):
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _read(fd):
    try:
        value = json.loads(os.pread(fd, 4096, 0))
        return value if isinstance(value, dict) else {}
    except ValueError:
        return {}
