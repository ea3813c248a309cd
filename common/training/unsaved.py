"""What a net remembers outside of its weights and buffers: no checkpoint holds it, a resumed run lacks it."""
import pickle
import random
import sys
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

from common.errors import UserError, say, speaks_for_node
from common.world import fingerprint_of

TORCHS = frozenset(vars(nn.Module()))   # what each module has for itself
LOOKED_AT = 1000                        # elements of a list or an array
GENERATORS = np.random.Generator, np.random.RandomState, random.Random


class Unsaved:
    """Compares the net after the first and the second step of a life, and warns of what has changed."""

    def __init__(self, net: nn.Module):
        self.net, self.shapes = net, {name: tuple(b.shape) for name, b in net.named_buffers()}
        self.seen: list[dict[str, Any]] = []

    def look(self) -> None:
        """Call it after each step: warns once of what no checkpoint holds."""
        if len(self.seen) == 2:
            return
        self.seen.append(self._remembered())
        for name, b in self.net.named_buffers():
            if (shape := tuple(b.shape)) != (old := self.shapes.get(name)):
                raise UserError(f"model: buffer {name} had shape {old} before the first step, now {shape}\n"
                                "no checkpoint would hold it: give it its last shape")
        before, now = self.seen[0], self.seen[-1]
        changed = [name for name in now if name not in before or before[name] != now[name]]
        if changed and speaks_for_node():
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            say(f"warning: training changes {', '.join(changed[:3])}{more}, which no checkpoint holds\n"
                "         if the net reads it in a later step, make it a persistent buffer (register_buffer)",
                sys.stderr)

    def _remembered(self):
        saved, found = {t.data_ptr() for t in self.net.state_dict().values()}, {}
        for path, module in self.net.named_modules():
            hidden = {name: look_at(value, saved) for name, value in vars(module).items()
                      if name not in TORCHS}
            hidden |= {name: fingerprint_of({name: module._buffers[name]})
                       for name in module._non_persistent_buffers_set if module._buffers[name] is not None}
            found |= {f"{path}.{name}".lstrip("."): value for name, value in hidden.items()}
        return found


def look_at(value, saved):
    """What can be compared later; None for saved tensors, results of a forward and other objects."""
    if isinstance(value, torch.Tensor):
        derived = value.grad_fn is not None or value.data_ptr() in saved
        return None if derived else (id(value), value._version)
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.ndarray):
        return value.flat[:LOOKED_AT].tobytes()
    if isinstance(value, GENERATORS):
        return pickle.dumps(value)
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (list, tuple, set, deque)):
        return [look_at(part, saved) for part in list(value)[:LOOKED_AT]]
    return None
