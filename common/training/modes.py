"""How a net trains, and what its evaluation may not leave behind.

Training and evaluation call the net's own `train()` and `eval()`, as a loop by hand does: a LoRA may merge
there, a net may keep a part of itself in evaluation mode, or change a number of its own.
"""

import torch
from torch import nn

from common.errors import UserError

ROUNDED = 0.1  # of what eval() has changed in a weight, so much may be left


class Modes:
    """The modes that a net has now: a part in evaluation mode stays in it."""

    def __init__(self, net):
        self.net = net
        modules = [*net.modules()]
        self.trains = [module.training for module in modules]
        self.evaluates = [module for module in modules if not module.training]
        if len(self.evaluates) == len(modules):  # others' loaders return a net in evaluation mode
            self.evaluates = []

    def restore(self):
        """Set these modes again, if others are set now."""
        if [module.training for module in self.net.modules()] != self.trains:
            self.set()

    def set(self):
        """Call the net's `train()`, but for the parts that stay in evaluation mode."""
        self.net.train()
        for module in self.evaluates:
            if {*module.modules()} <= {*self.evaluates}:
                module.eval()
            else:
                module.training = False


class Snapshot:
    """The buffers before an evaluation, some weights, and those of layers that merge them, as a LoRA."""

    def __init__(self, net, weights):
        for module in net.modules():
            if own(module, "train") or own(module, "eval"):
                weights = [*weights, *module.parameters()]
        self.weights = {p: p.detach().clone() for p in dict.fromkeys(weights)}
        self.buffers = [
            (module._buffers, name, buffer.clone())
            for module in net.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def moved(self):
        """Return how far each of these weights is from what it was."""
        return {p: float((p.detach() - was).abs().max()) for p, was in self.weights.items() if p.numel()}

    @torch.no_grad()
    def put_back(self, names, merged):
        """Restore all to the bit, after train(); UserError if that has not undone what eval() `merged`."""
        left = self.moved() if merged else {}
        for p, weight in self.weights.items():
            p.data.copy_(weight)  # not counted as a change
        for owner, name, buffer in self.buffers:
            if owner[name].shape == buffer.shape:
                owner[name].copy_(buffer)
            else:
                owner[name] = buffer
        for p, far in left.items():
            if far > ROUNDED * merged[p]:
                raise UserError(
                    f"net.eval() changes {names[p]}, and net.train() does not undo it\n"
                    "undo it there, or leave the weights alone: training goes on with what train() leaves"
                )


def own(module, name):
    """Return whether a module has a method of its own in place of nn.Module's."""
    return getattr(getattr(module, name), "__func__", None) is not getattr(nn.Module, name)
