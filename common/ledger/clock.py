"""Where the time of a life goes: the parts of its start, then the seconds in steps."""
import os
import time
from typing import Any

from common.ledger.lines import Ledger

ENTRY_EVERY = 10.0      # seconds between two entries in the ledger: a kill loses no more than that


class Clock:
    """Starts when the process started, so that the first lap includes the imports."""

    def __init__(self, lap: str) -> None:
        self.laps: dict[str, float] = {}
        self.began = round(_process_start(), 3)
        self.mark = self.began
        self.ledger: Ledger | None = None
        self.entered: float | None = None
        self.profiler: Any = None
        self.steps_s = 0.0
        self.lap(lap)

    def lap(self, name: str) -> None:
        """The time since the lap before is called `name`."""
        now = time.time()
        self.laps[f"{name}_s"] = round(now - self.mark, 3)
        self.mark = now

    def open(self, ledger: Ledger, trace: str | None = None) -> None:
        """Time the steps from now on; call on rank 0. `trace` is a file for a profile of a few steps."""
        self.ledger, self.mark = ledger, time.time()
        if trace:
            from torch import profiler
            os.makedirs(os.path.dirname(trace), mode=0o700, exist_ok=True)
            self.profiler = profiler.profile(schedule=profiler.schedule(wait=3, warmup=2, active=5, repeat=1),
                                             on_trace_ready=lambda done: done.export_chrome_trace(trace))
            self.profiler.start()

    def stepped(self, step: int) -> None:
        """A step is done; time between two steps counts towards the next one unless `pause` was called."""
        if self.ledger is None:
            return
        now = time.time()
        if self.profiler:
            self.profiler.step()
        if self.entered is None:
            self.ledger.event("first_step", step=step, first_step_s=round(now - self.mark, 3))
            self.entered = now
        else:
            self.steps_s += now - self.mark
        self.mark = now
        if now - self.entered > ENTRY_EVERY:
            self.close(step)

    def pause(self) -> None:
        """Restart the timer: the time since the last step, of an evaluation or a save, is not step time."""
        self.mark = time.time()

    def close(self, step: int | None = None) -> None:
        """Write down the seconds in steps; without a step, the profile ends too."""
        if step is None and self.profiler:
            self.profiler.stop()
        if self.ledger is not None and self.steps_s:
            self.ledger.event("steps", steps_s=round(self.steps_s, 3), **({"at": step} if step else {}))
            self.steps_s, self.entered = 0.0, time.time()


def _process_start():
    """Unix time at which this process was started; now, where /proc does not tell."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
        with open("/proc/uptime", "rb") as file:
            up = float(file.read().split()[0])
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
