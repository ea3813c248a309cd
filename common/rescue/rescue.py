"""Signals in, a survivor's checkpoint out; no collectives.

In data parallelism every rank holds the whole state, and between two steps all states are equal. So one
survivor is enough: every rank that is alive tries to save the last whole step before it leaves.

From a signal to the exit: `Watch` hears it and sets `asked`; `Run.stepped` ends the step and calls `leave`;
`end` saves (`rescue` of store/saver.py), prints one line, and exits. A rank that hears it later waits in
vain for the others, as after a death: a collective raises (gloo), or hangs (NCCL), and then the thread of
`Watch` calls `end`. The Python signal handler does nothing: an exception there could cut an optimizer step.
"""

import enum
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import active_children
from typing import NamedTuple

import torch

from common.errors import UserError, dismiss_agent, note_reason, one_line, say
from common.place import here
from common.rescue.watch import DEATH_SECONDS, PEER_SECONDS, Watch
from common.store import CheckpointStore
from common.world import WATCHED

AGENT_SECONDS = 2.0  # after a peer's end, for the agent's signal: it tells a planned change
SAVER_SECONDS = 0.05  # the rank that has saved speaks first
STOPPED = 143  # exit codes
FENCED = 6
LAST_TO_SAVE = 3  # higher: saves fail, no progress, another job's run, a wrong state


class Reason(enum.Enum):
    """Why a life ends before its training does; the value is the event in the ledger."""

    STOPPED = "stop"  # a person or a launcher asks for it
    PEER_DIED = "peer"  # another rank has ended
    HANG = "hang"  # no rank makes progress
    ERROR = "error"  # this rank has failed, or a person must mend something
    REFUSED = "refused"  # there is nothing to save, or another job has taken the run


# {reason: (exit code, the line of the first rank that comes to it)}
# Without a code the error is raised again, and has its own; without a line the error tells all.
WAYS_OUT = {
    Reason.STOPPED: (STOPPED, "stopped on {cause}: {saved}"),
    Reason.PEER_DIED: (1, "{cause}; {saved}"),
    Reason.HANG: (1, "{cause}; {saved}"),
    Reason.ERROR: (None, "rank {rank}: {cause}; {saved}"),
    Reason.REFUSED: (None, ""),
}


class Saved(NamedTuple):
    """What became of the newest whole step."""

    words: str
    here: bool = False  # this rank has saved it
    failure: int = 0  # exit code


class Rescue:
    """Holds the run while it trains: `with Rescue(...) as rescue`, and check `rescue.leaves` each step."""

    def __init__(self, store: CheckpointStore, closing: Iterable[Callable[[], None]] = ()) -> None:
        self.store = store  # it has restored the state
        self.state = store.state
        self.world = store.world
        self.ledger = store.ledger
        self.closing = closing  # called before this process ends early
        self.save_asked = False  # a person has asked for a save, or a rank's clock
        self.stop_asked = ""  # a person has asked for the end: a file in RUN/control/
        self.all_know = False  # of a signal to any rank
        self.ending = threading.Lock()  # taken for good by the thread that ends this life
        self.watch = Watch(self.state, self.world, self.end)

    # ---- a good day -------------------------------------------------------------------------------
    def __enter__(self):
        with suppress(OSError):
            self._control("").mkdir(mode=0o700, exist_ok=True)
        self.world.set_patience(WATCHED)  # from now on `Watch` ends hangs
        self.watch.start()
        return self

    def __exit__(self, kind, error, trace):
        stops = self.asked
        if error is None and not stops:
            self.watch.parting = True
            try:
                self.world.barrier()  # the last save may take long; a hang is ended by `Watch`
            except RuntimeError as broken:  # a peer has died
                error = broken
        if error is not None or stops:
            self.end(error=error)  # returns if the error is to be raised again
        else:
            self.ending.acquire()
        self.watch.stop()
        if error is None:
            if self.world.rank == 0:
                self.ledger.event("done", step=self.state.step)
            self._forget("stop")
            self.store.release()  # not before all have met: a survivor needs the staging folder
        elif kind is None:
            raise error

    @property
    def asked(self) -> str:
        """Why this rank shall stop: the name of a signal, or of a file in RUN/control/; or empty."""
        return self.stop_asked or self.watch.asked

    @property
    def leaves(self) -> bool:
        """Whether this rank leaves after this step.

        Stages save parts of one step: all leave after that in which `consult` told all of the signal.
        """
        together = self.state.opts.script == "mp"
        return bool(self.stop_asked or (self.all_know if together else self.watch.asked))

    def leave(self) -> None:
        """Saves the whole step and exits."""
        self.watch.asked = self.watch.asked or "a signal to another rank"
        self.end()

    def consult(self) -> None:
        """Tells all ranks of a signal to any, and what a person or a clock wants; call it on every rank.

        Rank 0 looks into RUN/control/.
        """
        save, stop = (self.world.rank == 0 and self._control(name).exists() for name in ("save", "stop"))
        asks = torch.tensor([save or self.store.overdue, stop, bool(self.watch.asked)]).int()
        save, stop, signalled = self.world.all_sum(asks).tolist()
        self.all_know = bool(signalled)
        if save:
            self.save_asked = True
            self._forget("save")
        if stop:
            self.stop_asked = "control/stop"
            self._forget("stop")

    def _control(self, name):
        return self.state.opts.run_dir / "control" / name

    def _forget(self, name):
        """A person's wish is done: the file goes."""
        if self.world.rank == 0:
            with suppress(OSError):
                self._control(name).unlink()

    # ---- the way out ------------------------------------------------------------------------------
    def _reason_of(self, error):
        """Which reason an error has, or a stop without one; waits for the news of a peer's death."""
        if isinstance(error, UserError):  # all ranks have it: not a peer's death
            return Reason.REFUSED if error.code > LAST_TO_SAVE else Reason.ERROR
        if isinstance(error, RuntimeError) and self.world.size > 1:
            self.watch.lost.wait(PEER_SECONDS)  # a collective fails before the thread hears of the end
        if self.asked:  # by the agent, if a peer was killed; peers that stop faster have ended too
            return Reason.PEER_DIED if self.watch.find_death().killed else Reason.STOPPED
        return Reason.PEER_DIED if self.watch.lost.is_set() else Reason.ERROR

    def end(self, hang: str = "", error: BaseException | None = None) -> None:
        """The only way out of a life that ends early, on any thread: saves the newest whole step, exits.

        `hang` is the report of one. Returns only if the error is to be raised again, or if another thread
        ends this life.
        """
        reason = Reason.HANG if hang else self._reason_of(error)
        on_main_thread = threading.current_thread() is threading.main_thread()
        if not self.ending.acquire(blocking=on_main_thread):
            return
        self.watch.leaving = True
        if self.stop_asked and here().speaks:
            dismiss_agent()  # it would start another life

        code, line = WAYS_OUT[reason]
        saved = self._save(reason) if line else Saved("")
        cause = hang or self.asked
        if error and code is None:
            cause = in_words(error)
        if reason is Reason.STOPPED:
            code = saved.failure or code
        if reason is Reason.PEER_DIED:
            if here().agent and not self.asked:  # its signal tells that the world changes as planned
                self.watch.signalled.wait(AGENT_SECONDS)
            death = self.watch.find_death(DEATH_SECONDS)
            cause = death.words
            if self.asked:
                code = saved.failure or STOPPED

        self.ledger.event(reason.value, step=self.state.whole, why=cause)
        if line and self._is_first(saved):
            if reason is Reason.PEER_DIED and death.killed:
                self.ledger.event("death", rank=death.rank, why=death.how)
            line = line.format(cause=cause, saved=saved.words, rank=self.world.rank)
            say(line, sys.stdout if reason is Reason.STOPPED else sys.stderr)
            note_reason(line)

        self.ledger.event("left", stepped=round(self.state.stepped, 3))
        if code is not None:
            for close in (*self.closing, end_children, sys.stdout.flush, sys.stderr.flush):
                with suppress(Exception):
                    close()
            os._exit(code)  # without destructors, which may wait for a dead peer

    def _save(self, reason):
        """Never raises: this life ends in any case."""
        step = self.state.whole
        words = ""
        try:
            words = self.store.rescue(reason.name.lower())
        except Exception as failure:
            code = failure.code if isinstance(failure, UserError) else 4
            if code != FENCED or not self.watch.parting:  # else all have met: rank 0 has let go of the run
                return Saved(f"step {step} is not saved: {in_words(failure)}", failure=code)
        return Saved(words or f"step {step} was saved already", here=bool(words))

    def _is_first(self, saved):
        """Whether this rank is the first that tells of this end, of those that see one run folder."""
        if not saved.here:
            time.sleep(SAVER_SECONDS)
        note = self.store.fence.staging / "told"
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # rank 0 has let go of the run
            return self.world.rank == 0
        return True


def end_children():
    """Kills loading processes: one that hangs since its birth does not yet end with its rank."""
    for process in active_children():
        process.kill()


def in_words(error):
    """One line that names the cause."""
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return name + one_line(error)
