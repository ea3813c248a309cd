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
from common.checkpoint.tensors import flat_bytes, size_of, specs_of
from common.device import is_gpu
from common.errors import UserError

Named = dict[str, dict[str, Tensor]]  # {kind: {name: tensor}}


class Layout:
    """This rank's tensors and their places in a checkpoint.

    In train_ddp.py and train_dp.py each rank holds the whole net, and one rank writes it. In train_mp.py a
    net is split into parts, and each rank holds one. Each part of a sharded tensor has some of its rows; the
    first part has the first ones.
    """

    def __init__(
        self,
        tensors: Named,
        rows: dict,
        whole: dict,
        part: int = 0,
        parts: int = 1,
        writes_unsharded: bool = True,
    ):
        self.tensors = tensors
        self.rows = rows  # {name: (first row, rows of the whole)} of those of which only some rows are here
        self.whole = whole  # the specs of what all parts hold
        self.part = part
        self.parts = parts
        self.writes_unsharded = writes_unsharded  # one of the ranks that hold the same does

    @staticmethod
    def specs(tensors: Named, rows: dict) -> dict:
        """{kind: {name: [type, shape]}}, with the shapes that the tensors have with all their rows."""
        return {kind: specs_of(own, rows) for kind, own in tensors.items()}

    def written(self, tensors: Named) -> Named:
        """Those of this rank's tensors that it writes."""
        for kind, specs in self.specs(tensors, self.rows).items():
            for name in specs | self.tensors[kind]:
                if specs.get(name) != self.whole[kind].get(name):
                    raise UserError(
                        f"{kind}: {name} came, went or changed after the first step\n"
                        "no checkpoint would hold it: make it in the first step, as a tensor"
                    )
        return {
            kind: {name: tensor for name, tensor in own.items() if self.writes_unsharded or name in self.rows}
            for kind, own in tensors.items()
        }

    def check(self, files: dict) -> None:
        """Damaged unless the files' rows follow each other and make up this run's tensors."""
        found = {kind: {} for kind in self.whole}  # each tensor's type, and its shape in the files so far
        for path in sorted(files):
            specs = found[kind_of(path)]
            for name, (dtype, shape, first, _) in files[path].items():
                so_far = specs.get(name, [dtype, [0, *shape[1:]]])
                follows = so_far == [dtype, [first, *shape[1:]]]
                if not follows:
                    raise Damaged(f"{path}: {name[:80]} is {dtype}{shape} from row {first}, after {so_far}")
                specs[name] = [dtype, [first + shape[0], *shape[1:]] if shape else []]
        for kind, specs in self.whole.items():
            for name in specs | found[kind]:
                spec = found[kind].get(name)
                if spec != specs.get(name):
                    raise Damaged(f"{kind}: {name[:80]} is {spec}, this run has {specs.get(name)}")

    def buffers(self, path: str, table: dict) -> dict:
        """{name: a context with the buffer of that tensor} of those in a file that this rank needs."""
        buffers = {}
        tensors = self.tensors[kind_of(path)]
        for name in table.keys() & tensors.keys():
            dtype, shape, first, _ = table[name]
            tensor = tensors[name].detach()
            own_first, _ = self.rows.get(name, (0, 0))
            at = (first - own_first) * size_of(dtype, shape[1:])
            size = size_of(dtype, shape)
            # The file's rows may begin above ours, at < 0; one of their bytes at least is ours.
            if at < tensor.nbytes and at + size > 0:
                buffers[name] = partial(_buffer, tensor, at, size)
        return buffers


@contextmanager
def _buffer(tensor, at, size):
    """A buffer for `size` bytes that begin at byte `at` of the tensor: its own memory, if they fill it.

    Of a tensor with holes, on a GPU, or of which only some rows are here, it is a copy of these rows.
    """
    flat = flat_bytes(tensor)  # of one with holes, a copy
    direct = tensor.is_contiguous() and not is_gpu(tensor.device) and (at, size) == (0, len(flat))
    buffer = flat if direct else torch.empty(size, dtype=torch.uint8)
    yield memoryview(buffer.numpy())
    if not direct:
        low = max(at, 0)
        high = min(at + size, len(flat))
        flat[low:high].copy_(buffer[low - at : high - at])
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


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
