"""Signals in, a survivor's checkpoint out; no collectives.

In data parallelism every rank holds the whole state, and between two steps all states are equal. So one
survivor is enough: every rank that is alive tries to save the last whole step before it leaves. A collective
that raises (gloo) ends in `__exit__`. Where collectives hang (NCCL), a thread notices a death (a connection
ends), a stop (a signal), and another one a hang. The Python signal handler does nothing: an exception there
could cut an optimizer step in two. All ways lead to `end`, which does what ENDS says of the reason.

A stop: the first rank that hears a signal names the step after which all ranks stop, in the life's store. So
all make it, and none waits for another's collective in vain. A file RUN/control/stop is seen by rank 0 at a
logged step, and the sum over ranks of that step tells all.
"""
import contextlib
import enum
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
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from common.errors import UserError, dismiss_agent, say
from common.ledger import Ledger
from common.options import end_of, machine_id
from common.place import here
from common.rescue.hang import OPENING_SECONDS, Hang, State
from common.world import WATCHED, World, gather_texts, lifelines

# USR1: Slurm's early warning; HUP: the terminal is gone
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STEP_SECONDS = 10.0        # for a signalled main thread to end its step; the agent kills after 30
PEER_SECONDS = 1.0         # from a peer's end until all know: those in a collective, and those that hang
AGENT_SECONDS = 2.0        # after a peer's end, for the agent's signal: it tells a planned change
ZOMBIE_SECONDS = 0.05      # from a connection's end until the process behind it tells how it ended
CONTROLS = ("save", "stop")  # files in RUN/control/


class Reason(enum.Enum):
    """Why a life ends before its training does."""

    STOPPED = "a person or a launcher asks for it"
    PEER_DIED = "another rank has ended"
    HANG = "no rank makes progress"
    LOADER_DIED = "a process that loads for this rank has been killed"
    ERROR = "this rank has failed"
    MISTAKE = "a person must mend something"
    UNSAVED = "saves fail"
    BROKEN = "this state must not be saved"
    FENCED = "another job has taken the run"


class End(NamedTuple):
    """What a reason leads to."""

    code: int | None  # exit code; None: the error is raised again and has its own (1 for a crash)
    saves: bool
    event: str        # in the ledger
    speakers: str     # "first": one line a run folder, "each": this rank in any case
    words: str        # a line of stdout for a stop, else of stderr


ENDS = {
    Reason.STOPPED: End(143, True, "stop", "first", "stopped on {cause}: {saved}"),
    Reason.PEER_DIED: End(1, True, "", "first", "{cause}; {saved}"),
    Reason.HANG: End(1, True, "hang", "each", "{saved}; {cause}"),  # a rank without a cause is silent
    Reason.LOADER_DIED: End(1, True, "error", "each", "rank {rank}: {cause}; {saved}"),
    Reason.ERROR: End(None, True, "error", "each", "rank {rank}: {cause}; {saved}"),
    Reason.MISTAKE: End(None, True, "error", "first", "{saved}"),
    Reason.UNSAVED: End(None, False, "", "", ""),
    Reason.BROKEN: End(None, False, "", "", ""),
    Reason.FENCED: End(None, False, "", "", ""),
}
MISTAKES = {4: Reason.UNSAVED, 5: Reason.BROKEN, 6: Reason.FENCED}  # by exit code; any other: MISTAKE


class Store(Protocol):
    """What is asked of the CheckpointStore."""

    def rescue(self, state: Any, why: str) -> str: ...  # the store asks more of a state than this room

    def release(self) -> None: ...


class Rescue:
    """Holds the run while it trains: `with Rescue(...) as rescue`, and check `rescue.asked` each step."""

    def __init__(self, store: Store, state: State, world: World, ledger: Ledger,
                 closing: Iterable[Callable[[], None]] = ()) -> None:
        self.store = store
        self.state = state
        self.world = world
        self.ledger = ledger
        self.closing = closing  # called before this process ends early
        self.asked = ""         # why this rank shall stop: the name of a signal, or of a file in RUN/control/
        self.stop_at = 0        # after this step
        self.wanted: set[str] = set()  # what this rank has heard and not all ranks
        self.save_asked = False        # all ranks have heard it
        self.parting = False           # no step is left: this rank waits for the others, or has met them
        self.ending = threading.Lock()  # taken for good by the thread that ends this life
        self.watch = Watch(self)

    # ---- a good day -------------------------------------------------------------------------------
    def __enter__(self) -> "Rescue":
        with contextlib.suppress(OSError):
            self._control("").mkdir(mode=0o700, exist_ok=True)
        self.world.watched()
        self.watch.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stops = self.asked and self.state.step >= self.stop_at
        if error is None and not stops:
            error = self._part()
        if error is not None or stops:
            self.end(self._reason_of(error), error=error)  # returns if the error is to be raised again
        else:
            self.ending.acquire()
        self.watch.stop()
        if error is None:
            if self.world.rank == 0:
                self.ledger.event("done", life=self.world.life, step=self.state.step)
            self._forget("stop")
            self.store.release()  # not before all have met: a survivor needs the staging folder

    def _part(self):
        """Waits until all ranks have saved their last step; returns the error if a peer has died."""
        self.parting = True  # nothing is left to finish: a signal ends this wait at once
        try:
            self.world.barrier("end", WATCHED)  # the last save may take long; a hang is ended by `Hang`
        except RuntimeError as error:
            return error

    def all_sum(self, totals: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place; the same collective tells every rank what is wanted on any of them.

        Call it at each logged step, on every rank: rank 0 looks into RUN/control/.
        """
        wanted = set(self.wanted)
        self.wanted -= wanted  # what is heard from here on is for the next sum
        if self.world.rank == 0:
            wanted |= {name for name in CONTROLS if self._control(name).exists()}
        flags = torch.tensor([name in wanted for name in CONTROLS])
        sums = self.world.all_sum(torch.cat([totals.flatten(), flags.to(totals)]))
        totals.copy_(sums[:-len(CONTROLS)].view_as(totals))
        save, stop = sums[-len(CONTROLS):].tolist()
        if save:
            self.save_asked = True
            self._forget("save")
        if stop:
            self.asked = self.asked or "control/stop"
        for name, count in zip(CONTROLS, (save, stop), strict=True):
            if count and self.world.rank == 0:
                self.ledger.event("control", what=name, step=self.state.step + 1)
        return totals

    def told(self, name: str) -> bool:
        """Whether all ranks have agreed on a save; True once, and at the same step on every rank."""
        asked = self.save_asked
        self.save_asked = False
        return asked

    def leave(self) -> None:
        """Saves the whole step and exits; does nothing before the step after which all ranks stop."""
        if self.state.step >= self.stop_at:
            self.state.updates.settle()
            self.end(self._reason_of(None))

    def stop(self, why: str) -> None:
        """After a signal: the first rank that has one names the last step, so that all ranks make it."""
        at = self.state.step + 2 + self.state.updates.ahead
        with contextlib.suppress(RuntimeError):  # rank 0 has gone with its store
            if self.world.size > 1 and not self.watch.lost.is_set():
                self.stop_at = int(self.world.new_store_client().compare_set("stop at", "", str(at)))
        self.asked = why

    def _control(self, name):
        return self.state.opts.run_dir / "control" / name

    def _forget(self, name):
        """A person's wish is done: the file goes."""
        if self.world.rank == 0:
            with contextlib.suppress(OSError):
                self._control(name).unlink()

    # ---- the way out ------------------------------------------------------------------------------
    def _reason_of(self, error):
        """Which reason an error has, or a stop without one; waits for the news of a peer's death."""
        if isinstance(error, UserError):  # all ranks have it, and some have left already
            return MISTAKES.get(error.code, Reason.MISTAKE)
        if isinstance(error, RuntimeError) and self.watch.lines:
            self.watch.lost.wait(PEER_SECONDS)  # a collective fails before the thread hears of the end
        if self.watch.lost.is_set() and not self.asked:
            return Reason.PEER_DIED
        if self.asked:  # by the agent, if a peer was killed; peers that stop faster have ended too
            death = death_here(self.watch.places)
            if death and death.killed:
                self.watch.death = death
            return Reason.PEER_DIED if self.watch.death.killed else Reason.STOPPED
        return Reason.LOADER_DIED if isinstance(error, ChildProcessError) else Reason.ERROR

    def end(self, reason: Reason, cause: str = "", error: BaseException | None = None) -> None:
        """The only way out of a life that ends early, on any thread: saves the newest whole step, exits.

        Returns only if the error is to be raised again, or if another thread ends this life.
        """
        mine = threading.current_thread() is threading.main_thread()
        if not self.ending.acquire(blocking=mine):
            return
        noticed = time.time()
        self.watch.hang.stop(0)  # a slow disk is no hang; and rank 0's store may be dead
        if self.asked == "control/stop" and self.world.local_rank == 0:
            dismiss_agent()  # it would start another life
        way = ENDS[reason]
        cause = cause or self.asked or (in_words(error) if error else "")
        code = way.code
        saved = Saved()
        if way.saves:
            saved = self._save(reason)
            if saved.failure and (reason is Reason.STOPPED or MISTAKES.get(saved.failure) is Reason.BROKEN):
                code = saved.failure
        if way.event:
            self.ledger.event(way.event, life=self.world.life, step=self.state.whole, rank=self.world.rank,
                              why=cause)
        first = saved.here and self._is_first()  # so the rank that has saved tells
        if reason is Reason.PEER_DIED:
            self._await_the_agent()
            if self.asked:
                code = ENDS[Reason.STOPPED].code
        if way.words and not first:
            time.sleep(ZOMBIE_SECONDS)
            first = self._is_first()
        if reason is Reason.PEER_DIED and first:
            cause = self._tell_death()
        if cause and (first or way.speakers == "each"):
            line = way.words.format(cause=cause, saved=saved.words, rank=self.world.rank)
            say(line, sys.stdout if reason is Reason.STOPPED else sys.stderr)
        self._forget("stop")
        if error is not None and way.code is None:
            self._sign_off(noticed)
        else:
            self._exit(code, noticed)

    def _save(self, reason):
        """Never raises: this life ends in any case."""
        step = self.state.whole
        already = Saved(f"step {step} was saved already")
        try:
            words = self.store.rescue(self.state, reason.name.lower())
            return Saved(words, here=True) if words else already
        except Exception as failure:
            code = failure.code if isinstance(failure, UserError) else 4
            if self.parting and MISTAKES.get(code) is Reason.FENCED:  # all have met: rank 0 has let go
                return already
            return Saved(f"step {step} is not saved: {in_words(failure)}", failure=code)

    def _is_first(self):
        """Whether this rank is the first that tells of this end, of those that see one run folder."""
        note = self.state.opts.run_dir / "checkpoints" / f".life-{self.world.life}" / "told"
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # rank 0 has let go of the run
            return self.world.rank == 0
        return True

    def _await_the_agent(self):
        """Waits for a signal: leaving before it would count a planned change of the world as a failure."""
        deadline = time.monotonic() + (AGENT_SECONDS if here().agent else 0)
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.02)

    def _tell_death(self):
        """How the peer has ended, in words, and in the ledger; its launcher may know that only by now."""
        death = self.watch.death
        if not death.killed:
            death = death_here(self.watch.places) or death
        if death.rank < 0:
            return death.how
        self.ledger.death(life=self.world.life, rank=death.rank, why=death.how)
        return f"rank {death.rank} (pid {death.pid}) {death.how}"

    def _exit(self, code, noticed):
        """Exits without destructors, which may wait for a dead peer."""
        for close in self.closing:
            try:
                close()
            except Exception as error:
                say(f"while closing: {error}", sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._sign_off(noticed)
        os._exit(code)

    def _sign_off(self, noticed):
        self.ledger.event("left", life=self.world.life, rank=self.world.rank,
                          stepped=round(self.state.stepped, 3), noticed=round(noticed, 3))


class Saved(NamedTuple):
    """What became of the newest whole step."""

    words: str = ""
    here: bool = False  # this rank has saved it
    failure: int = 0    # exit code


class Death(NamedTuple):
    """Another rank's end, as far as it is known here."""

    rank: int = -1
    pid: int = 0
    how: str = "a process of another machine is gone"
    killed: bool = False


class Watch:
    """A thread that hears signals and the ends of other ranks, even if the main thread is stuck in C."""

    def __init__(self, rescue: Rescue) -> None:
        self.rescue = rescue
        self.world = rescue.world
        self.places: list[list[int]] = []  # (pid, machine) of each rank
        self.lines: list[socket.socket] = []  # end with other ranks
        self.lost = threading.Event()
        self.death = Death()
        self.stack = contextlib.ExitStack()

    def start(self) -> None:
        opts = self.rescue.state.opts
        texts = gather_texts(self.world, f"{os.getpid()} {machine_id()}")
        self.places = [list(map(int, text.split())) for text in texts]
        with contextlib.suppress(OSError, RuntimeError):  # without them a death is a hang
            if self.world.size > 1:
                self.lines = lifelines(self.world.store, self.world.rank, self.world.size)
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        # with any handler, Python writes the signal's number to the pipe that `_run` reads
        for number in (*STOP, signal.SIGUSR2):
            nohup = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
            if not nohup or here().agent:  # an agent hears it all the same, and kills a process that stays
                self.stack.callback(signal.signal, number, signal.signal(number, lambda *_: None))
        old = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        self.stack.callback(signal.set_wakeup_fd, old)
        # A forked process (for loading, say) inherits the pipe; a signal to it alone must not stop this rank.
        os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
        limit = opts.hang_timeout or OPENING_SECONDS * opts.compile  # any step may compile
        self.hang = Hang(self.rescue.state, self.world, limit,
                         lambda report: self.rescue.end(Reason.HANG, report))
        self.thread = threading.Thread(target=self._run, daemon=True, name="rescue")
        self.thread.start()

    def stop(self) -> None:
        """Call it in the main thread, with `rescue.ending` taken."""
        self.stack.close()
        self.hang.stop()
        with contextlib.suppress(BlockingIOError):  # it is full: the thread is awake already
            os.write(self.pipe[1], bytes(1))  # to close it is not enough: forked processes have it open too
        self.thread.join()  # a thread that wakes in a dying interpreter aborts it
        for end in (*self.pipe, *(line.detach() for line in self.lines)):
            os.close(end)

    def _run(self):
        """Reads signals even if the main thread is stuck in C; that thread may first finish its step."""
        rescue = self.rescue
        deadline = math.inf
        signalled = ""
        poll = select.poll()  # select() takes no file number over 1023
        for end in (self.pipe[0], *self.lines):
            poll.register(end, select.POLLIN)
        while not rescue.ending.locked():
            wait = min(1000.0, max(0.0, 1000 * (deadline - time.monotonic())))
            ready = {end for end, _ in poll.poll(wait)}
            numbers = os.read(self.pipe[0], 64) if self.pipe[0] in ready else b""
            if ready - {self.pipe[0]} and not self.lost.is_set():
                for line in self.lines:
                    poll.unregister(line)
                if not rescue.parting:
                    self._lose()
                    deadline = min(deadline, time.monotonic() + PEER_SECONDS)
            if signal.SIGUSR2 in numbers:
                rescue.wanted.add("save")
            stops = [number for number in numbers if number in STOP]
            if stops and not signalled:
                signalled = signal.Signals(stops[0]).name
                # not on this thread: a store that is ending answers late, one that is cut off never
                threading.Thread(target=rescue.stop, args=[signalled], daemon=True).start()
                deadline = min(deadline, time.monotonic() + (0 if rescue.parting else STEP_SECONDS))
            late = time.monotonic() >= deadline  # the main thread did not come: it waits for a dead peer
            if self.lost.is_set() or late:
                rescue.asked = rescue.asked or signalled
            if late:
                rescue.end(rescue._reason_of(None))

    def _lose(self):
        """A rank has ended: rank 0 tells all."""
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.send(b"!", socket.MSG_DONTWAIT)
        all_here = self.world.size == self.world.local_size
        deadline = time.monotonic() + (10 * ZOMBIE_SECONDS if all_here else ZOMBIE_SECONDS)
        death = None
        while death is None and time.monotonic() < deadline:
            time.sleep(0.002)
            death = death_here(self.places)
        self.death = death or Death()
        self.lost.set()


def death_here(places: list[list[int]]) -> Death | None:
    """Of a rank of this machine that has ended, one that was killed if any."""
    deaths = []
    for rank, (pid, machine) in enumerate(places):
        ending = end_of(pid) if machine == machine_id() else None
        if ending:
            deaths.append(Death(rank, pid, ending.words, ending.killed))
    return max(deaths, key=lambda death: death.killed, default=None)


def in_words(error: BaseException) -> str:
    """One line that names the cause; of an error in a loading process, the last line of its traceback."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, UserError | ChildProcessError):
        return lines[0]
    if "Original Traceback" in str(error):
        return lines[-1][:120]
    return f"{type(error).__name__}: {lines[0]}"[:120]
