"""What a net remembers outside of its weights and buffers: no checkpoint holds it, a resumed run lacks it."""

import hashlib
import pickle
import sys
from types import SimpleNamespace

import torch
from torch import nn

from common.errors import say
from common.place import here
from common.world import fingerprint_of

TORCHS = frozenset(vars(nn.Module()))  # what each module has for itself


def warn_of_unsaved(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compares the net after the first two steps of a life, and warns of what changed and is not saved."""
    first = {}

    def look(*_):
        now = remembered(net)
        if not first:
            first.update(now)
            return
        hook.remove()
        changed = [name for name in now if first.get(name) != now[name]]
        if changed and here().speaks:
            say(
                f"warning: training changes {', '.join(changed[:3])}, which no checkpoint holds\n"
                "         if the net reads it in a later step, make it a persistent buffer (register_buffer)",
                sys.stderr,
            )

    hook = optimizer.register_step_post_hook(look)


def remembered(net):
    """{name: hash} of each attribute and buffer that is not saved."""
    saved = {tensor.data_ptr() for tensor in net.state_dict().values()}
    hashes = {"": ""}
    for path, module in net.named_modules():
        values = {name: value for name, value in vars(module).items() if name not in TORCHS}
        for name in module._non_persistent_buffers_set:
            values[name] = module._buffers[name]
        for name, value in values.items():
            digest = hashlib.sha256()
            try:
                Memory(SimpleNamespace(write=digest.update), saved).dump(value)
            except Exception:  # a function, a file: no memory that could be compared
                continue
            hashes[f"{path}.{name}".lstrip(".")] = digest.hexdigest()
    return hashes


class Memory(pickle.Pickler):
    """Writes tensors as their hash, and nothing of what is saved or follows from it."""

    def __init__(self, file, saved):
        super().__init__(file)
        self.saved = saved

    def persistent_id(self, thing):
        if isinstance(thing, nn.Module):
            return "a module"
        if isinstance(thing, torch.Generator):
            return thing.get_state().tolist()
        if isinstance(thing, torch.Tensor):
            follows = thing.grad_fn is not None or thing.data_ptr() in self.saved
            return "saved" if follows else fingerprint_of({"": thing})
        return None
