"""Averaged weights: saved beside the net's own, evaluated in their place (--ema-decay)."""

import torch


class Averages:
    """Of each weight that trains an average, which each step moves towards the weight by 1 - decay."""

    def __init__(self, state, decay):
        self.names = {p: name for p, name in state.names.items() if p.requires_grad}
        self.decay = decay
        self.tensors = {}  # by the name of the weight
        for p, name in self.names.items():
            kind = torch.promote_types(p.dtype, torch.float32)  # in 16 bits they would stand still
            self.tensors[name] = p.detach().to(kind, copy=True)

    def update(self):
        averages = [*self.tensors.values()]
        pairs = zip(self.names, averages, strict=True)
        torch._foreach_lerp_(averages, [p.detach().to(a.dtype) for p, a in pairs], 1 - self.decay)

    @torch.no_grad()
    def load(self, remembered):
        """Take what `named` has returned in an earlier life."""
        for p, average in zip(self.names, self.tensors.values(), strict=True):
            average.copy_(remembered.get(f"{self.names[p]}/ema", p))  # another run's may have none

    def named(self):
        """Return what a checkpoint holds."""
        return {f"{name}/ema": average for name, average in self.tensors.items()}

    @torch.no_grad()
    def lend(self):
        """Give the net the averages for an evaluation; a `Snapshot` puts its own weights back."""
        for p, name in self.names.items():
            p.data.copy_(self.tensors[name])  # not counted as a change: the same weights come back
