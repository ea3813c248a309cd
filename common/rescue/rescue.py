"""Signals in, a survivor's checkpoint out; no collectives.

In data parallelism every rank holds the whole state, and between two steps all states are equal. So one
survivor is enough: every rank that is alive tries to save the last whole step before it leaves. A collective
that raises (gloo) ends in `__exit__`. Where collectives hang (NCCL), a thread notices a death (a connection
ends), a stop (a signal) and a hang (the watchdog). The Python signal handler does nothing: an exception there
could cut an optimizer step in two. All ways lead to `_end`.
"""
import contextlib
import functools
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from common.errors import UserError, dismiss_agent, say
from common.ledger import Ledger
from common.options import machine_id
from common.rescue.death import PEER_SECONDS, await_the_agent, in_words, peers_end, restart_is_sure
from common.rescue.life import note_slow
from common.rescue.watchdog import OPENING_SECONDS, Watchdog
from common.rescue.wishes import Wishes
from common.world import WATCHED, World, lifelines

# USR1: Slurm's early warning; HUP: the terminal is gone
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STEP_SECONDS = 10.0        # a signalled main thread may take to the end of its step; the agent kills after 30
WATCH_EVERY_SECONDS = 1.0  # the thread looks at the watchdog
STOPPED = 143
UNSAVED, BROKEN, FENCED = 4, 5, 6    # exit codes: saves fail; not to be saved; the run is another job's


class Rescue(Wishes):
    """Holds the run while it trains: `with Rescue(...) as rescue`, and check `rescue.asked` each step."""

    def __init__(self, store: Any, state: Any, world: World, ledger: Ledger,
                 closing: Iterable[Callable] = ()) -> None:
        super().__init__(state, world, ledger)
        self.store, self.closing = store, closing
        self.noticed = 0.0  # when this process learned that its life ends early
        self.dead: dict[str, Any] = {}  # the peer that died, for the ledger
        self.lines: list[Any] = []  # sockets that end with other ranks
        self.ending, self.over = threading.Lock(), threading.Event()
        self.speaks = self.parting = self.parted = False  # prints the end; waits for all at the end; met them
        self.under_agent, self.agent = "TORCHELASTIC_RUN_ID" in os.environ, os.getppid()
        limit = state.opts.hang_timeout or OPENING_SECONDS * state.opts.compile  # any step may compile
        self.watchdog = Watchdog(state, world, limit, functools.partial(note_slow, self))

    def __enter__(self) -> "Rescue":
        self.world.watched()
        place = torch.tensor([os.getpid(), machine_id(), self.world.restarts_left])
        self.places = [tuple(other.tolist()) for other in self.world.all_gather(place)]
        with contextlib.suppress(OSError, RuntimeError):  # without them a death is a hang
            if self.world.size > 1:
                self.lines = lifelines(self.world.store, self.world.rank, self.world.size)
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        # nohup ignores SIGHUP. torchrun hears it all the same, passes it on, and kills a process that stays.
        nohup = not self.under_agent and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        heard = [n for n in (*STOP, signal.SIGUSR2) if n != signal.SIGHUP or not nohup]
        # with any handler, Python writes the signal's number to the pipe that `_watch` reads
        self.old_handlers = {number: signal.signal(number, lambda *_: None) for number in heard}
        self.old_fd = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        # A forked process (for loading, say) inherits the pipe; a signal to it alone must not stop this rank.
        os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
        self.watchdog.beat()  # C code may take the interpreter's lock before the thread's first look
        self.watcher = threading.Thread(target=self._watch, daemon=True, name="rescue")
        self.watcher.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        stops = self.asked and self.state.step >= self.stop_at
        if error is None and not stops:
            error = self._part()
        if error is not None:  # sys.exit in a script of one's own, too
            self._end(error)  # returns if the error is this rank's own: it is raised again
        elif stops:
            self.leave()  # the signal came while the last lines were written
        signal.set_wakeup_fd(self.old_fd)
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)
        self.watchdog.stop()
        self.over.set()
        with contextlib.suppress(BlockingIOError):  # it is full: the thread is awake already
            os.write(self.pipe[1], bytes(1))  # to close it is not enough: forked processes have it open too
        self.watcher.join()  # a thread that wakes in a dying interpreter aborts it
        for end in (*self.pipe, *(end.detach() for end in self.lines)):
            os.close(end)
        if error is None:
            if self.world.rank == 0:
                self.ledger.event("done", life=self.world.life, step=self.state.step)
                self.ledger.status.end(f"complete at step {self.state.step}", 0)
            self.store.release()  # not before all have met: a survivor needs the staging folder

    def _part(self):
        """Waits until all ranks have saved their last step; returns the error if a peer has died."""
        self.parting = True  # nothing is left to finish: a signal ends this wait at once
        try:
            self.world.barrier("end", WATCHED)  # the last save may take long; the watchdog ends a hang
            self.parted = True
        except RuntimeError as error:
            return error

    def leave(self) -> None:
        """Saves the whole step and exits; does nothing before the step after which all ranks stop."""
        if self.state.step >= self.stop_at:
            self.state.updates.settle()
            self._end()

    def _end(self, error=None, hung=False):
        """The only way out of a life that ends early, on either thread: saves the newest whole step.

        Prints one line. Returns only with an error of this rank's own, which is then raised again.
        """
        if not self.ending.acquire(blocking=False):
            return self.over.wait()  # the other thread ends this process
        self.noticed = time.time()
        self.watchdog.stop(0)  # a slow disk is no hang; and rank 0's store may be dead
        if str(self.asked).startswith("control/") and self.world.local_rank == 0:
            dismiss_agent()  # it would start another life
        known, asked, peer = isinstance(error, UserError), self.asked, peers_end(self, error)
        if known and error.code in (UNSAVED, BROKEN, FENCED):
            if error.code != FENCED:
                self.ledger.status.end(in_words(error), error.code)
            return self._sign_off()  # this state cannot be saved, or must not be
        note = functools.partial(self.ledger.event, life=self.world.life, step=self.state.whole,
                                 rank=self.world.rank)
        if hung or error and not peer:
            note("hang" if hung else "error", why="no progress" if hung else in_words(error))
        why = "hang" if hung else type(error).__name__ if error else asked or "a peer's end"
        text, saved, code = self._save(why, not hung and bool(peer or not error))
        if asked and not error:
            note("stop", why=asked)
        if asked and (not error or peer and "killed" not in peer):  # peers that stop faster are lost too
            first = self._say_once(reason := f"stopped on {asked}: {text}", saved, sys.stdout)
        elif known:
            first = self._say_once(saved and text, saved)  # the error itself is printed at the process's end
            reason = f"{in_words(error)}; {text}"
        else:
            cause = peer or f"rank {self.world.rank}: {'hung' if hung else in_words(error)}"
            first = self._say_once(reason := f"{cause}; {text}", saved or not (peer or hung))
        raised = error and not peer and (known or not self.asked)
        if first or self.world.rank == 0:
            own = getattr(error, "code", 1) if raised else 1
            self.ledger.status.end(reason, own if raised or not asked and code != BROKEN else code)
        if raised:
            return self._sign_off()
        if peer and self.under_agent:
            await_the_agent(self)
        self._go(code if self.asked or code == BROKEN else 1)

    def _may_speak(self):
        """Whether this rank is the first of its node that tells of this end."""
        try:
            os.close(os.open(self.store.writer.staging / "told", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        except OSError as error:
            return self.world.rank == 0 and not isinstance(error, FileExistsError)

    def _say_once(self, text, always, stream=None):
        """One line per fault and node, however many ranks survive it; with `always` on this rank too."""
        first = self.speaks or self._may_speak()
        self.ledger.death(life=self.world.life, **self.dead) if first and self.dead else None
        say(text, stream or sys.stderr) if text and (always or first) else None
        return first

    def _save(self, why, for_a_peer=False):
        """(what happened in words, whether this process saved, exit code); never raises."""
        began, state, failed = time.monotonic(), self.state, f"saving step {self.state.whole} failed"
        there = f"step {state.whole} was saved already", False, STOPPED
        if self.parted or self.parting and self.store.writer.is_saved(state):
            return there  # all have met, or may have since: then the staging folder is gone
        try:
            # announced before anything that waits: from here on a new life waits for this one
            writer = self.store.writer
            with state.updates.aside(), writer.rescuing(state.whole, lambda: writer.is_saved(state)):
                if not state.lock.acquire(timeout=STEP_SECONDS):
                    return f"step {state.step + 1} hangs half way, the newest checkpoint stands", False, 1
                try:
                    if state.half_updated:
                        code = getattr(state.verdict, "code", 1)
                        return "the step was cut in two, the newest checkpoint stands", False, code
                    self.speaks = not writer.is_saved(state) and self._may_speak()  # it tells
                    where = self.store.rescue(state, for_a_peer and restart_is_sure(self))
                finally:
                    state.lock.release()
        except Exception as failure:
            code = getattr(failure, "code", UNSAVED)  # FENCED while it parts: all have met
            return there if self.parting and code == FENCED else (f"{failed}: {failure}", False, code)
        if where not in ("disk", "memory"):
            return (where, False, STOPPED) if where else there
        rank, seconds = self.world.rank, round(time.monotonic() - began, 3)
        self.ledger.event("rescue", step=state.whole, rank=rank, why=why, rescue_s=seconds, where=where)
        by = f" by rank {rank}" * (self.world.size > 1) + " in memory" * (where == "memory")
        return f"step {state.whole} saved{by}", True, STOPPED

    def _watch(self):
        """Reads signals even if the main thread is stuck in C; that thread may first finish its step."""
        deadline, stopping, poll = math.inf, "", select.poll()  # select() takes no file number over 1023
        for end in (self.pipe[0], *self.lines):
            poll.register(end, select.POLLIN)
        while not self.over.is_set():
            seconds = WATCH_EVERY_SECONDS if deadline == math.inf else 0.1
            told = {end for end, _ in poll.poll(1000 * seconds)}
            data = os.read(self.pipe[0], 64) if self.pipe[0] in told else b""
            if told - {self.pipe[0]} and not self.lost:  # a rank has ended: rank 0 tells all
                if not self.parting:
                    self.lost, deadline = True, min(deadline, time.monotonic() + PEER_SECONDS)
                for end in self.lines:
                    poll.unregister(end)
                    with contextlib.suppress(OSError):
                        end.send(b"!", socket.MSG_DONTWAIT)
            self.control.wanted |= {"save"} if signal.SIGUSR2 in data else set()
            if not stopping and (numbers := [n for n in data if n in STOP]):
                stopping = signal.Signals(numbers[0]).name
                # not on this thread: a store that is ending answers late, one that is cut off never
                threading.Thread(target=self.stop, args=[stopping], daemon=True).start()
                deadline = min(deadline, time.monotonic() + (0 if self.parting else STEP_SECONDS))
            if self.lost or time.monotonic() > deadline:
                self.asked = self.asked or stopping or None
            if time.monotonic() > deadline:
                self._end()  # the main thread did not come: it waits for a dead peer
            if self.watchdog.beat():
                self._end(hung=True)

    def _go(self, code):
        """Exits without destructors, which may wait for a dead peer."""
        for close in self.closing:
            try:
                close()
            except Exception as error:
                say(f"while closing: {error}", sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._sign_off()
        os._exit(code)

    def _sign_off(self):
        self.store.memory.sign_off(self.world.rank)
        self.ledger.event("left", life=self.world.life, rank=self.world.rank,
                          stepped=round(self.state.stepped, 3), noticed=round(self.noticed, 3))
