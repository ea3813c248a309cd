"""Signals in, survivors' checkpoint out; no collectives.

In data parallelism every rank holds the whole state and all states are equal between two steps, so one survivor is
enough: whoever is alive saves the last whole step before it leaves. It learns of a death in two ways: a collective that
raises (gloo) ends in `__exit__`; a collective that hangs (NCCL) is ended by the agent's SIGTERM, which a watcher thread sees
whatever the main thread is blocked in. The Python handler does nothing: raising there could cut an optimizer step in two.
A third way is the pulse: nobody dies, but nothing moves.
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

from common import UserError
from common.log import say
from common.pulse import Pulse

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)    # USR1: Slurm's early warning; HUP: the terminal is gone
PATIENCE = 10.0        # seconds a signalled main thread has to reach the end of its step; the agent kills after 30
SETTLE = 2.0           # after a peer's death: the agent's SIGTERM tells a planned change of the world from a failure
STOPPED = 143
PEER_GONE = ("gloo", "NCCL", "Connection", "Timed out", "timeout", "Broken pipe", "store", "socket", "peer")


class Rescue:
    """Holds the run while it trains: `with Rescue(store, state, world, closing) as rescue`, then ask `rescue.asked` each step."""

    def __init__(self, store, state, world, ledger, closing=()):
        self.store, self.state, self.world, self.ledger, self.closing = store, state, world, ledger, closing
        self.asked, self.leaving, self.noticed = None, threading.Lock(), 0.0
        self.parting = self.parted = self.over = False
        self.under_agent = "TORCHELASTIC_RUN_ID" in os.environ
        self.pulse = Pulse(state, world, state.opts.hang_timeout, lambda text: say(text, sys.stderr))

    def __enter__(self):
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        # nohup has SIGHUP ignored. torchrun hears it all the same and passes it on: who did not answer would be killed.
        nohup = not self.under_agent and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self.old_handlers = {s: signal.signal(s, _do_nothing) for s in STOP if s != signal.SIGHUP or not nohup}
        if self.world.size == 1 and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            self.old_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, _do_nothing)
        self.old_fd = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        # A forked process (a loading one, say) inherits the pipe: a signal to it alone must not reach this rank's watcher.
        os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
        self.pulse.beat()                                           # a lock held in C may come before the watcher's first look
        self.watcher = threading.Thread(target=self._watch, daemon=True, name="rescue")
        self.watcher.start()
        return self

    def __exit__(self, kind, error, trace):
        if error is None and not self.asked:
            error = self._part()
        if error is not None and not isinstance(error, (UserError, SystemExit)):
            self._after(error)
        if self.asked:
            self.leave()                                            # the signal came while the last lines were written
        signal.set_wakeup_fd(self.old_fd)
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        self.pulse.stop()
        self.over = True
        with contextlib.suppress(BlockingIOError):                  # it is full: the watcher is awake already
            os.write(self.pipe[1], bytes(1))                        # (closing it ends nothing: forked processes hold it open too)
        self.watcher.join()                                         # a thread that wakes in a dying interpreter aborts it
        for end in self.pipe:
            os.close(end)
        if error is None and self.store.fence:
            self.store.fence.release()                              # not before all have met: a survivor needs the staging

    def _part(self):
        """The last step is on the disk before anybody stops watching over it; returns what went wrong, if a peer has died."""
        self.parting = True                                         # nothing is left to finish: a signal ends this wait at once
        try:
            self.world.meet("end")
            self.parted = True
        except RuntimeError as error:
            return error

    def leave(self, code=STOPPED):
        """The step is whole: have it on the disk, and go. Never returns; a second signal changes nothing."""
        if not self.leaving.acquire(blocking=False):
            threading.Event().wait()                                # the other thread is leaving already
        text, saved = self._save_noting(self.asked or "exit")
        self.ledger.event("stop", step=self.state.step, rank=self.world.rank, why=self.asked)
        if self.world.rank == 0 or saved:
            say(f"stopped on {self.asked}: {text}; the same command goes on from here")
        self._go(code)

    def _after(self, error):
        """An exception ended the loop: save what is whole. A peer's death ends here; an error of our own is raised on."""
        with self.leaving:
            self.pulse.stop(0)                                      # it may be asking a store that died with rank 0
            text, _ = self._save_noting(type(error).__name__)
            words = _in_words(error)
            say(f"rank {self.world.rank}: {words}; {text}", sys.stderr)
            if not _peer_is_gone(error):
                self.ledger.event("error", step=self.state.step, rank=self.world.rank, why=words)
            if self.world.size == 1 or not _peer_is_gone(error):
                return self._sign_off()
            if self.under_agent:
                self._settle()
            self._go(STOPPED if self.asked else 1)

    def _settle(self):
        """Wait a moment for the agent's word: leaving at once would count a planned change of the world as a failure."""
        deadline = time.monotonic() + SETTLE
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.02)

    def _save_noting(self, why):
        """(what happened in words, whether this process wrote); whatever goes wrong here must not keep it from leaving."""
        began, state, self.noticed = time.monotonic(), self.state, time.time()
        if self.parted:
            return f"step {state.step} was saved already", False    # all have met since; the staging may be gone
        if not state.lock.acquire(timeout=PATIENCE):
            return f"step {state.step + 1} hangs half way, the newest checkpoint stands", False
        try:
            if state.torn:
                return "the step was cut in two, the newest checkpoint stands", False
            saved = self.store.rescue(state)
            if isinstance(saved, str):
                return saved, False
        except Exception as failure:
            return f"saving step {state.step} failed: {failure}", False
        finally:
            state.lock.release()
        if saved:
            self.ledger.event("rescue", step=state.step, rank=self.world.rank, why=why,
                              rescue_s=round(time.monotonic() - began, 3))
        return f"step {state.step} {'saved' if saved else 'was saved already'}", saved

    def _watch(self):
        """Signals arrive here even if the main thread is stuck in C; it has a while to finish its step by itself."""
        deadline, poll = None, select.poll()                        # select() takes no file of number 1024 or more
        poll.register(self.pipe[0], select.POLLIN)
        while not self.over:
            data = os.read(self.pipe[0], 64) if poll.poll(1000 if deadline is None else 100) else b""
            if signal.SIGTSTP in data:
                self.pulse.doze()
            numbers = [n for n in data if n in STOP]
            if numbers and deadline is None:
                self.asked, deadline = signal.Signals(numbers[0]).name, time.monotonic() + (0 if self.parting else PATIENCE)
            if deadline is not None and time.monotonic() > deadline:
                self.leave()                                        # the main thread did not come: it hangs with a dead peer
            if self.parting:
                self.pulse.stop(0)                                  # waiting for the one that saves, however long, is no hang
                continue
            hung = self.pulse.beat()
            if hung and self.leaving.acquire(blocking=False):
                say(hung, sys.stderr)
                self._save_noting("hang")
                self._go(1)

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
    """One line that names the cause. Of an error in a loading process that is the last line of the traceback it sent."""
    lines = str(error).strip().splitlines() or [""]
    if "Original Traceback" in str(error):
        return lines[-1][:120]
    first = re.sub(r"^\[\S+\] ", "", lines[0])                     # gloo begins with a path
    return f"{type(error).__name__}: {first}"[:120]


def _peer_is_gone(error):
    """Whether the exception tells of another process's end rather than of a mistake of ours."""
    text = f"{type(error).__name__} {error}"
    return isinstance(error, RuntimeError) and any(word in text for word in PEER_GONE)
