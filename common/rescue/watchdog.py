"""Finds ranks that hang, and names ranks that are slow.

A thread looks once a second, so a step pays nothing. The run hangs when no rank makes progress; a rank that
waits for another's evaluation or for a slow disk does not hang. Three things can hang: the main thread
(this thread notices); the whole process in C code that holds Python's lock (guard.py ends it); a stopped
or disconnected process (its peers notice, the agent kills it).
"""
import json
import socket
import statistics
import sys
import threading
import time
import traceback
from pathlib import Path

from common.errors import say
from common.rescue.guard import Guard

LEAST_LIMIT_SECONDS = 60.0     # without progress: the hang limit, or
LIMIT_STEPS = 20               # so many median steps, if that is longer
OPENING_SECONDS = 600.0        # the limit before the first step, and where any step may compile
STORE_TRIES = 5                # in a row that rank 0's store may not answer
LOCKED_LIMITS = 2              # without any Python thread: then guard.py ends this process
LATE_SECONDS = 1.5             # between two beats: more means that this process did not run
SILENT_SECONDS = 2.0           # without a sign of life: a process with a core to spare is faster
STRAGGLER_RATIO = 2.0          # own work of a straggler, compared with the others' median
STRAGGLER_EVERY_SECONDS = 60.0
SHOWN_RANKS, NAMED_RANKS = 16, 4   # of those at one place; with the names of their hosts


class Watchdog:
    """Call `beat()` every second from a thread; it prints a hang and returns True."""

    def __init__(self, state, world, hang_timeout, note):
        self.state, self.world, self.given, self.note = state, world, hang_timeout, note
        self.main = threading.main_thread().ident
        self.progress, self.first_progress = state.progress, None  # at the last beat, before the first move
        self.beaten = self.moved = self.others_moved = time.monotonic()  # the latest beat and moves
        self.steps = []  # (moment, step) of the latest beats that found progress
        self.lock, self.stopped, self.guard = threading.Lock(), threading.Event(), Guard()
        self.views, self.heard = [], {}  # on rank 0: what each rank wrote last, and when that changed
        self.moves, self.odd, self.places = "", [], "rank 0's store does not answer"  # as rank 0 tells all
        self.host, self.hosts = socket.gethostname(), {}  # on rank 0: of each rank, if there are several
        self.beats, self.seen = 0, {}  # on rank 0: (step, own seconds) of each rank when it compared them
        self.named, self.thread = -STRAGGLER_EVERY_SECONDS, None  # the moment a straggler was named
        if world.size > 1:
            self.thread = threading.Thread(target=self._exchange, daemon=True, name="watchdog")
            self.thread.start()

    @property
    def limit(self):
        """Seconds without progress that are a hang."""
        if self.given:
            return self.given
        if self.first_progress is None or self.state.progress <= self.first_progress + 1:
            return OPENING_SECONDS
        return max(LEAST_LIMIT_SECONDS, LIMIT_STEPS * self._median())

    def beat(self):
        """Whether this rank hangs; then `report` is printed."""
        now = time.monotonic()
        paused, self.beaten = max(0.0, now - self.beaten - LATE_SECONDS), now
        # SIGSTOP, a debugger, a machine that slept: no hang
        self.moved, self.others_moved = self.moved + paused, self.others_moved + paused
        with self.lock:
            if self.stopped.is_set():
                return False
            self.guard.beat(LOCKED_LIMITS * self.limit + 1)
        if self.state.progress != self.progress:
            if self.first_progress is None:
                self.first_progress = self.progress
            self.progress, self.moved = self.state.progress, now
            self.steps = [*self.steps[-20:], (now, self.state.step)]
            return False
        if now - max(self.moved, self.others_moved) < self.limit:
            return False
        if report := self.report():
            say(report, sys.stderr)
        return True

    def report(self):
        """Where all ranks are, in words; empty if another rank of this machine waits at the same place."""
        if self.world.local_rank and self.world.rank not in self.odd:
            return ""
        frame = sys._current_frames().get(self.main) if self.world.rank in (0, *self.odd) else None
        stack = "".join(traceback.format_stack(frame)[-6:]) if frame else ""
        seconds = f"{time.monotonic() - self.moved:.0f} s at step {self.state.step}"
        places = self.places if self.world.size > 1 else "alone"
        told = f"rank {self.world.rank}: no progress for {seconds}; {places}"
        return f"{told}\nits main thread is here:\n{stack}".rstrip() if stack else told

    def stop(self, patience=5):
        """From now on nothing here ends this process."""
        with self.lock:
            self.stopped.set()
            self.guard.stop()
        if self.thread:
            self.thread.join(patience)  # a thread that wakes in a dying interpreter aborts it

    def _median(self):
        pairs = zip(self.steps, self.steps[1:], strict=False)
        rates = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs if b[1] > a[1]]
        return statistics.median(rates) if rates else 0.0

    # ---- what the ranks tell each other, over a second connection: the main thread may block the first one
    def _exchange(self):
        """Writes this rank's (step, beats, own seconds, place, progress); rank 0 reads them and tells all.

        So a second costs rank 0's store a few requests a rank, however many ranks are worried.
        """
        client, refused = None, 0
        while refused < STORE_TRIES and not self.stopped.wait(min(1.0, self.limit / 10)):
            try:
                client = client or self.world.new_store_client()
                self._tell(client)
                refused = 0
            except Exception:  # a busy machine, or the store died with rank 0
                client, refused = None, refused + 1  # a late answer must not meet another question

    def _tell(self, client):
        frame, state = sys._current_frames().get(self.main), self.state
        place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "?"
        self.beats += 1
        client.set(f"pulse/{self.world.rank}",
                   f"{state.step} {self.beats} {state.own.seconds:.3f} {place} {state.progress} {self.host}")
        if self.world.rank == 0:
            self._read_all(client)
            client.set("pulse", json.dumps([self.moves, self.odd, self.places]))
            self._name_the_slow()
        elif time.monotonic() - self.moved > self.limit / 2:
            moves, self.odd, self.places = json.loads(client.get("pulse"))
            if self.moves not in ("", moves):
                self.others_moved = time.monotonic()
            self.moves = moves

    def _read_all(self, client):
        names = [f"pulse/{rank}" for rank in range(self.world.size)]
        there = names if client.check(names) else [name for name in names if client.check([name])]
        told = dict(zip(there, client.multi_get(there), strict=True)) if there else {}
        self.views = [told[name].decode().split() if name in told else None for name in names]
        for rank, view in enumerate(self.views):
            old = self.heard.get(rank, (None,))[0]
            if old != view:
                self.heard[rank] = (view, time.monotonic())
            if old and view and old[4] != view[4] and rank != self.world.rank:
                self.others_moved = time.monotonic()
        self.moves = str(sum(int(view[4]) for view in self.views if view))
        hosts = {rank: view[5] for rank, view in enumerate(self.views) if view}
        self.hosts = hosts if len(set(hosts.values())) > 1 else {}
        self._find_places()

    def _find_places(self):
        """The place of each rank: the one that hangs is at another place than those that wait for it."""
        places, now = {}, time.monotonic()
        for rank, view in enumerate(self.views):
            place = f"step {view[0]}, {view[3]}" if view else "never heard of"
            silent = now - self.heard.get(rank, (None, now))[1]
            if silent > max(SILENT_SECONDS, self.limit / 4):
                place += f", gives no sign of life for {silent:.0f} s (stopped, cut off, or a lock held in C)"
            places.setdefault(place, []).append(rank)
        groups = sorted(places.values(), key=len)
        waiting = groups[-1] if len(groups) == 1 or len(groups[-1]) > len(groups[-2]) else []
        self.odd = [rank for ranks in groups for rank in ranks if ranks is not waiting][:SHOWN_RANKS]
        self.places = "; ".join(f"rank {self._names(ranks)}: {place}" for place, ranks in places.items())

    def _name_the_slow(self):
        """Compares the seconds of own work a step since the last call; waiting for others does not count."""
        now, pace, seen = time.monotonic(), {}, self.seen
        read = {rank: (int(view[0]), float(view[2])) for rank, view in enumerate(self.views) if view}
        for rank, (step, own) in read.items():
            old = seen.get(rank, (step, own))
            if step - old[0] >= 5:
                pace[rank] = (own - old[1]) / (step - old[0])
        if len(pace) < self.world.size:
            self.seen = read | seen
            return
        self.seen = read
        slowest = max(pace, key=pace.get)
        typical = statistics.median(v for r, v in pace.items() if r != slowest)
        slow = pace[slowest] > STRAGGLER_RATIO * typical and pace[slowest] - typical > 0.01
        if slow and now - self.named > STRAGGLER_EVERY_SECONDS:
            self.named = now
            self.note(slowest, f"rank {self._names([slowest])} is a straggler: {pace[slowest] * 1e3:.0f} ms "
                      f"of own work a step, {typical * 1e3:.0f} ms on the others")

    def _names(self, ranks):
        named = self.hosts if len(ranks) <= NAMED_RANKS else {}
        shown = ",".join(f"{rank} ({named[rank]})" if rank in named else str(rank)
                         for rank in ranks[:SHOWN_RANKS])
        return shown + f" and {len(ranks) - SHOWN_RANKS} more" * (len(ranks) > SHOWN_RANKS)
