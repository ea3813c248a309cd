"""What a net or an optimizer remembers, and no checkpoint holds: a resumed run lacks it.

From a value to a warning: `remembered` hashes what is not saved; the hashes before and after a step are
compared. `FirstForward` compares what is saved, which a forward may not change.
"""

import io
import pickle
from contextlib import suppress

import torch
from torch import Tensor, nn

from common.errors import UserError, warn
from common.world import fingerprint_of

TORCHS = frozenset(vars(nn.Module()))  # what each module has for itself


class FirstForward:
    """Compares the tensors that a life begins with and those after its first forward."""

    def __init__(self, tensors):
        self.tensors = tensors  # a function
        self.marks = None  # {name: (fingerprint, version)}; empty once they are compared

    def begin(self):
        if self.marks is None:
            self.marks = self._marks()

    def renew(self):
        """What has changed is undone."""
        if self.marks:
            self.marks = self._marks()

    def end(self):
        """UserError if a weight has changed: no save may have that, and ranks may differ."""
        if not self.marks:
            return
        changed = sorted(self._marks().items() - self.marks.items())
        self.marks = {}
        if changed:
            name, _ = changed[0]
            raise UserError(
                f"{name} is changed by a forward, or before it; only a step may change weights\n"
                "make it a buffer; or change it in a hook (optimizer.register_step_post_hook), "
                "or after run.step in a loop of your own"
            )

    def _marks(self):
        # torch counts each change in place, also one that has changed no value yet, as Embedding's max_norm
        tensors = self.tensors()
        return {name: (fingerprint_of([tensor]), tensor._version) for name, tensor in tensors.items()}


def warn_of_unsaved(net, optimizer):
    """Compares the net after the first two steps of a life, and warns of what changed and is not saved."""
    seen = []

    def look(*_):
        seen.append(remembered(net))
        if len(seen) < 2:
            return
        hook.remove()
        changed = [name for name in seen[1] if seen[0].get(name) != seen[1][name]]
        if changed:
            warn(
                f"training changes {', '.join(changed[:3])}, which no checkpoint holds\n"
                "if the net reads it in a later step, make it a persistent buffer (register_buffer)"
            )

    hook = optimizer.register_step_post_hook(look)


def remembered(net):
    """{name: hash} of each attribute and buffer that is not saved."""
    values = {}
    for path, module in net.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in TORCHS}
        for name in module._non_persistent_buffers_set:
            own[name] = module._buffers[name]
        values |= {f"{path}.{name}".lstrip("."): value for name, value in own.items()}
    return hashes_of(values, net.state_dict().values())


def hashes_of(values, saved):
    """{name: hash} of values by name; what follows from the `saved` tensors does not count."""
    hashes = {}
    addresses = {tensor.data_ptr() for tensor in saved}
    for name, value in values.items():
        file = io.BytesIO()
        with suppress(Exception):  # a function, a file: no memory that could be compared
            Memory(file, addresses).dump(value)
            hashes[name] = hash(file.getvalue())
    return hashes


class Memory(pickle.Pickler):
    """Writes tensors as their hash, and nothing of what is saved or follows from it."""

    def __init__(self, file, saved):
        super().__init__(file)
        self.saved = saved

    def persistent_id(self, thing):
        if isinstance(thing, (nn.Module, torch.optim.Optimizer)):
            return "looked at by itself"
        if isinstance(thing, torch.Generator):  # the sum of its bits, which a hash begins with, stays
            return thing.get_state().tolist()
        if isinstance(thing, Tensor):
            follows = thing.grad_fn is not None or thing.data_ptr() in self.saved
            return "saved" if follows else fingerprint_of([thing])
        return None
