"""A net's buffers (BatchNorm's running statistics, counters), which forward changes without a gradient.

Replicas average them; under --virtual-ranks each slice's change is summed along the tree of the gradients.
"""
import torch

from common.training.state import TrainState
from common.world import World


class Buffers:
    """Buffers under --virtual-ranks: every slice starts from those of the last step.

    Floating-point buffers change by the mean over all samples, counters by what the last slice counted,
    because that slice always has samples.
    """

    def __init__(self, net, device, exact=False):
        self.device, buffers = device, list(net.buffers())
        self.kinds, self.numel = [b.is_floating_point() for b in buffers], sum(b.numel() for b in buffers)
        exact = exact or any(b.dtype == torch.float64 for b in buffers)
        self.dtype = torch.float64 if exact else torch.float32
        # Places instead of tensors, because a module may replace a tensor; found once, as it takes time.
        places = {id(b): [] for b in buffers}
        for module in net.modules():
            for name, b in module._buffers.items():
                if b is not None:
                    places[id(b)].append((module._buffers, name))
        self.places = [places[id(b)] for b in buffers]
        self.infinite = any(not b.isfinite().all() for b in buffers)  # such as a mask of -inf
        self.no_counts = torch.zeros(len(self._counts(buffers)), dtype=self.dtype, device=device)

    def begin(self, committed):
        """`committed`: the buffers of the last whole step, which the live ones equal now."""
        self.committed = list(committed.values())
        if self.numel:
            self.base, self.base_counts = self._statistics(self.committed), self._counts(self.committed)

    def moves(self, weight, counts):
        """[flat tensors]: how this slice's forward changed the buffers, by the slice's weight in the mean."""
        if not self.numel:
            return []
        live = self._live()
        new = self._statistics(live)
        moved = new - self.base
        if self.infinite:
            moved.masked_fill_(new == self.base, 0.0)  # infinity minus infinity is nan
        counted = (self._counts(live) - self.base_counts).to(self.dtype) if counts else self.no_counts
        return [moved.mul_(weight), counted]

    def restore(self):
        if self.numel:
            torch._foreach_copy_(self._live(), self.committed)

    def renew(self):
        """Like `restore`, into new tensors: the backward of slices in flight may still need the old ones."""
        for places, committed in zip(self.places, self.committed, strict=True):
            buffer = committed.clone()
            for owner, name in places:
                owner[name] = buffer

    def apply(self, moved):
        """Sets the live buffers to the committed ones plus their summed changes."""
        if not self.numel:
            return
        live, middle = self._live(), len(self.base)
        statistics, counts = self.base + moved[:middle], self.base_counts + moved[middle:].long()
        for floating, flat in ((True, statistics), (False, counts)):
            if buffers := self._of(live, floating):
                for buffer, piece in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(piece.view_as(buffer))

    def _live(self):
        return [owner[name] for (owner, name), *_ in self.places]

    def _of(self, buffers, floating):
        return [b for b, kind in zip(buffers, self.kinds, strict=True) if kind == floating]

    def _statistics(self, buffers):
        return self._flat(self._of(buffers, True), self.dtype)

    def _counts(self, buffers):
        return self._flat(self._of(buffers, False), torch.int64)

    def _flat(self, buffers, dtype):
        none = torch.empty(0, dtype=dtype, device=self.device)
        return torch.cat([b.to(self.device, dtype).flatten() for b in buffers] or [none])


@torch.no_grad()
def average_buffers(state: TrainState, world: World, weight: float) -> None:
    """All replicas' buffers change by the mean of their changes, weighted by samples.

    Counters change by what replica 0 counted.
    """
    moved, live = [], dict(state.net.named_buffers())
    for name, base in state.buffers.items():
        # equal values did not change; of two infinities the difference would be nan
        delta = (live[name].double() - base.double()).masked_fill_(live[name] == base, 0.0)
        moved.append((delta * (weight if base.is_floating_point() else float(world.replica == 0))).flatten())
    flat = world.sum_over_replicas(torch.cat(moved))
    deltas = flat.split([m.numel() for m in moved])
    for (name, base), delta in zip(state.buffers.items(), deltas, strict=True):
        live[name].copy_(base.double() + delta.view_as(base))
