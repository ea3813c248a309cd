"""Layers with an `eval()` or `train()` of their own, which may merge weights for an evaluation, as a LoRA."""

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.training import Snapshot

ROUNDED = 0.1  # of what eval() has changed in a weight, so much may be left


class MergingSnapshot(Snapshot):
    """Buffers, and the weights of these modules, as they were before an evaluation."""

    def __init__(self, net: nn.Module, merging: list[nn.Module]) -> None:
        super().__init__(net)
        self.weights = {p: p.detach().clone() for module in merging for p in module.parameters()}

    def eval(self) -> None:
        super().eval()
        self.merged = self._moved()

    def _moved(self):
        """Return how far each of these weights is from what it was."""
        return {p: distance(p, weight) for p, weight in self.weights.items()}

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore all to the bit; UserError if train() has not undone eval(), but for rounding."""
        left = self._moved()
        for p, weight in self.weights.items():
            p.data.copy_(weight)  # not counted as a change
        super().put_back()
        for name, p in self.net.named_parameters():
            if left.get(p, 0.0) > ROUNDED * self.merged.get(p, 0.0):
                raise UserError(
                    f"net.eval() changes {name}, and net.train() does not undo it\n"
                    "undo it there, or leave the weights alone: training goes on with what train() leaves"
                )


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference."""
    return float((a.detach() - b).abs().max()) if a.numel() else 0.0
