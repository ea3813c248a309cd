"""A net's buffers, what forward moves outside of the gradient: averaged, or under --virtual-ranks summed
along the same tree.
"""
import torch


class Buffers:
    """A net's buffers: every slice finds them as the last step left them; their moves are summed along the
    tree.

    Floating-point ones (running statistics) move by the mean over the samples, counters by what the last
    slice counted: it is never without samples.
    """

    def __init__(self, net, device):
        self.device, buffers = device, list(net.buffers())
        self.kinds, self.numel = [b.is_floating_point() for b in buffers], sum(b.numel() for b in buffers)
        self.dtype = torch.float64 if any(b.dtype == torch.float64 for b in buffers) else torch.float32
        # Where they are, not what they are: a module may put a new tensor there. Walking the modules each
        # time costs 5 %.
        places = {id(b): [] for b in buffers}
        for module in net.modules():
            for name, b in module._buffers.items():
                if b is not None:
                    places[id(b)].append((module._buffers, name))
        self.places = [places[id(b)] for b in buffers]
        self.constants = any(not b.isfinite().all() for b in buffers)  # such as a mask of -inf
        self.no_counts = torch.zeros(len(self._counts(buffers)), dtype=self.dtype, device=device)

    def begin(self, committed):
        """`committed`: the buffers of the last whole step; the live ones are equal to them now."""
        self.committed = list(committed.values())
        if self.numel:
            self.base, self.base_counts = self._statistics(self.committed), self._counts(self.committed)

    def moves(self, weight, counts):
        """[flat tensors]: what this slice's forward has done to the buffers, its part in the mean."""
        if not self.numel:
            return []
        live = self._live()
        new = self._statistics(live)
        moved = new - self.base
        if self.constants:
            moved.masked_fill_(new == self.base, 0.0)  # infinity minus infinity is no number
        return [moved.mul_(weight), (self._counts(live) - self.base_counts).to(self.dtype) if counts else self.no_counts]

    def restore(self):
        if self.numel:
            torch._foreach_copy_(self._live(), self.committed)

    def renew(self):
        """The same, in new memory: the backward of slices still in flight may look at what their forward has
        found.
        """
        for places, committed in zip(self.places, self.committed, strict=True):
            buffer = committed.clone()
            for owner, name in places:
                owner[name] = buffer

    def apply(self, moved):
        """The live buffers are the committed ones and their summed moves."""
        if not self.numel:
            return
        live, middle = self._live(), len(self.base)
        for kind, flat in ((True, self.base + moved[:middle]), (False, self.base_counts + moved[middle:].long())):
            buffers = self._of(live, kind)
            for buffer, piece in zip(buffers, flat.split([b.numel() for b in buffers]) if buffers else (), strict=True):
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
        return torch.cat([b.to(self.device, dtype).flatten() for b in buffers] or [torch.empty(0, dtype=dtype, device=self.device)])


@torch.no_grad()
def average_buffers(state, world, weight):
    """Every replica's buffers move by the mean of what all saw (weighted by samples); counters by what the
    first one counted.
    """
    moved, live = [], dict(state.net.named_buffers())
    for name, base in state.buffers.items():
        # a mask of -inf moves by nan
        delta = (live[name].double() - base.double()).masked_fill_(live[name] == base, 0.0)
        moved.append((delta * (weight if base.is_floating_point() else float(world.replica == 0))).flatten())
    flat = world.sum_over_replicas(torch.cat(moved))
    for (name, base), delta in zip(state.buffers.items(), flat.split([m.numel() for m in moved]), strict=True):
        live[name].copy_(base.double() + delta.view_as(base))
