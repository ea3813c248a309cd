"""Whether the ranks still move: a hang is noticed, named with its stack and ended; a slow rank is only named.

Looked at from the rescue thread once a second, so a step pays nothing. A hang is when no rank moves: who
waits for one that still evaluates, or waits for a slow disk, does not hang. Three things can stand still, and
each is seen by something that cannot stand still with it: the main thread (this thread sees it), every thread
of the process, by a lock held in C (faulthandler's own C thread dumps the stacks and ends the process), the
process itself, stopped or cut off (its peers see it, and the agent kills it).
"""
import contextlib
import faulthandler
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path

LEAST = 60.0            # seconds without progress that are nobody's fault
STEPS = 20              # or so many median steps, if that is longer
OPENING = 600.0         # the first step may compile
TRIES = 5               # times in a row that rank 0's store may not answer
# limits without any Python thread until C code ends the process: longer than people stop one and go on
BLIND = 10
LATE = 1.5              # seconds between two beats, or this process did not run meanwhile
SILENT = 2.0  # seconds between two signs of a living process are fewer, on a machine with a core to spare
SLOW = 2.0              # a rank whose own work takes so many times the others' median is named ...
AGAIN = 60.0            # ... so often, in seconds


class Watchdog:
    """`beat()` every second from a thread of its own; returns what to say when this rank has hung, else None.
    """

    def __init__(self, state, world, hang_timeout, note):
        self.state, self.world, self.given, self.note = state, world, hang_timeout, note
        self.main = threading.main_thread().ident
        self.moved, self.first, self.alive = time.monotonic(), None, state.progress
        self.beaten, self.lock = self.moved, threading.Lock()
        self.steps = []  # (moment, step) of the latest beats that moved
        self.told, self.named, self.thread = threading.Event(), -AGAIN, None
        self.views, self.heard = [], {}  # what each rank told last, and since when
        self.others = self.moved  # when another rank was last seen to move
        if world.size > 1:
            self.thread = threading.Thread(target=self._tell, daemon=True, name="pulse")
            self.thread.start()

    @property
    def limit(self):
        if self.given:
            return self.given
        if self.first is None or self.state.progress <= self.first + 1:
            return OPENING
        return max(LEAST, STEPS * self._median())

    def beat(self):
        now = time.monotonic()
        # SIGSTOP, a debugger, a machine that slept: no hang
        stood, self.beaten = max(0.0, now - self.beaten - LATE), now
        self.moved, self.others = self.moved + stood, self.others + stood
        with self.lock:
            if self.told.is_set():
                return None  # watched no more
            # no stderr, nowhere to dump to
            with contextlib.suppress(ValueError, OSError, RuntimeError, AttributeError):
                # re-set each second: due if nobody can
                faulthandler.dump_traceback_later(BLIND * self.limit + 1, exit=True)
        if self.state.progress != self.alive:
            self.first = self.first if self.first is not None else self.alive
            self.alive, self.moved = self.state.progress, now
            self.steps = [*self.steps[-20:], (now, self.state.step)]
            return None
        if now - max(self.moved, self.others) < self.limit:
            return None
        frame = sys._current_frames().get(self.main)
        stack = "".join(traceback.format_stack(frame)[-6:]) if frame else ""
        return (f"rank {self.world.rank}: no progress for {now - self.moved:.0f} s at step {self.state.step}; {self._others()}\n"
                f"its main thread stands here:\n{stack}").rstrip()

    def doze(self):
        """Ctrl-Z: stopped by a person until `fg`, however long; nothing may be due by then. Call on the
        thread that beats.
        """
        faulthandler.cancel_dump_traceback_later()
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)  # it stands still somewhere in here
        self.moved = self.beaten = time.monotonic()

    def stop(self, patience=5):
        """Nothing here ends this process from now on."""
        with self.lock:
            self.told.set()
            faulthandler.cancel_dump_traceback_later()
        if self.thread:
            self.thread.join(patience)  # a thread that wakes in a dying interpreter aborts it

    def _median(self):
        rates = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(self.steps, self.steps[1:], strict=False) if b[1] > a[1]]
        return statistics.median(rates) if rates else 0.0

    # ---- what the ranks tell each other, over a connection of its own: the main thread may be blocked in the
    # other one
    def _tell(self):
        """Each rank's latest (step, beats, own seconds, place, moves) under its name; rank 0 reads all, names
        the slow.
        """
        line, seen, beats, refused = None, {}, 0, 0
        while refused < TRIES and not self.told.wait(min(1.0, self.limit / 10)):
            try:
                line = line or self.world.new_store_client()
                frame, beats = sys._current_frames().get(self.main), beats + 1
                place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "?"
                line.set(f"pulse/{self.world.rank}",
                         f"{self.state.step} {beats} {self.state.own_seconds:.3f} {place} {self.state.progress}")
                if self.world.rank == 0 or self._worried():
                    self._listen(line)
                if self.world.rank == 0:
                    seen = self._name_the_slow(seen)
                refused = 0
            except Exception:  # a busy machine, or the store died with rank 0
                # an answer that came too late must not meet another question
                line, refused = None, refused + 1

    def _listen(self, line):
        names = [f"pulse/{rank}" for rank in range(self.world.size)]
        there = names if line.check(names) else [name for name in names if line.check([name])]
        told = dict(zip(there, line.multi_get(there), strict=True)) if there else {}
        self.views = [told[name].decode().split() if name in told else None for name in names]
        for rank, view in enumerate(self.views):
            old = self.heard.get(rank, (None,))[0]
            if old != view:
                self.heard[rank] = (view, time.monotonic())
            if old and view and old[4] != view[4] and rank != self.world.rank:
                self.others = time.monotonic()

    def _worried(self):
        return time.monotonic() - self.moved > self.limit / 2

    def _others(self):
        """Where everybody is: the one that hangs stands elsewhere than those that wait for it."""
        if not self.views:
            return "alone" if self.world.size == 1 else "rank 0's store does not answer"
        places, now = {}, time.monotonic()
        for rank, view in enumerate(self.views):
            place = f"step {view[0]}, {view[3]}" if view else "never heard of"
            silent = now - self.heard.get(rank, (None, now))[1]
            if silent > max(SILENT, self.limit / 4):
                place += f", gives no sign of life for {silent:.0f} s (stopped, cut off, or a lock held in C)"
            places.setdefault(place, []).append(rank)
        return "; ".join(f"rank {','.join(map(str, ranks))}: {place}" for place, ranks in places.items())

    def _name_the_slow(self, seen):
        """Compare the seconds of own work a step since the last look; waiting for others is not in them."""
        now, pace = time.monotonic(), {}
        for rank, view in enumerate(self.views):
            step, own = (int(view[0]), float(view[2])) if view else (0, 0.0)
            old = seen.get(rank, (step, own))
            if step - old[0] >= 5:
                pace[rank] = (own - old[1]) / (step - old[0])
        if len(pace) < self.world.size:
            return {r: (int(v[0]), float(v[2])) for r, v in enumerate(self.views) if v} | seen
        slowest = max(pace, key=pace.get)
        typical = statistics.median(v for r, v in pace.items() if r != slowest)
        if pace[slowest] > SLOW * typical and pace[slowest] - typical > 0.01 and now - self.named > AGAIN:
            self.named = now
            self.note(f"rank {slowest} is a straggler: {pace[slowest] * 1e3:.0f} ms of own work a step, "
                      f"{typical * 1e3:.0f} ms on the others")
        return {r: (int(v[0]), float(v[2])) for r, v in enumerate(self.views)}
