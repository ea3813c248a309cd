"""What a rank hears of signals, of other ranks and of hangs, on a thread, whatever its main thread does.

It publishes three alarms, each with a deadline: `signalled`, `lifelines.lost` and `hang.found`. rescue.py
decides what follows.

From a signal to its name: Python writes the number of a signal that has a handler into a pipe, which the
thread reads. The handler itself does nothing: an exception there could cut an optimizer step.
"""

import faulthandler
import os
import selectors
import signal
import time
from contextlib import suppress

from common.place import STOP, here, this_process
from common.rescue.alarm import LOCKED_SECONDS, LOOK_SECONDS, STEP_SECONDS, Alarm
from common.rescue.hang import Hang
from common.rescue.lifelines import Lifelines
from common.rescue.parting import Parting
from common.world import gather


class Watch:
    """Open from now on; make it on every rank, in the main thread."""

    def __init__(self, state, world):
        self.processes = gather(world, this_process())
        self.parting = False  # no step is left: the end of a rank is no death, a signal ends this one at once
        self.stopped = False
        self.lifelines = Lifelines(world, self.processes)
        self.hang = Hang(state, world, self.lifelines.tell)
        self.loop = Parting(state, world, self.lifelines.tell)
        self.signal = ""  # the name of the first one
        self.signalled = Alarm()
        self._catch_signals()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.pipe[0], selectors.EVENT_READ, self._hear_signal)
        for line in self.lifelines.lines:
            self.selector.register(line, selectors.EVENT_READ, self._hear_rank)

    def _catch_signals(self):
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        self.handlers = {}
        for number in STOP:
            # nohup; an agent hears it all the same, and kills a process that stays
            if signal.getsignal(number) is not signal.SIG_IGN or here().agent:
                self.handlers[number] = signal.signal(number, lambda *_: None)
        self.wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        # A forked process (for loading, say) inherits the pipe; a signal to it alone must not stop this rank.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def is_late(self, ending):
        """Hear all; return True once a deadline has passed and nobody holds `ending`; False after `stop`."""
        while not self.stopped:
            # C code that holds Python's lock stops this thread, too, but not faulthandler's, whose clock runs
            # on while a process is stopped
            with suppress(RuntimeError):  # it starts a thread, and for a moment there may be no room for one
                faulthandler.dump_traceback_later(LOCKED_SECONDS, exit=True, file=2)
            began = time.monotonic()
            seconds = max(0.0, min(LOOK_SECONDS, self.hang.limit / 10, self.deadline - began))
            for key, _ in self.selector.select(LOOK_SECONDS if ending.locked() else seconds):
                key.data(key.fileobj)
            if ending.locked():  # a slow disk is no hang; but a signal still means a planned change
                continue
            now = time.monotonic()
            self.hang.count(min(now - began, seconds))  # no more: a stopped process is no hang
            if now >= self.deadline:
                return True
        faulthandler.cancel_dump_traceback_later()
        return False

    @property
    def deadline(self):
        """Return the earliest one of the three alarms."""
        return min(self.signalled.deadline, self.lifelines.lost.deadline, self.hang.found.deadline)

    def _hear_signal(self, pipe):
        stops = [number for number in os.read(pipe, 64) if number in STOP]
        if stops and not self.signal:
            self.signal = signal.Signals(stops[0]).name
            self.signalled.sound(0.0 if self.parting else STEP_SECONDS)

    def _hear_rank(self, line):
        messages = self.lifelines.hear(line)
        if messages is not None:
            for message in messages:
                if not self.loop.hear(message):
                    self.hang.hear(message)
            return
        self.selector.unregister(line)
        if self.hang.found.is_set():
            self.hang.found.sound(0.0)  # rank 0 has told of the hang
        elif not self.parting:
            self.lifelines.lose()

    def stop(self, thread):
        """End the thread, so that nothing here ends this life any more; call it in the main thread."""
        self.stopped = True
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        with suppress(BlockingIOError):  # it is full: the thread is awake already
            os.write(self.pipe[1], bytes(1))  # to close it is not enough: forked processes have it open too
        thread.join()  # one that wakes in a dying interpreter aborts it
        self.selector.close()
        for end in self.pipe:
            os.close(end)
