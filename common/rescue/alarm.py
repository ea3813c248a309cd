"""What the thread of a rescue publishes: something has happened, and this life must have ended by then."""

import math
import threading
import time


class Alarm(threading.Event):
    """A reason to end this life; the main thread has until `deadline` to do it."""

    deadline = math.inf

    def sound(self, seconds):
        """Set it; of several deadlines the first one stays."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        self.set()
