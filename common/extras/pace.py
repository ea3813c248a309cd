"""Names the slow rank: how long each one computes, by the numbers that ranks add up at a logged step anyway.

From a batch to the call of run.step with its loss, or with that of its last piece. No collective is in there
(but for --sync-bn): no rank counts its waiting for a slower one. A GPU's events tell when it came so far.
"""

import time

import torch

from common.device import is_gpu, module_of


class Pace:
    """The seconds in which this rank has computed since the last logged step."""

    def __init__(self, world):
        self.world = world
        self.spans: list[tuple] = []  # each from one moment to another

    def begin(self):
        self.began = self._moment()

    def end(self):
        self.spans.append((self.began, self._moment()))

    def _moment(self):
        device = self.world.device
        if not is_gpu(device):
            return time.monotonic()
        gpu = module_of(device)
        return gpu.current_stream(device).record_event(gpu.Event(enable_timing=True))

    def all_sum(self, totals):
        """Return (the sum over ranks, the slowest rank and by how much), once the GPU has come so far."""
        own = torch.zeros(self.world.size, dtype=totals.dtype)
        for began, ended in self.spans:
            seconds = ended - began if isinstance(began, float) else began.elapsed_time(ended)
            own[self.world.rank] += seconds  # milliseconds of a GPU: only their ratio counts
        self.spans = []
        totals, all_ranks = self.world.all_sum(torch.cat([totals, own])).split([len(totals), len(own)])
        times = all_ranks / all_ranks.median()
        return totals, {"slow_rank": int(times.argmax()), "slow_times": float(times.max())}
