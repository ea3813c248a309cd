"""Updates of the weights that a GPU has still to make: the program launches them, and does not wait.

An update stands in the GPU's stream behind the collectives of its gradient. If one of these hangs, the update
never runs; and while this process lives nothing aborts a collective. Each update leaves an event before and
after it: the weights are those before the first update that has not begun, once the others have ended.
"""
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

AHEAD = 2  # updates that the program may launch before the GPU has made them


class Updates:
    """Those that were launched, the oldest first; on CPUs (`gpu` is None) an update is made at once."""

    def __init__(self, gpu: torch.device | None):
        self.gpu, self.side, self.ahead = gpu, torch.cuda.Stream(gpu) if gpu else None, AHEAD if gpu else 0
        self.launched: list[tuple] = []  # (facts before it, event before it, event after it)

    @contextlib.contextmanager
    def one(self, facts: Callable) -> Iterator[None]:
        """Around the kernels of an update; `facts()` tells the state before it."""
        if self.gpu is None:
            yield
            return
        before, begun, ended = facts(), torch.cuda.Event(), torch.cuda.Event()
        begun.record()
        yield
        ended.record()
        self.launched.append((before, begun, ended))

    def waiting(self) -> tuple[dict[str, Any], Any] | None:
        """(facts, event) from before the first update that has not begun; waits for those that have."""
        for facts, begun, ended in list(self.launched):
            if not begun.query():
                return facts, begun
            ended.synchronize()
        return None

    def settle(self, left: int = 0) -> None:
        """Waits until all but `left` are made; never while a lock is held, as a collective may hang."""
        while len(self.launched) > left:
            self.launched[0][2].synchronize()
            del self.launched[0]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """For a rescue: a stream of its own; the usual one may stand behind a dead collective."""
        with contextlib.ExitStack() as stack:
            if self.gpu is not None:
                stack.enter_context(torch.cuda.device(self.gpu))
                stack.enter_context(torch.cuda.stream(self.side))
            yield
