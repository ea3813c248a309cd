"""Signals in, a survivor's checkpoint out; no collectives.

In data parallelism every rank holds the whole state, and between two steps all states are equal. So one
survivor is enough: every rank that is alive tries to save the last whole step before it leaves.

From a signal to the exit:
1. `Watch` (watch.py) hears it on the thread of `_stand_by`, and has its name.
2. The main thread ends its step; elastic.py sees that this rank is `asked`, and calls `leave`.
3. `leave` finds its row of `WayOut`, saves (`rescue` of the store), prints one line, and exits with its code.
4. If the main thread does not come within STEP_SECONDS, the thread calls `leave` in its place.

A rank that hears the signal later waits for others that have gone, as after a death: a collective raises
(gloo), or hangs (NCCL) until the thread comes.
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
from common.rescue.alarm import AGENT_SECONDS, DEATH_SECONDS, PEER_SECONDS, SAVER_SECONDS
from common.rescue.watch import Watch
from common.store import CheckpointStore
from common.world import WATCHED

ALL_SAVED = 143  # exit codes
FENCED = 6
LAST_TO_SAVE = 3  # higher: saves fail, no progress, another job's run, a wrong state
BY_A_PERSON = "control/stop"


class WayOut(enum.Enum):
    """Why a life ends before its training does: event in the ledger, words of the first rank, who ends it.

    Without words the error tells all, and nothing is saved. If it `raises`, the error is raised again, and
    has its own exit code. Else that is 1; of a rank that was asked to stop ALL_SAVED, or a failed save's.
    """

    # a person or a launcher asks for it
    STOPPED = "stop", "stopped on {cause}: {saved}", False
    # another rank has ended; then its agent may stop the others too, for another life or another world
    PEER_DIED = "peer", "{cause}; {saved}", False
    # no rank makes progress
    HANG = "hang", "{cause}; {saved}", False
    # this rank has failed, or a person must mend something
    ERROR = "error", "rank {rank}: {cause}; {saved}", True
    # there is nothing to save, or another job has taken the run
    REFUSED = "refused", "", True


class Saved(NamedTuple):
    """What became of the newest whole step."""

    words: str = ""
    whole: bool = False  # this rank has saved it
    failure: int = 0  # exit code


class Rescue:
    """Holds the run while it trains: `with Rescue(...) as rescue`, and check `rescue.asked` each step."""

    def __init__(self, store: CheckpointStore, on_exit: Iterable[Callable[[], None]] = ()) -> None:
        self.store = store  # it has restored the state
        self.state = store.state
        self.world = store.world
        self.ledger = store.ledger
        self.on_exit = on_exit  # called before this process ends early
        self.control = self.state.opts.run_dir / "control"  # a person's requests: rank 0 looks there
        self.save_asked = False  # a person has asked for a save, or a rank's clock
        self.agreed = ""  # why all ranks leave after this step
        self.ending = threading.Lock()  # taken for good by the thread that ends this life

    # ---- from the first step to the last -----------------------------------------------------------
    def __enter__(self):
        with suppress(OSError):
            self.control.mkdir(mode=0o700, exist_ok=True)
        self.world.set_patience(WATCHED)  # from now on the watch's thread ends hangs
        self.watch = Watch(self.state, self.world)
        self.thread = threading.Thread(target=self._stand_by, daemon=True, name="watch")
        self.thread.start()
        return self

    def __exit__(self, kind, error, trace):
        stops = self.asked
        if error is None and not stops:
            self.watch.parting = True
            try:
                self.world.barrier()  # the last save may take long; the thread ends a hang
            except RuntimeError as broken:  # a peer has died
                error = broken
        if error is not None or stops:
            self.leave(error)  # returns if the error is to be raised again
        else:
            self.ending.acquire()
        self.watch.stop(self.thread)
        if error is None:
            if self.world.rank == 0:
                progress = self.state.progress
                self.ledger.event("done", step=progress.step, finished=progress.finished)
                self.store.copy()
            self._delete_request("stop")
            self.store.release()  # not before all have met: a survivor needs the staging folder
        elif kind is None:
            raise error

    # ---- from a signal to the exit ----------------------------------------------------------------
    def _stand_by(self):
        """Run in the thread: listen, and end this life if the main thread does not in time."""
        try:
            self.world.use_device()
            while self.watch.is_late(self.ending):
                self.leave()
        except BaseException as error:  # nobody would hear of a signal, a death or a hang any more
            self.leave(error)

    @property
    def asked(self) -> str:
        """Return why this rank shall stop: what all have agreed on, or the name of a signal; or nothing."""
        return self.agreed or self.watch.signal

    def consult(self) -> None:
        """Agree with all ranks whether to save, and whether to stop; call it on every rank."""
        save = self._is_requested("save") or self.store.overdue
        requests = torch.tensor([save, self._is_requested("stop")]).int()
        save, stop = self.world.all_sum(requests).tolist()
        if save:
            self.save_asked = True
            self._delete_request("save")
        if stop:
            self.agreed = BY_A_PERSON
            self._delete_request("stop")

    def _is_requested(self, name):
        """Return whether a person has made this file; rank 0 alone looks."""
        return self.world.rank == 0 and (self.control / name).exists()

    def _delete_request(self, name):
        """Delete the file of a request that was met."""
        if self.world.rank == 0:
            with suppress(OSError):
                (self.control / name).unlink()

    def leave(self, error: BaseException | None = None) -> None:
        """End this life early, on any thread, and nowhere else: save the newest whole step, exit.

        Returns only if the error is to be raised again, or if another thread ends this life.
        """
        way, cause = self._way_out(error)
        on_main_thread = threading.current_thread() is threading.main_thread()
        if not self.ending.acquire(blocking=on_main_thread):
            return
        is_mistake = isinstance(error, UserError) and not on_main_thread
        if is_mistake or self.agreed and here().speaks:
            dismiss_agent()  # it would start another life

        if not on_main_thread:  # the main thread, if it still moves, must not finish another step
            self.state.lock.acquire(timeout=PEER_SECONDS)
        saved = self._save(way)
        if way is WayOut.PEER_DIED:
            cause = self._end_of_the_peer()
        event, words, raises = way.value
        self.ledger.event(event, step=self.state.progress.step, why=cause)
        is_first = words and self._is_first(saved)
        if is_first:
            killed = self.watch.lifelines.killed
            if killed:  # it could not note its own end
                self.ledger.event("death", rank=killed[0], why=killed[1])
            line = words.format(cause=cause, saved=saved.words, rank=self.world.rank)
            say(line, sys.stdout if way is WayOut.STOPPED else sys.stderr)
            note_reason(line)
        self.ledger.event("left", stepped=round(self.state.progress.stepped, 3))
        if is_first and (way is WayOut.STOPPED or not here().agent):  # else the next life does it
            self.store.copy()

        if not (raises and on_main_thread):
            for act in (*self.on_exit, end_children, sys.stdout.flush, sys.stderr.flush):
                with suppress(Exception):
                    act()
            code = 1
            if isinstance(error, UserError):  # the main thread would raise it again
                code = error.code
            elif self.asked and not raises:
                code = saved.failure or ALL_SAVED
            os._exit(code)  # without destructors, which may wait for a dead peer

    def _way_out(self, error):
        """Return (way, cause) before the save; after an error of a collective wait for news of a death."""
        if isinstance(error, UserError):  # all ranks have it: not a peer's death
            return WayOut.REFUSED if error.code > LAST_TO_SAVE else WayOut.ERROR, in_words(error)
        if self.watch.hang.found.is_set():
            return WayOut.HANG, self.watch.hang.report()
        lifelines = self.watch.lifelines
        if isinstance(error, RuntimeError) and self.world.size > 1:
            lifelines.lost.wait(PEER_SECONDS)  # a collective fails before the thread hears of the end
        # where all are asked to stop, peers that were faster have ended too: only a killed one has died
        if lifelines.find_killed() if self.asked else lifelines.lost.is_set():
            return WayOut.PEER_DIED, ""
        return (WayOut.STOPPED, self.asked) if self.asked else (WayOut.ERROR, in_words(error))

    def _save(self, way):
        """Save what there is; never raise: this life ends in any case."""
        if way is WayOut.REFUSED:
            return Saved()
        step = self.state.progress.step
        already = Saved(f"step {step} was saved already" if step else "no step was made yet")
        try:
            words = self.store.rescue(way.name.lower())
        except Exception as failure:
            code = failure.code if isinstance(failure, UserError) else 4
            if code == FENCED and self.watch.parting:  # all ranks have met: rank 0 has let go of the run
                return already
            return Saved(f"step {step} is not saved: {in_words(failure)}", failure=code)
        return Saved(words, whole=True) if words else already

    def _end_of_the_peer(self):
        """Return the cause after the save: a launcher knows by now how the peer ended."""
        if here().agent and not self.asked:
            self.watch.signalled.wait(AGENT_SECONDS)
        killed = self.watch.lifelines.find_killed(DEATH_SECONDS)
        if not killed:
            return "another process is gone"
        rank, how = killed
        return f"rank {rank} (pid {self.watch.processes[rank]['pid']}) {how}"

    def _is_first(self, saved):
        """Return whether this rank is the first to report this end, of those that see one run folder."""
        if not saved.whole:
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
    """Kill loading processes: one that hangs since its start does not yet end with its rank."""
    for process in active_children():
        process.kill()


def in_words(error):
    """Return one line that names the cause."""
    name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return name + one_line(error)
