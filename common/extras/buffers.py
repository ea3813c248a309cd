"""The mean of what forwards change in a net's buffers: over replicas, or slices (bits.py)."""

import torch


class MeanOfBuffers:
    """Replicas, and slices, change floating-point buffers by the mean over all samples, counters by what one
    of them counts: right for running means and for numbers of forwards, as torch's own layers keep them.

    Changes are computed in double precision, which holds every counter below 2**53.
    """

    def __init__(self, statistics):
        self.statistics = statistics
        numbers = _numbers(statistics.committed.values())
        sizes = [b.numel() for b in numbers]
        self.numel = sum(sizes)
        self.kinds = {b.dtype for b in numbers}
        device = numbers[0].device if numbers else None
        self.flat = torch.empty(self.numel, dtype=torch.float64, device=device)
        self.views = [row.view(b.shape) for row, b in zip(self.flat.split(sizes), numbers, strict=True)]
        self.means = self._flat([torch.full_like(b, b.is_floating_point()) for b in numbers]).bool()

    def average(self, world, weight):
        self.apply(world.all_sum(self.moves(weight, world.rank == world.size - 1)))

    @torch.no_grad()
    def moves(self, weight, counts, kind=torch.float64):
        """Return how a forward has changed the buffers, by its weight in the mean, as one flat tensor."""
        base = self._flat(self.statistics.committed.values())
        new = self._flat(self.statistics.live())
        # equal values did not change; a change from infinity or nan, whose differences are nan, counts from 0
        same = (new == base) | (new.isnan() & base.isnan())
        moved = (new - finite(base)).masked_fill_(same, 0.0).to(kind)
        return moved.mul_(torch.where(self.means, weight, float(counts)).to(kind))

    @torch.no_grad()
    def apply(self, moved):
        """Set the live buffers to the committed ones plus their summed changes."""
        moved = moved.to(self.flat)
        base = self._flat(self.statistics.committed.values())
        self.flat.copy_(torch.where(moved != 0, finite(base) + moved, base))
        self.statistics.copy(_numbers(self.statistics.live()), self.views)

    def _flat(self, buffers):
        """Return all numbers of these buffers, as a new flat tensor."""
        self.statistics.copy(self.views, _numbers(buffers))
        return self.flat.clone()


def finite(numbers):
    """Return the same, with 0 for infinity and nan."""
    return numbers.nan_to_num(0.0, 0.0, 0.0)


def _numbers(buffers):
    """Return the buffers; a complex one as pairs of real numbers."""
    return [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
