"""Who may write into a run folder: one job at a time, and of that job only the newest life.

The process whose file has the name RUN/lock owns the run: ownership is the inode, nothing else. Each claim
makes another file and renames it over that name. Its lock and its counter only tell a new owner how long to
wait (lock_file.py). A life writes into a staging folder of its own, `.life-<id>`, and renames out of it. A
new owner first renames away the staging folders of all earlier lives. A stopped process that wakes up later
finds its staging gone, so its rename fails: nothing can happen between check and act. So a staging folder is
never usable after its owner has lost the run. No decision depends on another machine's clock.

A claim makes its staging before it looks for that of others, and looks at the name last. So of two that claim
at once, the later one sweeps the earlier one, or the earlier one sees the later one.
"""
import atexit
import contextlib
import math
import os
import re
import time
import uuid

from common.checkpoint.files import delete
from common.checkpoint.lock_file import Held, Still, is_mine, look, record_of
from common.errors import UserError
from common.options import holder_status, queued_again, this_process

# The owner moves a counter twice a second; seconds without such a move, or in all.
FREE_LOCK_SECONDS = 2.0    # the lock of another machine's process must look free for so long
STALE_SECONDS = 8.0        # without a move: the owner is stopped, or an earlier life of our own job
LEASE_SECONDS = 90.0       # the same, of another job on another machine: networks show moves late
SAME_JOB_SECONDS = 60.0    # an earlier life of our own job may still save; then the newest takes the run
ORPHAN_SECONDS = 10.0      # and so may one whose agent has just died
RESCUE_SECONDS = 10.0      # without a move: a rescue under way is given up
HUNG_SECONDS = 600.0       # a rescue or a save is given up, too, if it writes no byte for so long
RESCUE = "rescue.lock"     # end of a file's name in a staging folder: held while a survivor saves
NODE = "node."             # file in a staging folder: held by a rank of each other node while it lives
NODE_STILL_SECONDS = 3.0   # without a move: that node is gone
NODE_SECONDS = 30.0        # a survivor may take to the end of its step, until it announces its rescue


class Fenced(UserError):
    """Another life has taken over the run of this one."""

    def __init__(self, message):
        super().__init__(message, code=6)


class Fence:
    """Claim once, on the one process that writes into this folder; `release` at the clean end."""

    def __init__(self, run_dir, life, agents=()):
        self.path, self.root = run_dir / "lock", run_dir / "checkpoints"
        self.staging = self.root / f".life-{life}"
        self.held, self.fresh_job, self.token = None, False, uuid.uuid4().hex
        self.me = this_process() | {"life": life, "agents": list(agents)}

    def elect(self):
        """Makes the staging folder; True for the first process of its life (the file server decides)."""
        try:
            os.mkdir(self.staging, 0o700)
        except FileExistsError:
            return False
        return True

    def attend(self, rank):
        """For the first rank of a node that shares the owner's folder: the next life waits for its end."""
        atexit.register(Held(self.staging / f"{NODE}{rank}", this_process()).close)

    def claim(self, report=print):
        """Takes the run, or raises UserError with the owner's name."""
        fd, owner = self._wait(report)
        begun = owner["begun"] if isinstance(owner.get("begun"), dict) else owner  # older versions have none
        self.fresh_job = not self._is_of_our_job(begun)
        if isinstance(owner.get("token"), str):  # older versions have none
            self.token = owner["token"]
        begun = {name: begun.get(name) for name in ("job", "agents")}
        record = self.me | {"begun": begun, "token": self.token}
        try:
            self.held = Held(self.path, record, self.root / f"{self.staging.name}.lock")
        except FileNotFoundError:  # another claim has swept it
            raise self._fenced() from None
        finally:
            if fd is not None:
                os.close(fd)
        self.elect()
        self._sweep()
        self.elect()  # another claim may have swept it
        self._check()

    def begin(self, afresh=False):
        """Notes that --resume none is done: a restart of this job resumes from its own checkpoints.

        `afresh`: what is in memory belongs to another run from now on.
        """
        self.token = uuid.uuid4().hex if afresh else self.token
        self.held.write(begun={name: self.me[name] for name in ("job", "agents")}, token=self.token)

    def renew(self):
        """For a staging folder that is gone: Fenced if a new owner moved it, else makes it again."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # a file has the name; _check tells whether it is ours
            held = Held(self.path, self.held.record)
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
            owner = record_of(self.path.parent)
        return Fenced(f"{self.path.parent} was taken over by another job while this one stood still: "
                      f"host {owner.get('host')}, pid {owner.get('pid')}\n"
                      "this job has stopped; what it had saved before is kept")

    def _is_of_our_job(self, record):
        """One run id may serve job after job: a known agent tells a restart from a new start."""
        agents = record.get("agents") if isinstance(record.get("agents"), list) else []
        again = queued_again() or any(agent in self.me["agents"] for agent in agents)
        return again and record.get("job") == self.me["job"]

    def _sweep(self):
        """Deletes what earlier lives left half done; first waits for survivors: they save the last steps."""
        for name in os.listdir(self.root):
            if name.startswith((".life-", ".gone-")) and name != self.staging.name:
                with contextlib.suppress(OSError):
                    for node in (self.root / name).glob(f"{NODE}*"):
                        _wait_for_rescue(node, still=NODE_STILL_SECONDS, most=NODE_SECONDS)
                    for lock in (self.root / name).glob(f"*{RESCUE}"):
                        _wait_for_rescue(lock)
                move_away(self.root / name)
        for name in os.listdir(self.path.parent):
            if re.fullmatch(r"lock\.[0-9a-f]{12}|.+\.\d+\.new", name):  # the process that wrote it has died
                with contextlib.suppress(OSError):
                    os.unlink(self.path.parent / name)

    def _wait(self, report):
        """(the lock of a file that has no owner, or None; its record). UserError: its owner lives.

        Waits for an owner of our own job; refuses the run if the owner of another job moves. One that does
        not move is waited for: the less is known of it, the longer.
        """
        began, beats, fates, said = time.monotonic(), Still(), Still(), False
        while True:
            fd, owner = look(self.path, os.O_CREAT)
            fate, ours = holder_status(owner), self._is_of_our_job(owner)
            waited, still, orphan = time.monotonic() - began, beats(owner.get("beat")), fates(fate)
            if fd is not None:
                signed_off = not owner.get("machine") or owner.get("left") or is_mine(owner)
                if signed_off or ours or fate == "gone" or fate == "unknown" and still >= FREE_LOCK_SECONDS:
                    return fd, owner
                os.close(fd)  # it lives, and has lost its lock
            patience = {"lost": 0, "orphan": ORPHAN_SECONDS, "alive": math.inf, "stopped": STALE_SECONDS,
                        "gone": STALE_SECONDS, "unknown": STALE_SECONDS if ours else LEASE_SECONDS}[fate]
            if (orphan if fate == "orphan" else still) >= patience or ours and waited > SAME_JOB_SECONDS:
                return None, owner
            who = f"host {owner.get('host')}, pid {owner.get('pid')}, life {owner.get('life')}"
            moves = beats.changes and waited > FREE_LOCK_SECONDS
            lives = moves or fate == "alive" and waited > STALE_SECONDS + 1
            other = owner.get("job") != self.me["job"] or not ours and waited > SAME_JOB_SECONDS
            if lives and other and fate in ("alive", "unknown"):
                raise UserError(f"{self.path.parent} is in use by another job: {who}\n"
                                "stop that job first, or give this one its own --run-dir", code=6)
            if not said and waited > FREE_LOCK_SECONDS + 1:
                report(f"{self.path.parent}: waiting for {who}, which has the folder")
                said = True
            time.sleep(0.05)


@contextlib.contextmanager
def rescuing(staging, moved=None, needless=None, name=RESCUE):
    """Inside, only this process of its node saves. A new owner waits while it lives and `moved()` grows.

    It takes no lock if `needless()`: there is nothing to save, or not any more. Each part of a net has its
    own lock, `name`.
    """
    fd = _wait_for_rescue(staging / name, os.O_CREAT, needless)
    if fd is None and needless and needless():
        yield
        return
    aside = staging / f"{name}.{uuid.uuid4().hex[:12]}"
    try:
        held = Held(staging / name, this_process(), aside, moved)
    finally:
        if fd is not None:
            os.close(fd)
    try:
        yield
    finally:
        held.close()


def _wait_for_rescue(path, flags=0, needless=None, still=None, most=math.inf):
    """The lock, if `flags` ask for it; None if there is no need, or the rescue under way is given up."""
    beats, moves, began, pause = Still(), Still(), time.monotonic(), 0.02
    while True:
        if needless and needless():
            return None
        fd, owner = look(path, flags)
        if fd is not None and not flags:
            os.close(fd)
        over = time.monotonic() - began > most or "moved" in owner and moves(owner["moved"]) > HUNG_SECONDS
        over = over or beats(owner.get("beat")) > (still or RESCUE_SECONDS)
        if fd is not None or over or holder_status(owner) in ("lost", "stopped"):
            return fd
        time.sleep(pause := min(1.2 * pause, 0.5))  # a thousand ranks may wait for one lock


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
