"""Where the time of a life goes: the laps of its start, then the seconds in steps; entered in the ledger by
rank 0.
"""
import os
import time

EVERY = 10.0            # seconds between two entries: a kill costs the account no more than that


class Clock:
    """Starts when the process did, so that the imports are in the first lap."""

    def __init__(self, lap):
        self.laps, self.began = {}, round(_process_start(), 3)
        self.mark = self.began
        self.ledger = self.entered = self.profiler = None
        self.steps_s = 0.0
        self.lap(lap)

    def lap(self, name):
        now = time.time()
        self.laps[f"{name}_s"] = round(now - self.mark, 3)
        self.mark = now

    def open(self, ledger, trace=None):
        """From here on, on the rank that keeps the account, steps are timed; `trace` is a file for a profile
        of a few.
        """
        self.ledger, self.mark = ledger, time.time()
        if trace:
            from torch import profiler
            os.makedirs(os.path.dirname(trace), mode=0o700, exist_ok=True)
            self.profiler = profiler.profile(schedule=profiler.schedule(wait=3, warmup=2, active=5, repeat=1),
                                             on_trace_ready=lambda found: found.export_chrome_trace(trace))
            self.profiler.start()

    def stepped(self, step):
        """A step is done; what lies between two of them (data, evaluation, saving) counts as the next one's
        unless `pause`d.
        """
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
        if now - self.entered > EVERY:
            self.close(step)

    def pause(self):
        """What follows until the next step's begin is no step: call it again when it is over."""
        self.mark = time.time()

    def close(self, step=None):
        if step is None and self.profiler:
            self.profiler.stop()
        if self.ledger is not None and self.steps_s:
            self.ledger.event("steps", steps_s=round(self.steps_s, 3), **({"at": step} if step else {}))
            self.steps_s, self.entered = 0.0, time.time()


def _process_start():
    """Unix time at which this process was started; now, where the system does not tell."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
        with open("/proc/uptime", "rb") as file:
            up = float(file.read().split()[0])
        return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
