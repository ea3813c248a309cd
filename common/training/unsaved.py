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
LOOKED_AT = 1000                        # elements of a list
PLAIN = bool, int, float, str, np.ndarray, np.random.Generator, np.random.RandomState, random.Random


def warn_of_unsaved(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compares the net after the first two steps of a life, and warns of what changed and is not saved."""
    shapes = {name: tuple(b.shape) for name, b in net.named_buffers()}
    seen: list[dict[str, Any]] = []

    def look(*_):
        seen.append(_remembered(net))
        for name, b in net.named_buffers():
            if tuple(b.shape) != shapes.get(name):
                raise UserError(f"model: buffer {name} had shape {shapes.get(name)} before the first step, "
                                f"now {tuple(b.shape)}\nno checkpoint would hold it: give it its last shape")
        before, now = seen[0], seen[-1]
        changed = [name for name in now if name not in before or before[name] != now[name]]
        if changed and speaks_for_node():
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            say(f"warning: training changes {', '.join(changed[:3])}{more}, which no checkpoint holds\n"
                "         if the net reads it in a later step, make it a persistent buffer (register_buffer)",
                sys.stderr)
        if len(seen) == 2:
            hook.remove()

    hook = optimizer.register_step_post_hook(look)


def _remembered(net):
    """{name: what can be compared} of each attribute and buffer that is not saved."""
    saved = {t.data_ptr() for t in net.state_dict().values()}
    remembered = {}
    for path, module in net.named_modules():
        for name, value in vars(module).items():
            if name not in TORCHS:
                remembered[f"{path}.{name}".lstrip(".")] = _comparable(value, saved)
        for name in module._non_persistent_buffers_set:
            if module._buffers[name] is not None:
                remembered[f"{path}.{name}".lstrip(".")] = fingerprint_of({name: module._buffers[name]})
    return remembered


def _comparable(value, saved):
    """None for saved tensors, for results of a forward and for objects of other types."""
    if isinstance(value, torch.Tensor):
        derived = value.grad_fn is not None or value.data_ptr() in saved
        return None if derived else (id(value), value._version)
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, PLAIN):
        return pickle.dumps(value)
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, (list, tuple, set, deque)):
        return [_comparable(part, saved) for part in list(value)[:LOOKED_AT]]
    return None
