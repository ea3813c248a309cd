r"""The gradient of a global batch as one fixed sum over V slices: the same bits at any number of ranks.

    slice    0   1   2   3   4   5   6
              \ /     \ /     \ /   /          V = 7: a perfect tree of 8, without the missing slices
               +       +       +   /
                \     /         \ /            A rank adds the subtrees it owns whole, as a binary counter
                   +             +             carries; `tree_of` lists the other additions in their order.
                    \           /
                          +

Floating-point addition is not associative: only a fixed tree gives the same bits at any number of ranks. If V
and the world are powers of two, each rank's slices are one subtree, so it sends one sum. No tree does that
for all divisors: halves and thirds of six slices overlap, and subtrees of one tree never do.

After its last slice every rank ends the tree for its part, and sends the result to all. Collectives only move
data; additions follow the tree.

    sums of rank 0   [a0 a1 a2]    all_to_all     rank 0 adds a0 b0 c0    all_gather
    sums of rank 1   [b0 b1 b2]   ------------->   rank 1 adds a1 b1 c1   ------------->   the sum, everywhere
    sums of rank 2   [c0 c1 c2]    (a part each)   rank 2 adds a2 b2 c2    (a part each)

A missing term is -0.0, the one number whose addition never changes a bit (+0.0 would turn -0.0 into +0.0):
for a parameter that a slice does not use, and for a slice of a short last batch without samples. So a sum
that begins with -0.0 has no term: such a parameter gets no gradient, as in torch's own loops. What a backward
leaves never begins so (`gradient_of`).
"""

import functools
import itertools
import math
from bisect import bisect
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from common.device import is_gpu, mark, module_of, wait_by_polling
from common.errors import UserError
from common.options import extra
from common.sampler import hash_seed, share
from common.training import Gradient


def gradient_of_slices(net, opts, world):
    """Return what makes the gradient of (batch, state, world, split) with --virtual-ranks."""
    refuse_dropout_of_cudnn(net, world.device)
    slices = Slices(net, world, opts.virtual_ranks)
    kind = extra("cross_check") if opts.cross_check and world.size > 1 else SliceGradient
    return functools.partial(kind, slices)


def refuse_dropout_of_cudnn(net, device):
    """UserError for draws that no seed sets."""
    if is_gpu(device) and any(isinstance(m, nn.RNNBase) and m.dropout for m in net.modules()):
        raise UserError(
            "cuDNN's dropout inside an RNN draws from a state of its own, which no seed sets\n"
            "--virtual-ranks would have other bits each time\n"
            "put nn.Dropout between RNNs of one layer"
        )


class SliceGradient(Gradient):
    """A gradient whose pieces are slices. Each is computed as if it were alone, on whichever rank."""

    def __init__(self, slices, batch, state, world, split):
        super().__init__(None, batch, state, world, split, numbers=slices.own)
        self.slices = slices

    copies = True  # the order of vector code may depend on the alignment

    def _begin_piece(self):
        self.state.statistics.reset()
        self._seed()

    def _backward(self, loss, totals):
        if self.is_first:
            self.slices.begin(self.state, totals, self.counts_samples)
        if self.ids:
            size = self.batch.size
            scaled = self.state.scaler.scale(loss / size)
            self._take(self.slices.gradient(self.number, len(self.ids) / size, totals, scaled))

    def _take(self, gradient):
        self.slices.add(self.number, gradient)

    def finish(self):
        """Average over the ranks; returns the totals of all on rank 0, as callers add those of the ranks."""
        totals = self.slices.finish()
        self._end_mean(totals[1], lambda total: total)
        return totals if self.world.rank == 0 else torch.zeros_like(totals)


class Slices:
    """A net whose gradient is that sum. In each step: `begin`, `add` of slices with samples, `finish`.

    A slice's totals and its changes of buffers are summed as the gradient of one more tensor, `tail`.
    """

    def __init__(self, net, world, slices):
        self.world = world
        self.count = slices
        self.own = share(slices, world.rank, world.size)
        self.params = [p for p in net.parameters() if p.requires_grad]
        self.tensors = []  # the weights, then the tail
        self.alike = defaultdict(list)  # places of tensors among these, by their type and device

    def begin(self, state, totals, counts_samples):
        """Begin a step with so many totals; the buffers are those of the last one."""
        self.statistics = state.statistics
        if not self.tensors:
            exact = not counts_samples or torch.float64 in self.statistics.kinds
            kind = torch.float64 if exact else torch.float32
            size = self.statistics.numel + len(totals)
            self.tail = torch.empty(size, dtype=kind, device=totals.device)
            self.tensors = [*self.params, self.tail]
            for i, tensor in enumerate(self.tensors):
                self.alike[tensor.dtype, tensor.device].append(i)
        self.rows = []  # gradients of the subtrees that wait for their other halves
        self.next = self.own.start
        state.scaler.scale(self.tail.new_zeros(()))  # initialises it on a rank without samples

    # ---- this rank's slices -----------------------------------------------------------------------
    def gradient(self, v, weight, totals, output):
        """Return the gradient of slice v, after its forward: of each weight, then of the tail."""
        moves = self.statistics.moves(weight, v == self.count - 1, self.tail.dtype)
        if output.requires_grad:
            output.backward()
        return [*map(gradient_of, self.params), torch.cat([moves.to(self.tail), totals.to(self.tail)])]

    def add(self, v, gradient):
        """Add that of slice v; slices that are left out have no samples."""
        self._skip_to(v)
        self._add(gradient)

    def _skip_to(self, v):
        """Give slices without samples, up to v, their places in the sum."""
        while self.next < v:
            self._add([torch.full_like(tensor, -0.0) for tensor in self.tensors])

    @torch.no_grad()
    def _add(self, row):
        """Add the next slice, and the subtrees that it completes."""
        for _ in range(carries(self.next, self.own.start)):
            left = self.rows.pop()
            torch._foreach_add_(left, row)
            row = left
        self.rows.append(row)
        self.next += 1

    # ---- the rest of the tree ---------------------------------------------------------------------
    @torch.no_grad()
    def finish(self):
        """Leave the sum of all slices in `.grad`, updates buffers; returns the totals."""
        self._skip_to(self.own.stop)
        for places in self.alike.values():
            members, *rows = ([row[i] for i in places] for row in (self.tensors, *self.rows))
            end_tree(members, rows, self.world, self.count)
        self.rows = []
        self.statistics.apply(self.tail.grad[: self.statistics.numel])
        return self.tail.grad[self.statistics.numel :].double()


def end_tree(members, rows, world, slices):
    """Leave the sum of all ranks' rows in `.grad` of each member; None where no slice has used it.

    The members are of one type, on one device; each rank ends the tree for its part of all their numbers.
    """
    rows_of, order = tree_of(slices, world.size)
    sizes = [tensor.numel() for tensor in members]
    pad = rows[0][0].new_zeros(-sum(sizes) % world.size)
    flat = torch.cat([part.flatten() for row in rows for part in (*row, pad)])
    parts = flat.view(len(rows), world.size, -1).transpose(0, 1).flatten(0, 1)
    if world.size > 1:
        taken = parts.new_empty(sum(rows_of), parts.shape[1])
        move(dist.all_to_all_single, taken, parts, rows_of, [len(rows)] * world.size)
        parts = taken
    for i, j in order:
        parts[i] += parts[j]
    total = parts[0]
    if world.size > 1:
        total = parts.new_empty(parts.shape[1] * world.size)
        move(dist.all_gather_into_tensor, total, parts[0])
    firsts = total[[*itertools.accumulate(sizes[:-1], initial=0)]].tolist()
    for tensor, part, first in zip(members, total[: sum(sizes)].split(sizes), firsts, strict=True):
        unused = tensor.requires_grad and is_missing(first)  # the tail is always there
        # as the weight lies in memory: fused optimizers need that
        tensor.grad = None if unused else torch.empty_like(tensor).copy_(part.view(tensor.shape))


def move(collective, result, *how):
    """Call a collective, and wait here: behind it a launch would wait for a dead peer."""
    collective(result, *how)
    wait_by_polling(mark(result.device))


def is_missing(first):
    """Return whether the first number of a sum is -0.0."""
    return not first and math.copysign(1.0, first.real) < 0


def gradient_of(p):
    """Take the gradient that a slice has left; -0.0 if it does not use the weight."""
    gradient = p.grad
    p.grad = None
    if gradient is None:
        return torch.full_like(p, -0.0)
    first = gradient.as_strided((1,), (1,), gradient.storage_offset())
    first += 0.0  # -0.0, as of loss - 0 * w, becomes 0.0: it is used
    return gradient


def carries(v, start):
    """Count the additions that slice v completes on a rank from slice `start` on, the first with v - 1."""
    count = 0
    while (v + 1) % (2 << count) == 0 and v + 1 - (2 << count) >= start:
        count += 1
    return count


@functools.cache
def tree_of(slices, ranks):
    """Return (rows that each rank sends, the additions (i, j): `row[i] += row[j]` that end it in row 0).

    A row is the sum of a subtree that is one rank's; the rows are those of rank 0, then of rank 1, ...
    """
    ends = [share(slices, rank, ranks).stop for rank in range(ranks)]
    rows_of = [0] * ranks
    order = []

    def row_of(first, size):
        """Return the row with the sum of these slices in the end; None if there are none."""
        if first >= slices:
            return None
        rank = bisect(ends, first)
        if first + size <= ends[rank]:
            rows_of[rank] += 1
            return sum(rows_of) - 1
        left = row_of(first, size // 2)
        right = row_of(first + size // 2, size // 2)
        if right is not None:
            order.append((left, right))
        return left

    row_of(0, 1 << slices.bit_length())
    return rows_of, order


# ---- what decides the bits besides the options: recorded, compared at every start -----------------------
def facts(device):
    """Return {what it is: value} for options.json."""
    processor = torch.backends.cpu.get_cpu_capability()
    if is_gpu(device):
        processor = f"{module_of(device).get_device_name(device)} cudnn {torch.backends.cudnn.version()}"
    return {
        "CPU threads per process": torch.get_num_threads(),
        "kind of device": device.type,
        "build of torch": f"{torch.__version__} {hash_seed(torch.__config__.show()):08x}",
        "CPU or GPU": processor,
    }
