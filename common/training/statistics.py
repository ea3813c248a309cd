"""A net's buffers: running statistics and counters, which a forward changes without a gradient.

From a forward to a checkpoint: a forward changes the live buffers; replicas take the mean of their changes
(extras/buffers.py); `commit` copies the live buffers to `committed`, which a checkpoint holds.
"""

import torch

from common.errors import UserError
from common.options import extra


class Statistics:
    """The buffers of a net; `committed` holds those of the last whole step, by name."""

    mean = None  # over the replicas, once they have buffers to share

    def __init__(self, net):
        named = dict(net.named_buffers(remove_duplicate=False))
        self.committed = {path: b.detach().clone() for path, b in named.items()}
        # where it is, because a module may replace a tensor
        self.owners = {path: net.get_submodule(path.rpartition(".")[0])._buffers for path in named}

    def commit(self):
        """Take the live buffers as those of the last whole step."""
        self.copy(self.committed.values(), self.live())

    def reset(self):
        """Restore the live buffers to those of the last whole step."""
        self.copy(self.live(), self.committed.values())

    def average(self, world, weight):
        """Change all replicas' buffers by the mean of their changes, weighted by samples."""
        if self.committed and world.size > 1:
            self.mean = self.mean or extra("buffers")(self)
            self.mean.average(world, weight)

    def live(self):
        """Return the buffers as they are now; UserError if one has changed its type or shape."""
        live = []
        for path, committed in self.committed.items():
            now = self.owners[path][path.rpartition(".")[2]]
            live.append(now)
            holds = torch.promote_types(now.dtype, committed.dtype) == committed.dtype
            if now.shape != committed.shape or not holds:
                raise UserError(
                    f"buffer {path} is now {now.dtype} {tuple(now.shape)}, "
                    f"it was {committed.dtype} {tuple(committed.shape)}\n"
                    "a buffer keeps its type and shape: hold what follows the batch in a plain attribute"
                )
        return live

    @staticmethod
    def copy(targets, sources):
        """Copy tensors by type: a GPU has one call for many only if they have one."""
        kinds = {}
        for target, source in zip(targets, sources, strict=True):
            kinds.setdefault((target.dtype, source.dtype), []).append((target, source))
        for pairs in kinds.values():
            torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))
