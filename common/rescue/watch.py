"""A thread of each rank hears a signal, the end of another rank, and a hang, whatever the main thread does.

Rank 0 has a connection to each rank, a lifeline: the kernel ends it with either process. Over it the ranks
tell that they move, so a rank that waits for another's evaluation, or for a slow disk, does not hang. If none
moves for the limit, each prints where it stands and tells rank 0, which names those that are silent.
"""
import contextlib
import faulthandler
import functools
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import nn

from common.errors import say
from common.options import Options
from common.place import end_of, here, machine_id
from common.world import World, gather_texts, lifelines

# USR1: Slurm's early warning; HUP: the terminal is gone
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STEP_SECONDS = 10.0         # for a signalled main thread to end its step; the agent kills after 30
PEER_SECONDS = 1.0          # for the main thread to end its step after a peer's end
DEATH_SECONDS = 0.5         # until a launcher knows how its process has ended
LEAST_LIMIT_SECONDS = 60.0  # without progress: the hang limit, or
LIMIT_STEPS = 20            # so many steps at the pace of this life, if that is longer
OPENING_SECONDS = 600.0     # the limit before the second step, which may compile
LOOK_SECONDS = 1.0
LATE_SECONDS = 1.5          # a look that comes so late: this process was stopped, or its machine slept
PLACES_SECONDS = 5.0        # for all ranks to tell where they are
LOCKED_SECONDS = 600.0      # at least so long without any Python thread: then faulthandler ends this process
SILENT = "gives no sign of life (stopped, cut off, or a lock held in C)"
MOVED = "moved"             # messages over a lifeline; any other one is a rank and its place
LOST = "lost"


class Updates(Protocol):
    """What a GPU has still to do."""

    def settle(self) -> None: ...


class State(Protocol):
    """What this room asks of the TrainState."""

    net: nn.Module
    opts: Options
    step: int
    epoch: int
    position: int
    progress: int   # grows with each step, with each part of an evaluation, and while a save moves

    @property
    def updates(self) -> Updates: ...

    @property
    def stepped(self) -> float: ...  # when the last step ended

    @property
    def whole(self) -> int: ...  # the newest step whose update is made

    @property
    def finished(self) -> bool: ...

    @property
    def steps_per_epoch(self) -> int: ...

    @property
    def total_steps(self) -> int: ...


class Death(NamedTuple):
    """How another rank has ended."""

    rank: int = -1
    pid: int = 0
    how: str = ""
    killed: bool = False

    @property
    def words(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) {self.how}" if self.how else \
            "a process of another machine is gone"


class Pace:
    """When some rank last moved, and how long none may; a limit of 0 follows the pace of steps."""

    def __init__(self, state: State, given_limit: float) -> None:
        self.state = state
        self.given_limit = given_limit
        self.progress = state.progress
        self.moved = time.monotonic()
        self.first: tuple[float, int] | None = None  # when this life had made its first step, and which

    @property
    def limit(self) -> float:
        """Seconds without progress that are a hang."""
        if self.given_limit:
            return self.given_limit
        if self.first is None or self.state.step == self.first[1]:
            return OPENING_SECONDS
        began, step = self.first
        return max(LEAST_LIMIT_SECONDS, LIMIT_STEPS * (self.moved - began) / (self.state.step - step))

    def has_moved(self) -> bool:
        """Whether this rank has moved since the last look."""
        if self.state.progress == self.progress:
            return False
        self.progress = self.state.progress
        self.moved = time.monotonic()
        self.first = self.first or (self.moved, self.state.step)
        return True


class Watch:
    """The thread; it calls `end` if the main thread does not come: with the report of a hang, or ""."""

    def __init__(self, state: State, world: World, end: Callable[[str], None]) -> None:
        self.state = state
        self.world = world
        self.end = end
        self.asked = ""                  # the name of the signal by which this rank shall stop
        self.lost = threading.Event()    # another rank has ended
        self.death: Death | None = None  # of a rank of this machine, once it is known how
        self.parting = False             # no step is left: this rank waits for the others, or has met them
        self.stopped = threading.Event()
        self.deadline = math.inf         # then this thread ends the life
        self.told = 0.0                  # when this rank last told that it moves
        self.standing: dict[int, str] = {}  # {rank: its place} in a hang
        self.main = threading.get_ident()
        limit = state.opts.hang_timeout or OPENING_SECONDS * state.opts.compile  # any step may compile
        self.pace = Pace(state, limit)

    def start(self) -> None:
        """Call it on every rank, in the main thread."""
        texts = gather_texts(self.world, f"{os.getpid()} {machine_id()}")
        self.processes = [tuple(map(int, text.split())) for text in texts]  # (pid, machine) of each rank
        lines = lifelines(self.world.store, self.world.rank, self.world.size) if self.world.size > 1 else []
        self.lines = {line.fileno(): line for line in lines}
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        # with any handler, Python writes the signal's number to the pipe that `_run` reads
        self.handlers = {}
        for number in STOP:
            nohup = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
            if not nohup or here().agent:  # an agent hears it all the same, and kills a process that stays
                self.handlers[number] = signal.signal(number, lambda *_: None)
        self.wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        # A forked process (for loading, say) inherits the pipe; a signal to it alone must not stop this rank.
        os.register_at_fork(after_in_child=functools.partial(signal.set_wakeup_fd, -1))
        self.thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self.thread.start()

    def stop(self) -> None:
        """From now on nothing here ends this process; call it in the main thread."""
        self.stopped.set()
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        with contextlib.suppress(BlockingIOError):  # it is full: the thread is awake already
            os.write(self.pipe[1], bytes(1))  # to close it is not enough: forked processes have it open too
        self.thread.join()  # a thread that wakes in a dying interpreter aborts it
        for line in self.lines.values():
            line.close()
        for end in self.pipe:
            os.close(end)

    def _run(self):
        self.poll = select.poll()  # select() takes no file number over 1023
        for number in (self.pipe[0], *self.lines):
            self.poll.register(number, select.POLLIN)
        while not self.stopped.is_set():
            limit = self.pace.limit
            # C code that holds Python's lock stops this thread, too, but not faulthandler's
            faulthandler.dump_traceback_later(max(2 * limit, LOCKED_SECONDS), exit=True, file=2)
            began = time.monotonic()
            seconds = min(LOOK_SECONDS, limit / 10, self.deadline - began)
            for number, _ in self.poll.poll(max(0.0, 1000 * seconds)):
                if number == self.pipe[0]:
                    self._hear_signals(os.read(number, 64))
                elif number in self.lines:
                    self._hear(number)
            late = time.monotonic() - began
            if late > LOOK_SECONDS + LATE_SECONDS:  # SIGSTOP, a debugger: no hang
                self.pace.moved += late
            if self.pace.has_moved():
                self._tell_move()
            if not self.standing and time.monotonic() - self.pace.moved >= self.pace.limit:
                self._stand()
            if time.monotonic() >= self.deadline:
                break
        faulthandler.cancel_dump_traceback_later()  # a slow disk is no hang
        if not self.stopped.is_set():
            self.end(self._report() if self.standing else "")

    # ---- signals ----------------------------------------------------------------------------------
    def _hear_signals(self, numbers):
        """The main thread ends its step, then sees `asked`; this thread waits for it, but not for ever."""
        stops = [number for number in numbers if number in STOP]
        if stops and not self.asked:
            self.asked = signal.Signals(stops[0]).name
            self._leave_within(0.0 if self.parting else STEP_SECONDS)

    def _leave_within(self, seconds):
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    # ---- other ranks ------------------------------------------------------------------------------
    def _hear(self, number):
        """What another rank tells, or its end."""
        data = b""
        with contextlib.suppress(OSError):
            data = self.lines[number].recv(1 << 16)
        if not data:
            self.poll.unregister(number)
            self.lines.pop(number).close()
            self._lose()
            return
        for message in data.decode().splitlines():
            rank, _, place = message.partition(" ")
            if message == LOST:
                self._lose()
            elif message == MOVED:
                self.pace.moved = time.monotonic()
                if self.world.rank == 0:
                    self._tell_move()
            elif rank.isdecimal():
                if not self.standing:
                    self._stand()
                self.standing[int(rank)] = place

    def _tell(self, message):
        """Rank 0 tells all, another rank tells rank 0."""
        for line in self.lines.values():
            with contextlib.suppress(OSError):
                line.send(f"{message}\n".encode(), socket.MSG_DONTWAIT)

    def _tell_move(self):
        now = time.monotonic()
        if now - self.told >= self.pace.limit / 10:
            self.told = now
            self._tell(MOVED)

    def _lose(self):
        """A rank has ended."""
        if self.standing:
            self._leave_within(0.0)  # rank 0 has told of the hang
        elif not self.parting and not self.lost.is_set():
            self.lost.set()
            self._tell(LOST)
            self._leave_within(PEER_SECONDS)
            self.find_death(DEATH_SECONDS)

    def find_death(self, seconds: float = 0.0) -> Death:
        """How a rank of this machine has ended, one that was killed if any; its launcher knows it late."""
        deadline = time.monotonic() + seconds
        while True:
            deaths = []
            for rank, (pid, machine) in enumerate(self.processes):
                ending = end_of(pid) if machine == machine_id() else None
                if ending:
                    deaths.append(Death(rank, pid, *ending))
            death = max(deaths, key=lambda death: death.killed, default=Death())
            if death.how not in ("", "is gone"):
                self.death = self.death or death
            if self.death or time.monotonic() >= deadline:
                return self.death or death
            time.sleep(0.002)

    # ---- a hang -----------------------------------------------------------------------------------
    def _stand(self):
        """This rank tells where it stands; then it waits for the others' places, or for rank 0's end."""
        frame = sys._current_frames()[self.main]
        place = f"step {self.state.step}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        stack = "".join(traceback.format_stack(frame)[-6:]).rstrip()
        rank = self.world.rank
        say(f"rank {rank} is here:\n{stack}", sys.stderr)
        self.standing[rank] = place
        self._tell(f"{rank} {place}")
        if self.world.size == 1:
            self._leave_within(0.0)
        else:
            self._leave_within(PLACES_SECONDS if rank == 0 else 2 * PLACES_SECONDS)

    def _report(self):
        """Who is where; rank 0 alone knows of all."""
        ranks = range(self.world.size) if self.world.rank == 0 else [0, self.world.rank]
        groups: dict[str, list[str]] = {}
        for rank in ranks:
            groups.setdefault(self.standing.get(rank, SILENT), []).append(str(rank))
        places = [f"rank {','.join(names)}: {place}" for place, names in groups.items()]
        fact = f"no progress for {self.pace.limit:.0f} s at step {self.state.step}"
        return "; ".join([fact, *places])
