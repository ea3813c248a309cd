"""Averaged weights: saved beside the net's own, evaluated in their place (--ema-decay)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from common.training import TrainState


class Averages:
    """Of each weight of a net an average, which each step moves towards the weight by 1 - decay."""

    def __init__(self, state: TrainState, decay: float) -> None:
        self.state = state
        self.decay = decay
        self.tensors: dict[str, Tensor] = {}  # by the name of the weight
        for p, name in state.names.items():
            kind = torch.promote_types(p.dtype, torch.float32)  # in 16 bits they would stand still
            self.tensors[name] = p.detach().to(kind, copy=True)

    def update(self) -> None:
        averages = [*self.tensors.values()]
        pairs = zip(self.state.names, averages, strict=True)
        torch._foreach_lerp_(averages, [p.detach().to(a.dtype) for p, a in pairs], 1 - self.decay)

    @torch.no_grad()
    def load(self, remembered: dict[str, Tensor]) -> None:
        """Take what `named` has returned in an earlier life."""
        for name, average in self.named().items():
            average.copy_(remembered[name])

    def named(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds."""
        return {f"{name}/ema": average for name, average in self.tensors.items()}

    @contextmanager
    def in_the_net(self) -> Iterator[None]:
        """Lend the net the averages inside this block; outside it has its own weights.

        A checkpoint has its own in any case: they are copied before the first weight changes.
        """
        state = self.state
        with state.changing():
            state.own = {p: p.detach().clone() for p in state.names}
            self._set_weights(self.tensors)
        try:
            yield
        finally:
            with state.changing():
                self._set_weights(state.own)
                state.own = {}

    @torch.no_grad()
    def _set_weights(self, weights):
        for p, weight in zip(self.state.names, weights.values(), strict=True):
            p.data.copy_(weight)  # not counted as a change: the same weights come back
