"""What a GPU has still to do: the program launches updates of the weights, and times, and does not wait.

An update stands in the GPU's stream behind the collectives of its gradient. If one of these hangs, the update
never runs; and while this process lives nothing aborts a collective. Each update leaves an event before and
after it: the weights are those before the first update that has not begun, once the others have ended.
"""
import contextlib
import time
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
        stream = torch.cuda.current_stream()
        before, begun = facts(), stream.record_event()
        yield
        self.launched.append((before, begun, stream.record_event()))

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
        if self.gpu is None:
            yield
            return
        with torch.cuda.device(self.gpu), torch.cuda.stream(self.side):
            yield


class OwnTime:
    """Adds up `seconds` of a rank's work without its waits for other ranks, by which a straggler is found.

    On a GPU a moment is an event in its stream, and `spans` are those that it has not passed yet.
    """

    def __init__(self, gpu: torch.device | None):
        self.gpu, self.seconds, self.spans = gpu, 0.0, list[tuple]()

    def now(self) -> Any:
        if self.gpu is None:
            return time.monotonic()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def add(self, began: Any) -> None:
        """The work since then."""
        self.spans.append((began, self.now()))
        while self.spans and (self.gpu is None or self.spans[0][1].query()):
            began, ended = self.spans.pop(0)
            self.seconds += ended - began if self.gpu is None else began.elapsed_time(ended) / 1000
