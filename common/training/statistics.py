"""A net's buffers: running statistics and counters, which a forward changes without a gradient.

From a forward to a checkpoint: a forward changes the live buffers; `moves` computes by how much; replicas
(`average`) or slices (extras/bits.py) add that up; `apply` sets the live buffers to the sum; `commit` copies
them to `committed`, which a checkpoint holds.
"""

import torch

from common.errors import UserError


class Statistics:
    """The buffers of a net; `committed` holds those of the last whole step, by name.

    Replicas, and slices of --virtual-ranks, change floating-point buffers by the mean over all samples,
    counters by what one of them counts: right for running means and for numbers of forwards, as torch's own
    layers keep them. Changes are computed in double precision, which holds every counter below 2**53.
    """

    def __init__(self, net):
        named = dict(net.named_buffers(remove_duplicate=False))
        self.committed = {path: b.detach().clone() for path, b in named.items()}
        # where it is, because a module may replace a tensor
        self.owners = {path: net.get_submodule(path.rpartition(".")[0])._buffers for path in named}
        numbers = _numbers(named.values())
        sizes = [b.numel() for b in numbers]
        self.numel = sum(sizes)
        self.kinds = {b.dtype for b in numbers}
        device = numbers[0].device if numbers else None
        self.flat = torch.empty(self.numel, dtype=torch.float64, device=device)
        self.views = [row.view(b.shape) for row, b in zip(self.flat.split(sizes), numbers, strict=True)]
        self.means = self._flat([torch.full_like(b, b.is_floating_point()) for b in numbers]).bool()

    def commit(self):
        """Take the live buffers as those of the last whole step."""
        _copy(self.committed.values(), self._live())

    def reset(self):
        """Restore the live buffers to those of the last whole step."""
        _copy(self._live(), self.committed.values())

    def average(self, world, weight):
        """Change all replicas' buffers by the mean of their changes, weighted by samples."""
        if self.numel and world.size > 1:
            self.apply(world.all_sum(self.moves(weight, world.rank == world.size - 1)))

    @torch.no_grad()
    def moves(self, weight, counts, kind=torch.float64):
        """Return how a forward has changed the buffers, by its weight in the mean, as one flat tensor."""
        base = self._flat(self.committed.values())
        new = self._flat(self._live())
        # equal values did not change; a change from infinity or nan, whose differences are nan, counts from 0
        same = (new == base) | (new.isnan() & base.isnan())
        moved = (new - finite(base)).masked_fill_(same, 0.0).to(kind)
        return moved.mul_(torch.where(self.means, weight, float(counts)).to(kind))

    @torch.no_grad()
    def apply(self, moved):
        """Set the live buffers to the committed ones plus their summed changes."""
        moved = moved.to(self.flat)
        base = self._flat(self.committed.values())
        self.flat.copy_(torch.where(moved != 0, finite(base) + moved, base))
        _copy(_numbers(self._live()), self.views)

    def _live(self):
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

    def _flat(self, buffers):
        """Return all numbers of these buffers, as a new flat tensor."""
        _copy(self.views, _numbers(buffers))
        return self.flat.clone()


def finite(numbers):
    """Return the same, with 0 for infinity and nan."""
    return numbers.nan_to_num(0.0, 0.0, 0.0)


def _copy(targets, sources):
    """Copy by type: a GPU has one call for many tensors only if they have one type."""
    kinds = {}
    for target, source in zip(targets, sources, strict=True):
        kinds.setdefault((target.dtype, source.dtype), []).append((target, source))
    for pairs in kinds.values():
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))


def _numbers(buffers):
    """Return the buffers; a complex one as pairs of real numbers."""
    return [torch.view_as_real(b) if b.is_complex() else b for b in buffers]
