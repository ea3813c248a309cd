"""Ranks leave a loop at one step: each tells that it has left, and waits until all have.

A rank that goes on would wait in a collective for one that has left. It hears of that over the lifelines,
there as well, and ends with an error that names both. One of the two is rank 0, which hears all.
"""

import time

from common.errors import UserError

POLL_SECONDS = 0.01  # between two polls


class Parting:
    """What this rank knows of ranks that have left their loop. `tell` sends over the lifelines."""

    def __init__(self, state, world, tell):
        self.state = state
        self.world = world
        self.tell = tell
        # How often all ranks have met, and the step that this rank computes since then. One value: the thread
        # that hears may read it at any moment.
        self.place = (0, 0)
        self.left = {}  # {rank: the place at which it has left}

    def go_on(self):
        """Note that this rank begins a step, or ends an epoch; UserError if another has left before that."""
        self.place = (self.place[0], self.state.progress.step + 1)
        self._compare()

    def passed(self):
        """Count that all ranks have ended the epoch, or left the loop; the faster may leave the next one."""
        self.place = (self.place[0] + 1, 0)

    def meet(self):
        """Wait for all ranks to leave."""
        store = self.world.store
        if not store:
            return
        met = self.place[0]
        names = [f"left/{met}/{rank}" for rank in range(self.world.size)]
        store.set(names[self.world.rank], "")
        self.tell(f"left {met} {self.world.rank} {self.state.progress.step}")
        while not store.check(names):
            time.sleep(POLL_SECONDS)
        self.passed()

    def hear(self, message):
        """Return whether this message tells that a rank has left; UserError if this one has gone on."""
        word, *numbers = message.split()
        if word != "left":
            return False
        met, rank, step = map(int, numbers)
        self.left[rank] = (met, step)
        self._compare()
        return True

    def _compare(self):
        met, own = self.place
        for rank, (meeting, step) in [*self.left.items()]:
            if meeting == met and step < own:
                raise UserError(
                    f"rank {rank} has left the loop at step {step}, rank {self.world.rank} goes on: "
                    "all leave it at one step, by run.mean(value), say"
                )
