"""Which tensors this rank holds, and where their bytes lie in a checkpoint.

From {"model": {name: tensor}, "optimizer": ...} to the tables that a checkpoint of them must have, and to the
buffers into which its files are read.
"""

from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint.disk import Damaged
from common.checkpoint.folder import kind_of
from common.checkpoint.tensors import flat_bytes, specs_of
from common.device import is_gpu
from common.errors import UserError

Named = dict[str, dict[str, Tensor]]  # {kind: {name: tensor}}


class Layout:
    """A net's tensors and their places in a checkpoint."""

    def __init__(self, tensors: Named):
        self.tensors = tensors
        self.specs = specs_of_all(tensors)

    def checked(self, tensors: Named) -> Named:
        """The same tensors; UserError if they are not those of the start."""
        for kind, specs in specs_of_all(tensors).items():
            for name in specs | self.specs[kind]:
                if specs.get(name) != self.specs[kind].get(name):
                    raise UserError(
                        f"{kind}: {name} came, went or changed after the first step\n"
                        "no checkpoint would hold it: make it in the first step, as a tensor"
                    )
        return tensors

    def check(self, files: dict) -> None:
        """Damaged unless the files hold this run's tensors."""
        for path, table in files.items():
            specs = self.specs[kind_of(path)]
            for name in table | specs:
                spec = table[name][:2] if name in table else None
                if spec != specs.get(name):
                    raise Damaged(f"{path}: {name[:80]} is {spec}, this run has {specs.get(name)}")

    def buffers(self, path: str) -> dict:
        """{name: a context with the buffer of that tensor}."""
        own = self.tensors[kind_of(path)]
        return {name: partial(_buffer, tensor.detach()) for name, tensor in own.items()}


def specs_of_all(tensors):
    return {kind: specs_of(own) for kind, own in tensors.items()}


@contextmanager
def _buffer(tensor):
    """A buffer for a tensor's bytes: its own memory, or a copy, if it has holes or is on a GPU."""
    flat = flat_bytes(tensor)  # of one with holes, a copy
    direct = tensor.is_contiguous() and not is_gpu(tensor.device)
    buffer = flat if direct else torch.empty(len(flat), dtype=torch.uint8)
    yield memoryview(buffer.numpy())
    if not direct:
        tensor.copy_(buffer.view(tensor.dtype).view(tensor.shape))


# ---- beside the tensors --------------------------------------------------------------------------------
def facts_of(net: nn.Module) -> dict[str, Any]:
    """What a checkpoint holds of a net beside its tensors, so that `load` needs neither script nor data.

    `build_model` notes it of the whole net: in train_mp.py only a part of the net may be left.
    """
    return vars(net).get("_facts") or {"tied": tied_names(net), "data": {}}


def tied_names(net):
    """{name: first name} of weights with several names."""
    first = {}
    named = list(net.named_parameters(remove_duplicate=False))
    for name, weight in named:
        first.setdefault(weight, name)
    return {name: first[weight] for name, weight in named if first[weight] != name}
