"""Ranks leave a loop at one step: each tells that it has left, and waits until all have.

A rank that goes on would wait in a collective for one that has left. It answers over the lifelines, from
there as well; so the one that has left ends with an error that names both.
"""

import time

from common.errors import UserError

ASK_SECONDS = 0.01  # between two questions


class Parting:
    """What this rank knows of ranks that have left their loop. `tell` sends over the lifelines."""

    def __init__(self, state, world, tell):
        self.state = state
        self.world = world
        self.tell = tell
        self.met = 0  # how often all ranks have left a loop together
        self.step = 0  # that this rank computes, or has computed
        self.left = {}  # {rank: its last step}
        self.answer = ""

    def go_on(self):
        """This rank begins a step, or ends an epoch; UserError if another has left before that."""
        self.step = self.state.progress.step + 1
        self._answer()
        if self.answer:
            raise error_of(self.answer)

    def passed(self):
        """All ranks have ended the epoch."""
        self.step = 0

    def meet(self):
        """Waits for all ranks to leave; UserError if one goes on."""
        if self.world.size == 1:
            return
        step = self.state.progress.step
        store = self.world.store
        names = [f"left/{self.met}/{rank}" for rank in range(self.world.size)]
        store.set(names[self.world.rank], str(step))
        self.tell(f"left {self.met} {self.world.rank} {step}")
        while not store.check(names):
            if self.answer:
                raise error_of(self.answer)
            time.sleep(ASK_SECONDS)
        self.met += 1  # a message of before may still come
        self.left.clear()

    def hear(self, message):
        """Whether this message of another rank is one of these."""
        word, _, rest = message.partition(" ")
        if word == "left":
            meeting, rank, step = map(int, rest.split())
            if meeting == self.met:
                self.left[rank] = step
                self._answer()
        elif word == "goes":
            self.answer = rest
        return word in ("left", "goes")

    def _answer(self):
        for rank, step in [*self.left.items()]:
            if step < self.step:
                self.answer = f"rank {rank} has left the loop at step {step}, rank {self.world.rank} goes on"
                self.tell(f"goes {self.answer}")


def error_of(fact):
    return UserError(
        f"{fact}\nall ranks leave it at one step: decide by run.mean(value), which is the same on all of them"
    )
