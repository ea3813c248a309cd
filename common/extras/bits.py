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

Every rank ends the tree for its part of each bucket, and sends the result to all. Messages only move data;
additions follow the tree. The last slice sends a bucket as soon as backward has filled it.

    sums of rank 0   [a0 a1 a2]       `send`       rank 0 adds a0 b0 c0       `add`
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
import threading
from bisect import bisect

import torch
import torch.distributed as dist
from torch import nn

from common.device import is_gpu, mark, module_of, wait_by_polling
from common.errors import UserError
from common.extras.buffers import MeanOfBuffers
from common.options import extra
from common.sampler import hash_seed, share
from common.training import Gradient

FIRST_BUCKET_BYTES = 1 << 20  # of gradients that are sent together: small, to leave early; as in DDP
BUCKET_BYTES = 25 << 20  # of the other buckets


def gradient_of_slices(net, opts, world):
    """Return what makes the gradient of (batch, state, world, split) with --virtual-ranks."""
    if is_gpu(world.device) and any(isinstance(m, nn.RNNBase) and m.dropout for m in net.modules()):
        raise UserError(
            "cuDNN's dropout inside an RNN draws from a state of its own, which no seed sets\n"
            "--virtual-ranks would have other bits each time\n"
            "put nn.Dropout between RNNs of one layer"
        )
    slices = Slices(net, world, opts.virtual_ranks)
    kind = extra("cross_check") if opts.cross_check and world.size > 1 else SliceGradient
    return functools.partial(kind, slices)


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
            self._take(len(self.ids) / size, totals, self.state.scaler.scale(loss / size))

    def _take(self, weight, totals, output):
        self.slices.add(self.number, weight, totals, output)

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
        self.params = [p for p in net.parameters() if p.requires_grad][::-1]  # roughly the order of backward
        self.buckets = []
        self.filling = []  # the buckets that the slice whose backward runs has not filled
        self.waiting = None  # the weights to which that backward has not come; None while none runs
        self.turn = threading.Lock()
        for p in self.params:
            p.register_post_accumulate_grad_hook(self._ready)

    def begin(self, state, totals, counts_samples):
        """Begin a step with so many totals; the buffers are those of the last one."""
        if not self.buckets:
            self.buffers = MeanOfBuffers(state.statistics)
            exact = not counts_samples or torch.float64 in self.buffers.kinds
            kind = torch.float64 if exact else torch.float32
            size = self.buffers.numel + len(totals)
            self.tail = torch.empty(size, dtype=kind, device=totals.device)
            runs = buckets_of([*self.params, self.tail])
            self.buckets = [Bucket(members, self.world, self.count) for members in runs]
        self.next = self.own.start
        state.scaler.scale(self.tail.new_zeros(()))  # initialises it on a rank without samples

    # ---- this rank's slices -----------------------------------------------------------------------
    def gradient(self, v, weight, totals, output):
        """Return the gradient of slice v alone, after its forward."""
        self._backward(v, weight, totals, output)
        return [gradient_of(tensor) for bucket in self.buckets for tensor in bucket.members]

    def _backward(self, v, weight, totals, output):
        moves = self.buffers.moves(weight, v == self.count - 1, self.tail.dtype)
        self.tail.grad = torch.cat([moves.to(self.tail), totals.to(self.tail)])
        if output.requires_grad:
            output.backward()

    def add(self, v, *how):
        """Add slice v; slices that are left out have no samples."""
        self._skip_to(v)
        self.filling = [*self.buckets]
        self.waiting = {*self.params}
        self._backward(v, *how)
        self._end_slice()

    def _skip_to(self, v):
        """Give slices without samples, up to v, their places in the sum."""
        while self.next < v:
            self.filling = [*self.buckets]
            self._end_slice()

    def _end_slice(self):
        self.waiting = set()  # what is left is not used by this slice
        self._collect()
        self.waiting = None
        self.next += 1

    def _ready(self, p):
        """Send, as autograd's hook in the last slice's backward, the buckets that it has filled."""
        with self.turn:  # autograd has a thread a device
            if self.waiting is None:  # the backward of one who votes
                return
            if p not in self.waiting:
                raise UserError(
                    "a weight got its gradient in two parts: --virtual-ranks would send the first alone\n"
                    "leave the backward to the script, and give torch.utils.checkpoint use_reentrant=False"
                )
            self.waiting.remove(p)
            self._collect()

    @torch.no_grad()
    def _collect(self):
        """Add up filled buckets, in one order on every rank."""
        while self.filling and self.waiting.isdisjoint(self.filling[0].members):
            bucket = self.filling.pop(0)
            bucket.collect(carries(self.next, self.own.start))
            if self.next == self.own[-1]:
                bucket.send()

    # ---- the rest of the tree ---------------------------------------------------------------------
    @torch.no_grad()
    def finish(self):
        """Leave the sum of all slices in `.grad`, updates buffers; returns the totals."""
        self._skip_to(self.own.stop)
        for bucket in self.buckets:
            bucket.add()
        for bucket in self.buckets:
            bucket.finish()
        total = gradient_of(self.tail)
        self.buffers.apply(total[: self.buffers.numel])
        return total[self.buffers.numel :].double()


class Bucket:
    """Tensors of one type, on one device, whose gradients are exchanged together.

    Each rank ends the tree for its part of all their numbers.
    """

    def __init__(self, members, world, slices):
        self.members = members
        self.world = world
        self.rows = []  # gradients of the subtrees that wait for their other halves
        self.rows_of, self.order = tree_of(slices, world.size)
        self.sizes = [tensor.numel() for tensor in members]
        self.pad = members[0].detach().new_zeros(-sum(self.sizes) % world.size)

    def collect(self, carries):
        """Add the subtrees that a slice completes."""
        row = [gradient_of(tensor) for tensor in self.members]
        for _ in range(carries):
            left = self.rows.pop()
            torch._foreach_add_(left, row)
            row = left
        self.rows.append(row)

    def send(self):
        """Begin to send every rank its part of this rank's rows."""
        flat = torch.cat([part.flatten() for row in self.rows for part in (*row, self.pad)])
        parts = flat.view(len(self.rows), self.world.size, -1).transpose(0, 1).contiguous()
        self.rows = []
        rows = flat.new_empty(sum(self.rows_of), parts.shape[2])
        sizes = [parts.shape[1]] * self.world.size
        to_all = functools.partial(dist.all_to_all_single, rows, parts.flatten(0, 1), self.rows_of, sizes)
        self._exchange(parts, rows.split(self.rows_of), to_all)

    def add(self):
        """End the tree for this rank's part, and begin to send it to all."""
        sums = [*itertools.chain(*self._taken())]
        for i, j in self.order:
            sums[i] += sums[j]
        total = sums[0].new_empty(self.world.size, len(sums[0]))
        gather = functools.partial(dist.all_gather_into_tensor, total.view(-1), sums[0])
        self._exchange([sums[0]] * self.world.size, total, gather)

    def finish(self):
        """Leave the sum in `.grad` of each member; None where no slice has used it."""
        total = self._taken().flatten()
        firsts = total[[*itertools.accumulate(self.sizes[:-1], initial=0)]].tolist()
        parts = total[: sum(self.sizes)].split(self.sizes)
        for tensor, part, first in zip(self.members, parts, firsts, strict=True):
            unused = tensor.requires_grad and is_missing(first)  # the tail is always there
            # as the weight lies in memory: fused optimizers need that
            tensor.grad = None if unused else torch.empty_like(tensor).copy_(part.view(tensor.shape))

    def _exchange(self, given, taken, collective):
        """Begin to give each rank its part, and take theirs: gloo's collectives would copy all of it."""
        own = self.world.rank
        self.under_way = given, taken
        if is_gpu(self.pad.device) and self.world.size > 1:  # NCCL's ring crosses a network once a machine
            self.works = [collective(async_op=True)]
            return
        taken[own][:] = given[own]
        operations = [
            dist.P2POp(act, part, peer=rank)
            for act, parts in ((dist.isend, given), (dist.irecv, taken))
            for rank, part in enumerate(parts)
            if rank != own
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def _taken(self):
        """Wait for what is under way, and return it."""
        for work in self.works:
            work.wait()
            wait_by_polling(mark(self.pad.device))
        return self.under_way[1]


def buckets_of(tensors):
    """Return runs of tensors of one type, on one device, of about BUCKET_BYTES; the first is small."""
    runs = []
    size = 0
    kind = None
    for tensor in tensors:
        limit = BUCKET_BYTES if len(runs) > 1 else FIRST_BUCKET_BYTES
        if kind != (tensor.dtype, tensor.device) or size >= limit:
            runs.append([])
            kind = tensor.dtype, tensor.device
            size = 0
        runs[-1].append(tensor)
        size += tensor.nbytes
    return runs


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
