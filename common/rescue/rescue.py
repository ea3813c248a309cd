"""Signals in, survivors' checkpoint out; no collectives.

In data parallelism every rank holds the whole state and all states are equal between two steps, so one
survivor is enough: whoever is alive saves the last whole step before it leaves. It learns of a death in two
ways: a collective that raises (gloo) ends in `__exit__`; a collective that hangs (NCCL) is ended by the
agent's SIGTERM, which a watcher thread sees whatever the main thread is blocked in. The Python handler does
nothing: raising there could cut an optimizer step in two. A third way is the pulse: nobody dies, but nothing
moves. All of them lead to `_end`.
"""
import contextlib
import functools
import os
import re
import select
import signal
import sys
import threading
import time

import torch

from common.errors import UserError, say
from common.options import end_of, machine_id
from common.rescue.watchdog import Watchdog
from common.world import WATCHED

# USR1: Slurm's early warning; HUP: the terminal is gone
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PATIENCE = 10.0  # seconds a signalled main thread has to reach the end of its step; the agent kills after 30
LOOK = 1.0             # seconds between two looks at the pulse
SETTLE = 2.0  # after a peer's death: the agent's SIGTERM tells a planned change of the world from a failure
ZOMBIE = 0.05          # seconds from a connection's end until the process behind it tells how it ended
STOPPED = 143
UNSAVED, BROKEN, FENCED = 4, 5, 6    # exit codes: saves fail; not to be saved; it is another's run
PEER_GONE = ("gloo", "NCCL", "Connection", "Timed out", "timeout", "Broken pipe", "store", "socket", "peer")


class Rescue:
    """Holds the run while it trains: `with Rescue(...) as rescue`, then ask `rescue.asked` each step."""

    def __init__(self, store, state, world, ledger, closing=()):
        self.store, self.state, self.world, self.ledger, self.closing = store, state, world, ledger, closing
        self.asked, self.noticed = None, 0.0
        self.ending, self.over = threading.Lock(), threading.Event()
        self.parting = self.parted = False
        self.under_agent = "TORCHELASTIC_RUN_ID" in os.environ
        self.pulse = Watchdog(state, world, state.opts.hang_timeout, lambda text: say(text, sys.stderr))

    def __enter__(self):
        self.world.watched()
        self.places = [tuple(told.tolist()) for told in self.world.all_gather(torch.tensor([os.getpid(), machine_id()]))]
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        # nohup has SIGHUP ignored. torchrun hears it all the same and passes it on: who did not answer would
        # be killed.
        nohup = not self.under_agent and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self.old_handlers = {s: signal.signal(s, _do_nothing) for s in STOP if s != signal.SIGHUP or not nohup}
        if self.world.size == 1 and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            self.old_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, _do_nothing)
        self.old_fd = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        # A forked process (a loading one, say) inherits the pipe: a signal to it alone must not reach this
        # rank's watcher.
        os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
        self.pulse.beat()  # a lock held in C may come before the watcher's first look
        self.watcher = threading.Thread(target=self._watch, daemon=True, name="rescue")
        self.watcher.start()
        return self

    def __exit__(self, kind, error, trace):
        if error is None and not self.asked:
            error = self._part()
        if isinstance(error, Exception):
            self._end(error)  # comes back with an error that is raised on
        elif self.asked:
            self.leave()  # the signal came while the last lines were written
        signal.set_wakeup_fd(self.old_fd)
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        self.pulse.stop()
        self.over.set()
        with contextlib.suppress(BlockingIOError):  # it is full: the watcher is awake already
            os.write(self.pipe[1], bytes(1))  # (closing it ends nothing: forked processes hold it open too)
        self.watcher.join()  # a thread that wakes in a dying interpreter aborts it
        for end in self.pipe:
            os.close(end)
        if error is None and self.store.fence:
            self.store.fence.release()  # not before all have met: a survivor needs the staging

    def _part(self):
        """The last step is on the disk before anybody stops watching over it; returns what went wrong, if a
        peer has died.
        """
        self.parting = True  # nothing is left to finish: a signal ends this wait at once
        try:
            self.world.barrier("end", WATCHED)  # the last save may take long; the pulse watches
            self.parted = True
        except RuntimeError as error:
            return error

    def leave(self):
        """The step is whole: have it on the disk, and go. Never returns; a second signal changes nothing."""
        self._end()

    def _end(self, error=None, hung=False):
        """The one way out of a life that ends early, on whichever thread: the newest whole step is saved, one
        line says so.

        Comes back only with an error of our own, which is raised on.
        """
        if not self.ending.acquire(blocking=False):
            return self.over.wait()  # the other thread is at it
        self.noticed = time.time()
        self.pulse.stop(0)  # a slow disk is no hang; and rank 0's store may be dead
        world, told, asked, peer = self.world, isinstance(error, UserError), self.asked, self._peers_end(error)
        words = _in_words(error)
        if told and error.code in (UNSAVED, BROKEN, FENCED):
            return self._sign_off()  # this state cannot be saved, or must not be
        if error and not peer:
            self.ledger.event("error", step=self.state.step, rank=world.rank, why=words)
        text, saved, code = self._save("hang" if hung else type(error).__name__ if error else asked)
        if asked and not error:
            self.ledger.event("stop", step=self.state.step, rank=world.rank, why=asked)
        # who is asked to stop also loses peers that are quicker
        if asked and (not error or peer and "killed" not in peer):
            self._say(f"stopped on {asked}: {text}", saved, sys.stdout)
        elif told:
            self._say(text, saved, unless=not saved)  # the error itself is said where it ends
        else:
            what = peer or (f"rank {world.rank}: hung" if hung else f"rank {world.rank}: {words}")
            self._say(f"{what}; {text}", saved or not (peer or hung))
        if error and not peer and (told or not self.asked):
            return self._sign_off()
        if peer and self.under_agent:
            self._settle()
        self._go(code if self.asked or code == BROKEN else 1)

    def _say(self, text, always, stream=None, unless=False):
        """One line a fault, however many ranks survive it: of each node the first, and who has something of
        its own to say.
        """
        try:
            os.close(os.open(self.store.writer.staging / "told", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            first = True
        except OSError as error:
            first = self.world.rank == 0 and not isinstance(error, FileExistsError)
        if (always or first) and not unless:
            say(text, stream or sys.stderr)

    def _peers_end(self, error):
        """Where the error tells of another process's end: which one, and how, as far as this machine knows;
        else None.
        """
        if self.world.size == 1 or not _peer_is_gone(error):
            return None
        deadline = time.monotonic() + ZOMBIE
        while time.monotonic() < deadline:
            here = [(rank, pid) for rank, (pid, machine) in enumerate(self.places) if machine == machine_id()]
            ends = [f"rank {rank} (pid {pid}) {how}" for rank, pid in here if (how := end_of(pid))]
            if ends:
                return next((end for end in ends if "killed" in end), ends[0])
            time.sleep(0.002)
        return f"a peer is gone ({_in_words(error)})"

    def _settle(self):
        """Wait a moment for the agent's word: leaving at once would count a planned change of the world as a
        failure.
        """
        deadline = time.monotonic() + SETTLE
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.02)

    def _save(self, why):
        """(what happened in words, whether this process wrote, exit code); nothing that goes wrong here keeps
        it from leaving.
        """
        began, state = time.monotonic(), self.state
        if self.parted:
            # all have met since; the staging may be gone
            return f"step {state.step} was saved already", False, STOPPED
        try:
            # before anything that waits: from here on a successor does
            with self.store.writer.rescuing(state.step):
                if not state.lock.acquire(timeout=PATIENCE):
                    return f"step {state.step + 1} hangs half way, the newest checkpoint stands", False, 1
                try:
                    if state.half_updated:
                        return "the step was cut in two, the newest checkpoint stands", False, getattr(state.verdict, "code", 1)
                    saved = self.store.rescue(state)
                finally:
                    state.lock.release()
        except Exception as failure:
            return f"saving step {state.step} failed: {failure}", False, getattr(failure, "code", UNSAVED)
        if isinstance(saved, str):
            return saved, False, STOPPED
        if not saved:
            return f"step {state.step} was saved already", False, STOPPED
        self.ledger.event("rescue", step=state.step, rank=self.world.rank, why=why, rescue_s=round(time.monotonic() - began, 3))
        return f"step {state.step} saved" + (f" by rank {self.world.rank}" if self.world.size > 1 else ""), True, STOPPED

    def _watch(self):
        """Signals arrive here even if the main thread is stuck in C; it has a while to finish its step by
        itself.
        """
        deadline, poll = None, select.poll()  # select() takes no file of number 1024 or more
        poll.register(self.pipe[0], select.POLLIN)
        while not self.over.is_set():
            data = os.read(self.pipe[0], 64) if poll.poll(LOOK * 1000 if deadline is None else 100) else b""
            if signal.SIGTSTP in data:
                self.pulse.doze()
            numbers = [n for n in data if n in STOP]
            if numbers and deadline is None:
                self.asked, deadline = signal.Signals(numbers[0]).name, time.monotonic() + (0 if self.parting else PATIENCE)
            if deadline is not None and time.monotonic() > deadline:
                self.leave()  # the main thread did not come: it hangs with a dead peer
            if hung := self.pulse.beat():
                say(hung, sys.stderr)
                self._end(hung=True)

    def _go(self, code):
        """No destructors: they may wait for a dead peer."""
        for close in self.closing:
            try:
                close()
            except Exception as error:
                say(f"on the way out: {error}", sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        self._sign_off()
        os._exit(code)

    def _sign_off(self):
        self.ledger.event("left", life=self.world.life, rank=self.world.rank, stepped=round(self.state.stepped, 3),
                          noticed=round(self.noticed, 3))


def _do_nothing(number, frame):
    """Being there is enough: the byte in the wake-up pipe is what counts."""


def _in_words(error):
    """One line that names the cause. Of an error in a loading process that is the last line of the traceback
    it sent.
    """
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, UserError):
        return lines[0]
    if "Original Traceback" in str(error):
        return lines[-1][:120]
    first = re.sub(r"^\[\S+\] ", "", lines[0])  # gloo begins with a path
    return f"{type(error).__name__}: {first}"[:120]


def _peer_is_gone(error):
    """Whether the exception tells of another process's end rather than of a mistake of ours."""
    text = f"{type(error).__name__} {error}"
    return isinstance(error, RuntimeError) and any(word in text for word in PEER_GONE)
