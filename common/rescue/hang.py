"""A run hangs if no rank makes progress; one that waits for another's evaluation or a slow disk does not.

From a hang to its report: the ranks tell over the lifelines that they move. If none does for the limit, each
prints where it stands and tells rank 0. Rank 0 waits some seconds for all, and names those that are silent.
"""

import sys
import threading
import time
import traceback

from common.errors import say
from common.rescue.alarm import HANG_SECONDS, PLACES_SECONDS, Alarm

FRAMES = 6  # of a stack that are printed
MOVED = "moved"  # a message over a lifeline; any other one is the number of a rank that stands still


class Hang:
    """For how long no rank has moved; once that is too long, `found` is set, and ranks print their places."""

    def __init__(self, state, world, tell):
        self.state = state
        self.world = world
        self.tell = tell  # a message over the lifelines
        self.limit = state.opts.hang_timeout or HANG_SECONDS
        self.heartbeat = state.heartbeat
        self.still = 0.0  # seconds since any rank made progress
        self.moved = 0.0  # when this rank last sent that it moves
        self.found = Alarm()
        self.stand = set()  # ranks that have told that they stand still

    def count(self, seconds):
        """Count these seconds, if this rank has not moved in them; after too many it stands still."""
        self.still += seconds
        if self.state.heartbeat != self.heartbeat:
            self.heartbeat = self.state.heartbeat
            self.still = 0.0
            self._tell_move()
        elif self.still >= self.limit:
            self._stand_still()

    def hear(self, message):
        """Hear that another rank moves, or stands still."""
        if message == MOVED:
            self.still = 0.0
            if self.world.rank == 0:
                self._tell_move()
        else:
            self.stand.add(int(message))
            self._stand_still()

    def _tell_move(self):
        now = time.monotonic()
        if now - self.moved >= self.limit / 10:
            self.moved = now
            self.tell(MOVED)

    def _stand_still(self):
        """Print where this rank is; then wait for the others, or for rank 0's end."""
        if self.found.is_set():
            return
        rank = self.world.rank
        frame = sys._current_frames()[threading.main_thread().ident]
        say(f"rank {rank} is here:\n{''.join(traceback.format_stack(frame, FRAMES))}", sys.stderr)
        self.stand.add(rank)
        self.tell(str(rank))
        self.found.sound(PLACES_SECONDS if rank == 0 else 2 * PLACES_SECONDS)

    def report(self):
        """Say which ranks are silent; rank 0 alone has heard of all."""
        text = f"no progress for {self.limit:.0f} s at step {self.state.progress.step}"
        silent = {*range(self.world.size)} - self.stand
        if silent and self.world.rank == 0:
            text += f"; no sign of life (stopped, cut off, or a lock held in C) of ranks {sorted(silent)}"
        return text
