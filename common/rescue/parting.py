"""Ranks leave a loop at one step: each tells that it has left, and waits until all have.

A rank that goes on would wait in a collective for one that has left. It answers over the lifelines, from
there as well; so the one that has left ends with an error that names both.
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
        self.answer = ""  # of one that goes on

    def go_on(self):
        """This rank begins a step, or ends an epoch."""
        self.place = (self.place[0], self.state.progress.step + 1)
        self._answer()

    def passed(self):
        """All ranks have ended the epoch, or left the loop: who is faster may leave the next one already."""
        self.place = (self.place[0] + 1, 0)

    def meet(self):
        """Waits for all ranks to leave; UserError if one goes on."""
        store = self.world.store
        if not store:
            return
        met = self.place[0]
        names = [f"left/{met}/{rank}" for rank in range(self.world.size)]
        store.set(names[self.world.rank], "")
        self.tell(f"left {met} {self.world.rank} {self.state.progress.step}")
        while not store.check(names):
            if self.answer:
                raise UserError(
                    f"{self.answer}\nall ranks leave it at one step: "
                    "decide by run.mean(value), which is the same on all of them"
                )
            time.sleep(POLL_SECONDS)
        self.passed()

    def hear(self, message):
        """Whether this message of another rank is one of these."""
        word, _, rest = message.partition(" ")
        if word == "left":
            met, rank, step = map(int, rest.split())
            self.left[rank] = (met, step)
            self._answer()
        elif word == "goes":
            self.answer = rest
        return word in ("left", "goes")

    def _answer(self):
        met, own = self.place
        for rank, (meeting, step) in [*self.left.items()]:
            if meeting == met and step < own:
                self.tell(
                    f"goes rank {rank} has left the loop at step {step}, rank {self.world.rank} goes on"
                )
