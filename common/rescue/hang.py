"""Finds out that a run hangs: no rank has made progress for a while. Then all save, and leave.

A step pays nothing: a thread looks once a second, and tells the others through a counter in the life's store.
A rank that waits for another's evaluation, or for a slow disk, does not hang. Three things can: a main thread
(this thread tells where it is), a process whose C code holds Python's lock (faulthandler's own thread prints
the stacks and ends it), a process that is stopped or cut off (the others tell that it is silent).
"""
import contextlib
import faulthandler
import json
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import nn

from common.options import Options
from common.world import World

LEAST_LIMIT_SECONDS = 60.0  # without progress: the hang limit, or
LIMIT_STEPS = 20            # so many steps at the pace of this life, if that is longer
OPENING_SECONDS = 600.0     # the limit before the second step, which may compile
LOOK_SECONDS = 1.0
LATE_SECONDS = 1.5          # a look that comes so late: this process was stopped, or its machine slept
ANSWER_SECONDS = 5.0        # in which a store that is alive answers
PLACES_SECONDS = 5.0        # for all ranks to tell where they are
LOCKED_SECONDS = 600        # at least so long without any Python thread: then faulthandler ends this process
SHOWN_STACKS = 4


class Updates(Protocol):
    """What a GPU has still to do."""

    ahead: int  # updates that the program may launch before the GPU has made them

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


class Hang:
    """A thread that calls `end(report)` if the run hangs; a `limit` of 0 follows the pace of steps."""

    def __init__(self, state: State, world: World, limit: float, end: Callable[[str], None]) -> None:
        self.state = state
        self.world = world
        self.given_limit = limit
        self.end = end
        self.main = threading.get_ident()
        self.moved = time.monotonic()  # the last moment at which some rank was known to move
        self.progress = state.progress
        self.first: tuple[float, int] | None = None  # when this life had made its first step, and which
        self.told = self.heard = 0  # progress of this rank and of all, as the store's counter knows it
        self.client = None  # of the life's store, for this thread
        self.stopped = threading.Event()
        self._set_alarm()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="hang")
        self.thread.start()

    @property
    def limit(self) -> float:
        """Seconds without progress that are a hang."""
        if self.given_limit:
            return self.given_limit
        if self.first is None or self.state.step == self.first[1]:
            return OPENING_SECONDS
        began, step = self.first
        return max(LEAST_LIMIT_SECONDS, LIMIT_STEPS * (self.moved - began) / (self.state.step - step))

    def stop(self, patience: float = 5.0) -> None:
        """From now on nothing here ends this process."""
        self.stopped.set()
        faulthandler.cancel_dump_traceback_later()
        if threading.current_thread() is not self.thread:
            self.thread.join(patience)  # a thread that wakes in a dying interpreter aborts it

    def _watch(self):
        asleep = time.monotonic()
        while not self.stopped.wait(min(LOOK_SECONDS, self.limit / 10)):
            awake = time.monotonic()
            if awake - asleep > LOOK_SECONDS + LATE_SECONDS:  # SIGSTOP, a debugger: no hang
                self.moved += awake - asleep
            self._set_alarm()
            self._look()
            if time.monotonic() - self.moved >= self.limit:
                report = self._report()
                if not self.stopped.is_set():
                    self.end(report)
                return
            asleep = time.monotonic()

    def _set_alarm(self):
        with contextlib.suppress(ValueError, OSError, RuntimeError, AttributeError):  # there is no stderr
            faulthandler.dump_traceback_later(max(2 * self.limit, LOCKED_SECONDS), exit=True)

    def _look(self):
        """Whether this rank has moved, or another one: that is asked only if this one stands still."""
        now = time.monotonic()
        if self.state.progress != self.progress:
            self.progress = self.state.progress
            self.moved = now
            if self.first is None:
                self.first = now, self.state.step
            if now - self.told > self.limit / 10:
                self.told = now
                self._ask(lambda store: store.add("moves", 1))
        elif now - self.moved > self.limit / 2:
            moves = self._ask(lambda store: store.add("moves", 0)) or self.heard
            if self._ask(lambda store: store.add("hangs", 0)):
                self.moved = -math.inf  # another rank has found it
            elif moves != self.heard:
                self.heard = moves
                self.moved = now

    def _ask(self, question):
        """The store's answer, over a connection of its own; None if it gives none within ANSWER_SECONDS.

        On a thread: a store that has died with rank 0 fails, one whose process is stopped never answers.
        """
        answers = []

        def ask():
            with contextlib.suppress(RuntimeError):
                self.client = self.client or self.world.new_store_client()
                answers.append(question(self.client))

        if self.world.size > 1:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(ANSWER_SECONDS)
        if answers:
            return answers[0]
        self.client = None  # a late answer must not meet another question
        return None

    # ---- where all ranks are ----------------------------------------------------------------------
    def _report(self):
        """In words; empty if another rank tells. The first one that finds the hang waits for the others."""
        frame = sys._current_frames().get(self.main)
        stack = "".join(traceback.format_stack(frame)[-6:])
        place = f"step {self.state.step}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        fact = f"no progress for {self.limit:.0f} s at step {self.state.step}"
        if self.world.size == 1:
            return f"{fact}\nits main thread is here:\n{stack}".rstrip()
        mine = json.dumps([place, stack])
        number = self._ask(lambda store: store.set(f"hangs/{self.world.rank}", mine) or store.add("hangs", 1))
        if number is None:
            fact += "; rank 0's store does not answer"
            return f"{fact}\nrank {self.world.rank} is here:\n{stack}".rstrip()
        if number > 1:
            self._wait_for(["hangs/told"], 2 * PLACES_SECONDS)
            return ""
        names = [f"hangs/{rank}" for rank in range(self.world.size)]
        self._wait_for(names, PLACES_SECONDS)
        silent = [name for name in names if not self._ask(lambda store, name=name: store.check([name]))]
        places = [None if name in silent else json.loads(self._ask(lambda store, name=name: store.get(name)))
                  for name in names]
        self._ask(lambda store: store.set("hangs/told", ""))
        return fact + "; " + in_words(places)

    def _wait_for(self, names, seconds):
        deadline = time.monotonic() + seconds
        while not self._ask(lambda store: store.check(names)) and time.monotonic() < deadline:
            time.sleep(0.1)


def in_words(places: list[list[str] | None]) -> str:
    """Where the ranks are, and the stacks of those that are elsewhere than most: the others wait for them."""
    groups: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        words = place[0] if place else "gives no sign of life (stopped, cut off, or a lock held in C)"
        groups.setdefault(words, []).append(rank)
    lines = ["; ".join(f"rank {','.join(map(str, ranks))}: {words}" for words, ranks in groups.items())]
    most = max(map(len, groups.values()))
    for ranks in groups.values():
        place = places[ranks[0]]
        if place and (len(ranks) < most or len(groups) == 1) and len(lines) <= SHOWN_STACKS:
            lines.append(f"rank {ranks[0]} is here:\n{place[1].rstrip()}")
    return "\n".join(lines)
