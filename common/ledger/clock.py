"""Where the time of a life goes: the parts of its start, then steps and what is between them."""
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from common.ledger.lines import Ledger
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
        self.first = self.opened = self.entered = 0.0  # moments: the first step, its life, the last entry
        self.step, self.evaluating = 0, False
        self.spent: Counter[str] = Counter()    # seconds since the last entry, and
        self.whole: Counter[str] = Counter()    # of this life: read on other threads, name by name
        self.profiler: Any = None
        self.told: Callable | None = None
        self.past = 0.0, 0.0
        self.lap(lap)

    def lap(self, name: str) -> None:
        """The time since the lap before is called `name`."""
        now = time.monotonic()
        self.laps[f"{name}_s"] = round(now - self.mark, 3)
        self.mark = now

    def open(self, ledger: Ledger, trace: str | None = None, told: Callable | None = None,
             past: tuple[float, float] = (0.0, 0.0)) -> None:
        """Time the steps from now on; call on rank 0. `trace` is a file for a profile of a few steps.

        `told` is called once, after the first step. `past`: seconds in steps, and all, of earlier lives.
        """
        self.ledger, self.mark, self.told, self.past = ledger, time.monotonic(), told, past
        self.opened = self.mark
        if trace:
            from torch import profiler
            os.makedirs(os.path.dirname(trace), mode=0o700, exist_ok=True)
            self.profiler = profiler.profile(schedule=profiler.schedule(wait=3, warmup=2, active=5, repeat=1),
                                             on_trace_ready=lambda done: done.export_chrome_trace(trace))
            self.profiler.start()

    def timed(self, batches: Iterable) -> Iterator:
        """The same batches; time between them counts as data_wait, and what follows a step as save_stall."""
        self.add("save_stall")
        for batch in batches:
            self.add("data_wait")
            yield batch
            self.add("save_stall")
        self.add("data_wait")
        self.evaluating = True  # it may follow: a kill in it costs no time of steps
        self.enter()

    def add(self, bucket: str) -> None:
        """The time since the last call goes to this bucket; before the first step it belongs to the start."""
        if self.first:
            now = time.monotonic()
            self.spent[bucket] += now - self.mark
            self.whole[bucket] += now - self.mark
            self.mark = now

    def stepped(self, step: int) -> None:
        """A step is done."""
        if self.ledger is None:
            return
        if self.profiler:
            self.profiler.step()
        self.add("steps")
        now, self.step, self.evaluating = time.monotonic(), step, False
        if not self.first:
            self.ledger.event("first_step", step=step, first_step_s=round(now - self.mark, 3))
            self.first = self.mark = self.entered = now
            if self.told:
                self.told()
        if now - self.entered > min(ENTRY_SECONDS, max(LEAST_SECONDS, ENTRY_SHARE * (now - self.opened))):
            self.enter()

    def evaluated(self) -> None:
        self.add("evaluation")
        self.evaluating = False

    def shares(self) -> dict[str, float]:
        """Goodput of the run so far, and the share of this life that was spent waiting for data."""
        life = max(1e-9, time.time() - self.began)
        return {"goodput": (self.past[0] + self.whole["steps"]) / (self.past[1] + life),
                "data_wait": self.whole["data_wait"] / life}

    def enter(self) -> None:
        """Write down the seconds since the last entry."""
        if self.ledger is not None and self.first and self.spent:
            seconds = {f"{name}_s": round(s, 6) for name, s in self.spent.items() if s}
            self.ledger.event("steps", t=round(time.time() - (time.monotonic() - self.mark), 3), at=self.step,
                              **({"then": "evaluation"} if self.evaluating else {}), **seconds)
            self.spent, self.entered = Counter(), time.monotonic()

    def close(self) -> None:
        """Write down what is left; the profile ends."""
        self.profiler, profiler = None, self.profiler
        if profiler:
            profiler.stop()
        self.enter()


def _process_start():
    """Unix time at which this process was started; now, where /proc does not tell."""
    try:
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        return time.time() - since_boot + this_process()["started"] / os.sysconf("SC_CLK_TCK")
    except (OSError, TypeError, AttributeError):
        return time.time()
