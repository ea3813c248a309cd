"""A thread of each rank hears a signal, the end of another rank, and a hang, whatever the main thread does.

Rank 0 has a connection to each rank, a lifeline: the kernel ends it with either process. Over it the ranks
tell that they move, so a rank that waits for another's evaluation, or for a slow disk, does not hang. If none
moves for the limit, each prints where it stands and tells rank 0, which names those that are silent. Then all
save and leave with code 1 (rescue.py).
"""

import faulthandler
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from common.errors import say
from common.place import end_of, here, this_process
from common.world import gather, lifelines

# USR1: Slurm's early warning; HUP: the terminal is gone
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STEP_SECONDS = 10.0  # for a signalled main thread to end its step; plain torchrun kills after 30
PEER_SECONDS = 1.0  # for the main thread to end its step after a peer's end
DEATH_SECONDS = 0.5  # until a launcher knows how its process has ended
HANG_SECONDS = 600.0  # without progress, if --hang-timeout does not say
LOOK_SECONDS = 1.0
PLACES_SECONDS = 5.0  # for all ranks to tell where they are
LOCKED_SECONDS = 86_400.0  # without any Python thread: then faulthandler ends this process, stopped or not
SILENT = "gives no sign of life (stopped, cut off, or a lock held in C)"
MOVED = "moved"  # a message over a lifeline; any other one is a rank and its place


class Death(NamedTuple):
    """How another rank has ended."""

    words: str = "a process of another machine is gone"
    rank: int = -1
    how: str = ""
    killed: bool = False


class Watch:
    """The thread; it calls `end` if the main thread does not come: with the report of a hang, or ""."""

    def __init__(self, state, world, end):
        self.state = state
        self.world = world
        self.lines = []
        self.end = end
        self.asked = ""  # the name of the signal by which this rank shall stop
        self.signalled = threading.Event()  # it has come
        self.lost = threading.Event()  # another rank has ended
        self.death = Death()
        self.parting = False  # no step is left: this rank waits for the others, or has met them
        self.leaving = False  # the main thread ends this life
        self.stopped = False
        self.deadline = math.inf  # then this thread ends the life
        self.told = 0.0  # when this rank last told that it moves
        self.places = {}  # of ranks that stand still, once the run hangs
        self.main = threading.get_ident()
        self.selector = selectors.DefaultSelector()
        self.limit = state.opts.hang_timeout or HANG_SECONDS
        self.progress = state.heartbeat
        self.still = 0.0  # seconds since any rank made progress

    def start(self):
        """Call it on every rank, in the main thread."""
        world = self.world
        process = this_process()
        self.processes = gather(world, [process["pid"], process["host"], process["machine"]])
        if world.store:
            self.lines = lifelines(world.store, world.rank, world.size)
        for line in self.lines:
            os.register_at_fork(after_in_child=line.close)  # a process for loading must not keep it open
            self.selector.register(line, selectors.EVENT_READ, self._hear)
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        self.selector.register(self.pipe[0], selectors.EVENT_READ, self._hear_signals)
        # with any handler, Python writes the signal's number to the pipe that `_run` reads
        self.handlers = {}
        for number in STOP:
            nohup = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
            if not nohup or here().agent:  # an agent hears it all the same, and kills a process that stays
                self.handlers[number] = signal.signal(number, lambda *_: None)
        self.wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        # A forked process (for loading, say) inherits the pipe; a signal to it alone must not stop this rank.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        self.thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self.thread.start()

    def stop(self):
        """From now on nothing here ends this process; call it in the main thread."""
        self.stopped = True
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        with suppress(BlockingIOError):  # it is full: the thread is awake already
            os.write(self.pipe[1], bytes(1))  # to close it is not enough: forked processes have it open too
        self.thread.join()  # a thread that wakes in a dying interpreter aborts it
        self.selector.close()
        for end in self.pipe:
            os.close(end)

    def _run(self):
        self.world.use_device()
        while not self.stopped:
            # C code that holds Python's lock stops this thread, too, but not faulthandler's, whose clock runs
            # on while a process is stopped
            faulthandler.dump_traceback_later(LOCKED_SECONDS, exit=True, file=2)
            began = time.monotonic()
            seconds = max(0.0, min(LOOK_SECONDS, self.limit / 10, self.deadline - began))
            for key, _ in self.selector.select(LOOK_SECONDS if self.leaving else seconds):
                key.data(key.fileobj)
            if self.leaving:  # a slow disk is no hang; but a signal still means a planned change
                continue
            now = time.monotonic()
            self.still += min(now - began, seconds)  # no more: a stopped process is no hang
            if self.state.heartbeat != self.progress:
                self.progress = self.state.heartbeat
                self.still = 0.0
                self._tell_move()
            elif self.still >= self.limit and not self.places:
                self._stand_still()
            if now >= self.deadline:
                break
        faulthandler.cancel_dump_traceback_later()
        if not self.stopped:
            self.end(self._report() if self.places else "")

    # ---- signals ----------------------------------------------------------------------------------
    def _hear_signals(self, pipe):
        """The main thread ends its step, then sees `asked`; this thread waits for it, but not for ever."""
        stops = [number for number in os.read(pipe, 64) if number in STOP]
        if stops and not self.asked:
            self.asked = signal.Signals(stops[0]).name
            self.signalled.set()
            self._leave_within(0.0 if self.parting else STEP_SECONDS)

    def _leave_within(self, seconds):
        self.deadline = min(self.deadline, time.monotonic() + seconds)

    # ---- other ranks ------------------------------------------------------------------------------
    def _hear(self, line):
        """What another rank tells, or its end."""
        data = b""
        with suppress(OSError):
            data = line.recv(1 << 16)
        if not data:
            self.selector.unregister(line)
            self._lose()
        for message in data.decode().splitlines():
            rank, _, place = message.partition(" ")
            if message == MOVED:
                self.still = 0.0
                if self.world.rank == 0:
                    self._tell_move()
            else:
                if not self.places:
                    self._stand_still()
                self.places[int(rank)] = place

    def _tell(self, message):
        """Rank 0 tells all, another rank tells rank 0."""
        for line in self.lines:
            with suppress(OSError):
                line.send(f"{message}\n".encode(), socket.MSG_DONTWAIT)

    def _tell_move(self):
        now = time.monotonic()
        if now - self.told >= self.limit / 10:
            self.told = now
            self._tell(MOVED)

    def _lose(self):
        """A rank has ended."""
        if self.places:
            self._leave_within(0.0)  # rank 0 has told of the hang
        elif not self.parting and not self.lost.is_set():
            self.lost.set()
            for line in self.lines:  # rank 0 passes it on
                with suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
            self._leave_within(PEER_SECONDS)
            self.find_death(DEATH_SECONDS)

    def find_death(self, seconds=0.0):
        """How a rank of this machine has ended, one that was killed if any; its launcher knows it late."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, (pid, *machine) in enumerate(self.processes):
                ending = end_of(pid) if machine == self.processes[self.world.rank][1:] else None
                if ending and (ending.killed or not self.death.how):
                    self.death = Death(f"rank {rank} (pid {pid}) {ending.words}", rank, *ending)
            if self.death.killed or time.monotonic() >= deadline:
                return self.death
            time.sleep(0.002)

    # ---- a hang -----------------------------------------------------------------------------------
    def _stand_still(self):
        """This rank tells where it is; then it waits for the others' places, or for rank 0's end."""
        frame = sys._current_frames()[self.main]
        stack = "".join(traceback.format_stack(frame)[-6:]).rstrip()
        rank = self.world.rank
        say(f"rank {rank} is here:\n{stack}", sys.stderr)
        self.places[rank] = (
            f"step {self.state.progress.step}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        )
        self._tell(f"{rank} {self.places[rank]}")
        self._leave_within(PLACES_SECONDS if rank == 0 else 2 * PLACES_SECONDS)

    def _report(self):
        """Who is where; rank 0 alone knows of all."""
        ranks = range(self.world.size) if self.world.rank == 0 else [0, self.world.rank]
        groups = {}
        for rank in ranks:
            groups.setdefault(self.places.get(rank, SILENT), []).append(str(rank))
        places = [f"rank {','.join(names)}: {place}" for place, names in groups.items()]
        return "; ".join([f"no progress for {self.limit:.0f} s at step {self.state.progress.step}", *places])
