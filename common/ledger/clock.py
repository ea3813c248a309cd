"""Where the time of a life goes: the parts of its start, then steps and what is between them."""
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from common.ledger.ledger import Ledger
from common.options import this_process

ENTRY_SECONDS = 10.0    # between two entries in the ledger, or
ENTRY_SHARE = 0.01      # of a life's age, if that is less: a kill loses no more than that
LEAST_SECONDS = 0.05    # between two entries


class Clock:
    """Starts when the process started, so that the first lap includes the imports.

    Later the time since the last call goes to one bucket of the report: data_wait, steps, evaluation or
    save_stall, which is all that follows a step.
    """

    def __init__(self, lap: str) -> None:
        self.laps: dict[str, float] = {}
        self.began = round(_process_start(), 3)
        self.mark = time.monotonic() - max(0.0, time.time() - self.began)
        self.ledger: Ledger | None = None
        self.after_first_step: Callable[[], None] | None = None
        self.opened = 0.0   # when the steps of this life could begin
        self.entered = 0.0  # the last entry; 0 before the first step
        self.step = 0
        self.spent: Counter[str] = Counter()  # seconds since the last entry
        self.lap(lap)

    def lap(self, name: str) -> None:
        """The time since the lap before is called `name`."""
        now = time.monotonic()
        self.laps[f"{name}_s"] = round(now - self.mark, 3)
        self.mark = now

    def open(self, ledger: Ledger, after_first_step: Callable[[], None] | None = None) -> None:
        """Time the steps from now on; call on rank 0."""
        self.ledger = ledger
        self.after_first_step = after_first_step
        self.mark = time.monotonic()
        self.opened = self.mark

    def timed(self, batches: Iterable) -> Iterator:
        """The same batches; time between them counts as data_wait, and what follows a step as save_stall."""
        self.add("save_stall")
        for batch in batches:
            self.add("data_wait")
            yield batch
            self.add("save_stall")
        self.add("data_wait")
        self.enter(then="evaluation")  # a kill in it costs no time of steps

    def add(self, bucket: str) -> None:
        """The time since the last call goes to this bucket; before the first step it belongs to the start."""
        if self.entered:
            now = time.monotonic()
            self.spent[bucket] += now - self.mark
            self.mark = now

    def stepped(self, step: int) -> None:
        """A step is done."""
        if self.ledger is None:
            return
        self.add("steps")
        now = time.monotonic()
        self.step = step
        if not self.entered:
            self.ledger.event("first_step", step=step, first_step_s=round(now - self.mark, 3))
            self.mark = now
            self.entered = now
            if self.after_first_step:
                self.after_first_step()
        if now - self.entered > min(ENTRY_SECONDS, max(LEAST_SECONDS, ENTRY_SHARE * (now - self.opened))):
            self.enter()

    def enter(self, **more: str) -> None:
        """Write down the seconds since the last entry."""
        if self.ledger is not None and self.spent:
            seconds = {f"{name}_s": round(s, 6) for name, s in self.spent.items() if s}
            moment = time.time() - (time.monotonic() - self.mark)
            self.ledger.event("steps", t=round(moment, 3), at=self.step, **more, **seconds)
            self.spent = Counter()
            self.entered = time.monotonic()

    def close(self) -> None:
        self.enter()


def _process_start():
    """Unix time at which this process was started; now, where /proc does not tell."""
    try:
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - since_boot + this_process()["started"] / os.sysconf("SC_CLK_TCK")
    except (OSError, TypeError, AttributeError):
        return time.time()
