"""How a net trains, and what its evaluation may not leave behind.

Both call the net's own `train()` and `eval()`, as a loop by hand does: a LoRA may merge there, a net may keep
a part of itself in evaluation mode, or change a number of its own.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from common.errors import UserError

ROUNDED = 0.1  # of what eval() has changed in a weight, so much may be left


class Modes:
    """The modes with which a run begins: a part that evaluates then does not train."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        modules = [*net.modules()]
        still = [module for module in modules if not module.training]
        # others' loaders return a net in evaluation mode
        self.still = still if len(still) < len(modules) else []
        self.resting: list[int] | None = None  # versions of the weights while an epoch ends
        self._train()
        self.begun = [module.training for module in modules]

    def train(self) -> None:
        """These modes again, if others are set now."""
        if [module.training for module in self.net.modules()] != self.begun:
            self._train()

    def _train(self):
        self.net.train()
        for module in self.still:
            if {*module.modules()} <= {*self.still}:
                module.eval()
            else:
                module.training = False

    @property
    def versions(self) -> list[int]:
        """How often torch has changed each weight."""
        return [p._version for p in self.net.parameters()]

    @property
    def weights_moved(self) -> bool:
        """Whether the loop has changed weights since the epoch's last step."""
        return self.resting not in (None, self.versions)


class Before:
    """Buffers, and weights of modules with an `eval()` or `train()` of their own, as they were before it."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.buffers = [
            (module._buffers, name, buffer.clone())
            for module in net.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.weights = {
            p: p.detach().clone()
            for module in net.modules()
            if own(module, "train") or own(module, "eval")
            for p in module.parameters()
        }

    def moved(self) -> dict[nn.Parameter, float]:
        """How far each of these weights is from what it was."""
        return {p: distance(p, weight) for p, weight in self.weights.items()}

    @torch.no_grad()
    def put_back(self, merged: dict[nn.Parameter, float]) -> None:
        """To the bit; UserError if train() has not undone what eval() has done, but for rounding."""
        left = self.moved()
        for p, weight in self.weights.items():
            p.data.copy_(weight)  # not counted as a change
        for owner, name, buffer in self.buffers:
            if owner[name].shape == buffer.shape:
                owner[name].copy_(buffer)
            else:
                owner[name] = buffer
        for name, p in self.net.named_parameters():
            if left.get(p, 0.0) > ROUNDED * merged.get(p, 0.0):
                raise UserError(
                    f"net.eval() changes {name}, and net.train() does not undo it\n"
                    "undo it there, or leave the weights alone: training goes on with what train() leaves"
                )


def own(module: nn.Module, name: str) -> bool:
    """Whether a module has a method of its own in place of nn.Module's."""
    method: Callable | None = getattr(module, name)
    return getattr(method, "__func__", None) is not getattr(nn.Module, name)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b).abs().max()) if a.numel() else 0.0
