"""A reason to end this life, and how long each part of that may take, in the order in which they pass."""

import math
import threading
import time

# ---- until something is noticed ----
LOOK_SECONDS = 1.0  # between two looks of the watch
HANG_SECONDS = 600.0  # without progress, if --hang-timeout does not say
LOCKED_SECONDS = 86_400.0  # without any Python thread: then faulthandler ends this process, stopped or not
# ---- until the main thread leaves; then the watch's thread does it in its place ----
PLACES_SECONDS = 5.0  # in a hang, for all ranks to tell that they stand still
STEP_SECONDS = 10.0  # after a signal, to end the step; plain torchrun kills after 30
PEER_SECONDS = 1.0  # the same after a peer's end, or to end an update that has begun
# ---- after the save ----
AGENT_SECONDS = 2.0  # after a peer's end, for the agent's signal: it tells a planned change
DEATH_SECONDS = 0.5  # until a launcher knows how its process has ended
SAVER_SECONDS = 0.05  # the rank that has saved speaks first


class Alarm(threading.Event):
    """A reason to end this life; the main thread has until `deadline` to do it."""

    deadline = math.inf

    def sound(self, seconds):
        """Set it; of several deadlines the first one stays."""
        self.deadline = min(self.deadline, time.monotonic() + seconds)
        self.set()
