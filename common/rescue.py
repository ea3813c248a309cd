"""Signals in, survivors' checkpoint out; no collectives.

In data parallelism every rank holds the whole state and all states are equal between two steps, so one survivor is
enough: whoever is alive saves the last whole step before it leaves. It learns of a death in two ways: a collective that
raises (gloo) ends in `__exit__`; a collective that hangs (NCCL) is ended by the agent's SIGTERM, which a watcher thread sees
whatever the main thread is blocked in. The Python handler does nothing: raising there could cut an optimizer step in two.
"""
import os
import re
import select
import signal
import sys
import threading
import time

from common import UserError
from common.log import say

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)           # the last is Slurm's early warning
PATIENCE = 10.0        # seconds a signalled main thread has to reach the end of its step; the agent kills after 30
SETTLE = 2.0           # after a peer's death: the agent's SIGTERM tells a planned change of the world from a failure
STOPPED = 143
PEER_GONE = ("gloo", "NCCL", "Connection", "Timed out", "timeout", "Broken pipe", "store", "socket", "peer")


class Rescue:
    """Holds the run while it trains: `with Rescue(store, state, world, closing) as rescue`, then ask `rescue.asked` each step."""

    def __init__(self, store, state, world, ledger, closing=()):
        self.store, self.state, self.world, self.ledger, self.closing = store, state, world, ledger, closing
        self.asked, self.leaving = None, threading.Lock()
        self.under_agent = "TORCHELASTIC_RUN_ID" in os.environ

    def __enter__(self):
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        self.old_handlers = {s: signal.signal(s, _do_nothing) for s in STOP}
        self.old_fd = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        self.watcher = threading.Thread(target=self._watch, daemon=True, name="rescue")
        self.watcher.start()
        return self

    def __exit__(self, kind, error, trace):
        if error is not None and not isinstance(error, (UserError, SystemExit)):
            self._after(error)
        if self.asked:
            self.leave()                                            # the signal came while the last lines were written
        signal.set_wakeup_fd(self.old_fd)
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        os.close(self.pipe[1])                                      # ends the watcher
        self.watcher.join()                                         # a thread that wakes in a dying interpreter aborts it

    def leave(self, code=STOPPED):
        """The step is whole: have it on the disk, and go. Never returns; a second signal changes nothing."""
        if not self.leaving.acquire(blocking=False):
            threading.Event().wait()                                # the other thread is leaving already
        try:
            saved = self._save(self.asked or "exit")
            if self.world.rank == 0 or saved:
                say(f"stopped on {self.asked} at step {self.state.step}: saved; the same command goes on from here")
        except Exception as error:
            say(f"stopped on {self.asked} at step {self.state.step}, but it could not be saved: {error}", sys.stderr)
        finally:
            self._go(code)

    def _after(self, error):
        """An exception ended the loop: save what is whole. A peer's death ends here; an error of our own is raised on."""
        with self.leaving:
            try:
                saved = self._save(type(error).__name__)
                text = f"step {self.state.step} saved" if saved else f"step {self.state.step} was saved already"
                if self.state.torn:
                    text = "the step was cut in two, going back to the newest checkpoint"
            except Exception as failure:
                text = f"saving step {self.state.step} failed: {failure}"
            first_line = re.sub(r"^\[\S+\] ", "", next(iter(str(error).splitlines()), ""))[:100]      # gloo begins with a path
            say(f"rank {self.world.rank}: {type(error).__name__}: {first_line}; {text}", sys.stderr)
            if self.world.size == 1 or not _peer_is_gone(error):
                return
            if self.under_agent:
                self._settle()
            self._go(STOPPED if self.asked else 1)

    def _settle(self):
        """Wait a moment for the agent's word: leaving at once would count a planned change of the world as a failure."""
        deadline = time.monotonic() + SETTLE
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.02)

    def _save(self, why):
        began = time.monotonic()
        saved = self.store.rescue(self.state)
        if saved:
            self.ledger.event("rescue", step=self.state.step, rank=self.world.rank, why=why,
                              rescue_s=round(time.monotonic() - began, 3))
        return saved

    def _watch(self):
        """Signals arrive here even if the main thread is stuck in C; it has a while to finish its step by itself."""
        reader = self.pipe[0]
        while data := os.read(reader, 64):
            numbers = [n for n in data if n in STOP]
            if not numbers:
                continue
            self.asked = self.asked or signal.Signals(numbers[0]).name
            deadline = time.monotonic() + PATIENCE
            while (left := deadline - time.monotonic()) > 0:
                if select.select([reader], [], [], left)[0] and not os.read(reader, 64):
                    return
            self.leave()                                            # the main thread did not come: it hangs with a dead peer
        os.close(reader)

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
        os._exit(code)


def _do_nothing(number, frame):
    """Being there is enough: the byte in the wake-up pipe is what counts."""


def _peer_is_gone(error):
    """Whether the exception tells of another process's end rather than of a mistake of ours."""
    text = f"{type(error).__name__} {error}"
    return isinstance(error, RuntimeError) and any(word in text for word in PEER_GONE)
