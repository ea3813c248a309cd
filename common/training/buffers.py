"""A net's buffers (BatchNorm's running statistics, counters), which forward changes without a gradient.

Replicas average them; under --virtual-ranks each slice's change is summed along the tree of the gradients.
"""
import torch
from torch import nn

from common.world import World


class Buffers:
    """`committed` holds those of the last whole step, by name: a checkpoint takes these.

    Floating-point buffers change by the mean over all samples, counters by those of one slice or replica.
    """

    def __init__(self, net: nn.Module):
        self.committed = {name: b.detach().clone() for name, b in net.named_buffers()}
        self.kinds = [b.is_floating_point() for b in self.committed.values()]
        self.numel = sum(b.numel() for b in self.committed.values())
        # Places instead of tensors, because a module may replace a tensor; found once, as it takes time.
        places: dict[int, list] = {id(b): [] for b in net.buffers()}
        for module in net.modules():
            for name, b in module._buffers.items():
                if b is not None:
                    places[id(b)].append((module._buffers, name))
        self.places = list(places.values())

    def take(self) -> None:
        """The live buffers become those of the last whole step."""
        if self.numel:
            torch._foreach_copy_(list(self.committed.values()), self._live())

    def restore(self) -> None:
        if self.numel:
            torch._foreach_copy_(self._live(), list(self.committed.values()))

    def renew(self) -> None:
        """Like `restore`, into new tensors: the backward of slices in flight may still need the old ones."""
        for places, committed in zip(self.places, self.committed.values(), strict=True):
            buffer = committed.clone()
            for owner, name in places:
                owner[name] = buffer

    @torch.no_grad()
    def average(self, world: World, weight: float) -> None:
        """All replicas' buffers change by the mean of their changes, weighted by samples."""
        if self.numel and world.replicas > 1:
            self.begin(world.device, torch.float64)
            self.apply(world.sum_over_replicas(torch.cat(self.moves(weight, world.replica == 0))))

    def begin(self, device: torch.device, dtype: torch.dtype) -> None:
        """Before `moves` and `apply`, which add in this type on this device."""
        self.device, self.dtype, committed = device, dtype, list(self.committed.values())
        if self.numel:
            self.base, self.base_counts = self._flat(committed, True), self._flat(committed, False)

    @torch.no_grad()
    def moves(self, weight: float, counts: bool) -> list[torch.Tensor]:
        """[flat tensors]: how a forward has changed the buffers, by its weight in the mean."""
        if not self.numel:
            return []
        live = self._live()
        new = self._flat(live, True)
        # equal values did not change; of two infinities the difference would be nan
        moved = (new - self.base).masked_fill_(new == self.base, 0.0)
        return [moved.mul_(weight), (self._flat(live, False) - self.base_counts).to(self.dtype).mul_(counts)]

    def apply(self, moved: torch.Tensor) -> None:
        """Sets the live buffers to the committed ones plus their summed changes."""
        if not self.numel:
            return
        live, middle = self._live(), len(self.base)
        statistics, counts = self.base + moved[:middle], self.base_counts + moved[middle:].long()
        for floating, flat in ((True, statistics), (False, counts)):
            if buffers := self._of(live, floating):
                pieces = flat.split([b.numel() for b in buffers])
                torch._foreach_copy_(buffers, [p.view_as(b) for p, b in zip(pieces, buffers, strict=True)])

    def _live(self):
        return [owner[name] for (owner, name), *_ in self.places]

    def _of(self, buffers, floating):
        return [b for b, kind in zip(buffers, self.kinds, strict=True) if kind == floating]

    def _flat(self, buffers, floating):
        dtype = self.dtype if floating else torch.int64
        none = torch.empty(0, dtype=dtype, device=self.device)
        return torch.cat([b.to(self.device, dtype).flatten() for b in self._of(buffers, floating)] or [none])
