"""The signals that ask a rank to stop.

From a signal to its name: Python writes the number of a signal that has a handler into a pipe. The thread of
the rescue reads it there, whatever the main thread does. The handler itself does nothing: an exception there
could cut an optimizer step.
"""

import os
import signal
from contextlib import suppress

from common.place import here
from common.rescue.alarm import Alarm

# USR1: Slurm's early warning; HUP: the terminal is gone
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Signals:
    """Catches them from now on; make it in the main thread."""

    def __init__(self):
        self.heard = Alarm()
        self.name = ""  # of the first one
        self.pipe = os.pipe()
        os.set_blocking(self.pipe[1], False)
        self.handlers = {}
        for number in STOP:
            nohup = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
            if not nohup or here().agent:  # an agent hears it all the same, and kills a process that stays
                self.handlers[number] = signal.signal(number, lambda *_: None)
        self.wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        # A forked process (for loading, say) inherits the pipe; a signal to it alone must not stop this rank.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def hear(self, seconds):
        """Reads what has come; the main thread has so many seconds to end its step, and with it this life."""
        stops = [number for number in os.read(self.pipe[0], 64) if number in STOP]
        if stops and not self.name:
            self.name = signal.Signals(stops[0]).name
            self.heard.sound(seconds)

    def restore(self):
        """Gives the signals back, and wakes the thread; call it in the main thread."""
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        with suppress(BlockingIOError):  # it is full: the thread is awake already
            os.write(self.pipe[1], bytes(1))  # to close it is not enough: forked processes have it open too
