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

Every rank ends the tree for its part of each bucket, and sends the result to all. Collectives only move data;
additions follow the tree. The last slice sends a bucket as soon as backward has filled it.

    sums of rank 0   [a0 a1 a2]       `send`       rank 0 adds a0 b0 c0       `add`
    sums of rank 1   [b0 b1 b2]   ------------->   rank 1 adds a1 b1 c1   ------------->   the sum, everywhere
    sums of rank 2   [c0 c1 c2]    (a part each)   rank 2 adds a2 b2 c2    (a part each)

A missing term is -0.0, the one number whose addition never changes a bit (+0.0 would turn -0.0 into +0.0):
for a parameter that a slice does not use, and for a slice of a short last batch without samples. So a sum
that begins with -0.0 has no term: such a parameter gets no gradient, as in torch's own loops. What a backward
leaves never begins so (`_ready`).
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
from common.extras.tasks import end_mean
from common.options import extra
from common.sampler import hash_seed, share
from common.training import Gradient

ALIGN_BYTES = 64  # every gradient starts where an allocation of its own could start
FIRST_BUCKET_BYTES = 1 << 20  # of gradients that are sent together: small, to leave early; as in DDP
BUCKET_BYTES = 25 << 20  # of the other buckets


def gradient_of_slices(net, opts, world):
    """Return what makes the gradient of (batch, state, world, split) with --virtual-ranks."""
    refuse_dropout_of_cudnn(net, world.device)
    slices = Slices(net, world, opts.virtual_ranks)
    kind = extra("cross_check") if opts.cross_check and world.size > 1 else SliceGradient
    return functools.partial(kind, slices)


def refuse_dropout_of_cudnn(net, device):
    """Refuse draws that no seed sets."""
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
            tail = self.slices.measured(self.number, len(self.ids) / size, totals)
            self.slices.backward(self.number, tail, self.state.scaler.scale(loss / size))

    def finish(self):
        """Average over the ranks; returns the totals of all on rank 0, as callers add those of the ranks."""
        totals = self.slices.finish()
        if not self.counts_samples:
            end_mean(self, totals[1])
        return totals if self.world.rank == 0 else torch.zeros_like(totals)


class Slices:
    """A net whose gradient is that sum. In each step: `begin`, `backward` of slices with samples, `finish`.

    A slice's totals and its changes of buffers are summed as the gradient of one more tensor, `tail`.
    """

    def __init__(self, net, world, slices):
        self.world = world
        self.count = slices
        self.own = share(slices, world.rank, world.size)
        self.params = [p for p in net.parameters() if p.requires_grad][::-1]  # roughly the order of backward
        self.buckets = []
        self.turn = threading.Lock()
        for p in self.params:
            p.register_post_accumulate_grad_hook(self._ready)

    def begin(self, state, totals, counts_samples):
        """Begin a step with so many totals; the buffers are those of the last one."""
        if not self.buckets:
            self.buffers = MeanOfBuffers(state.statistics)
            exact = not counts_samples or torch.float64 in self.buffers.kinds
            self.kind = torch.float64 if exact else torch.float32
            size = self.buffers.numel + len(totals)
            self.tail = torch.empty(size, dtype=self.kind, device=totals.device)
            self.tensors = [*self.params, self.tail]
            sizes = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
            for places in dist._compute_bucket_assignment_by_size(self.tensors, sizes)[0]:  # as DDP cuts them
                members = [self.tensors[i] for i in places]
                self.buckets.append(Bucket(members, self.world, self.count))
            self.bucket_of = {tensor: bucket for bucket in self.buckets for tensor in bucket.members}
        self.next = self.own.start

    # ---- this rank's slices -----------------------------------------------------------------------
    def measured(self, v, weight, totals):
        """Return what slice v adds to the tail: call it after its forward."""
        moves = self.buffers.moves(weight, v == self.count - 1, self.kind)
        return torch.cat([moves.to(totals.device), totals.to(self.kind)])

    def backward(self, v, tail, output):
        """Run the backward of slice v; slices that are left out have no samples."""
        self._skip_to(v)
        self._sum(tail, output)

    def _skip_to(self, v):
        """Give slices without samples, up to v, their places in the sum."""
        while self.next < v:
            self._sum()

    def _sum(self, tail=None, output=None):
        """Add the next slice, in the order of the tree: from its backward to its place in the sum."""
        self.carries = carries(self.next, self.own.start)
        if not self.carries:  # otherwise autograd adds to the gradients of the slice before
            for tensor in self.tensors:
                tensor.grad = None
        for bucket in self.buckets:
            bucket.waiting = {tensor for tensor in bucket.members if tensor.requires_grad}
        self.filling = [*self.buckets]
        if output is not None:
            self.tail.grad = self.tail.grad.add_(tail) if self.carries else tail
            if output.requires_grad:
                output.backward()
        for bucket in self.filling:  # with what this slice does not use
            bucket.waiting.clear()
        self._collect()
        self.next += 1

    def _ready(self, p):
        """Send, as autograd's hook in the last slice's backward, the buckets that it has filled."""
        with self.turn:  # autograd has a thread a device
            waiting = self.bucket_of[p].waiting
            if p not in waiting:
                raise UserError(
                    "a weight got its gradient in two parts: --virtual-ranks would send the first alone\n"
                    "leave the backward to the script, and give torch.utils.checkpoint use_reentrant=False"
                )
            waiting.remove(p)
            first = p.grad.detach().as_strided((1,), (1,), p.grad.storage_offset())
            first += 0.0  # -0.0, as of loss - 0 * w, becomes 0.0: it is used
            self._collect()

    @torch.no_grad()
    def _collect(self):
        """Take filled buckets, in one order on every rank."""
        while self.filling and not self.filling[0].waiting:
            bucket = self.filling.pop(0)
            bucket.collect(self.carries)
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
            bucket.wait()
            firsts = bucket.flat[0].view(-1)[bucket.starts].tolist()
            for tensor, total, first in zip(bucket.members, bucket.views[0], firsts, strict=True):
                unused = tensor.requires_grad and is_missing(first)  # the tail is always there
                tensor.grad = None if unused else total
        self.buffers.apply(self.tail.grad[: self.buffers.numel])
        return self.tail.grad[self.buffers.numel :].double()


class Bucket:
    """Tensors whose gradients are exchanged together; each replica ends the tree for its part of them."""

    def __init__(self, members, world, slices):
        self.members = members
        self.world = world
        self.waiting = set()  # members without the gradient of the slice whose backward runs
        self.rows = []  # gradients of the subtrees that wait for their other halves
        self.works = []  # collectives under way
        self.rows_of, self.order = tree_of(slices, world.size)
        first = members[0].detach()
        align = ALIGN_BYTES // first.element_size()
        sizes = [-(-tensor.numel() // align) * align for tensor in members]
        part = -(-sum(sizes) // (align * world.size)) * align
        self.flat = first.new_zeros(self.rows_of[world.rank], world.size, part)  # the rows to send
        self.starts = [*itertools.accumulate(sizes[:-1], initial=0)]
        self.views = []  # parts of each row, as the members lie in memory: fused optimizers need that
        for row in self.flat:
            places = [row.storage_offset() + start for start in self.starts]
            parts = zip(members, places, strict=True)
            self.views.append([row.as_strided(t.shape, t.stride(), place) for t, place in parts])
        self.taken = first.new_empty(sum(self.rows_of), part)
        self.received = list(self.taken.split(self.rows_of))
        self.has_collectives = is_gpu(first.device) and world.size > 1

    def collect(self, carries):
        """Add the subtrees that a slice completes; autograd has made the first of these additions."""
        if carries:
            self.rows.pop()
        self.rows.append([gradient_of(tensor) for tensor in self.members])
        for _ in range(carries - 1):
            right = self.rows.pop()
            torch._foreach_add_(self.rows[-1], right)

    def send(self):
        """Begin to send every replica its part of this rank's rows."""
        for views, row in zip(self.views, self.rows, strict=True):
            torch._foreach_copy_(views, row)
        self.rows.clear()
        parts = self.flat.transpose(0, 1).contiguous()  # a copy only if there are several rows
        if self.has_collectives:
            sizes = [len(self.flat)] * self.world.size
            sent = dist.all_to_all_single(self.taken, parts.flatten(0, 1), self.rows_of, sizes, async_op=True)
            self.works = [sent]
        else:
            self.received[self.world.rank] = parts[self.world.rank]
            self._exchange(parts, self.received)

    def add(self):
        """End the tree for this rank's part, and begin to send it to all."""
        self.wait()
        rows = [*itertools.chain(*self.received)]
        result = self.flat[0]
        part = result[self.world.rank]
        for i, j in self.order[:-1]:
            rows[i] += rows[j]
        if self.order:  # else one row is the sum
            i, j = self.order[-1]
            torch.add(rows[i], rows[j], out=part)
        if self.has_collectives:  # NCCL's ring crosses a network once a machine
            self.works = [dist.all_gather_into_tensor(result.view(-1), part, async_op=True)]
        else:
            self._exchange([part] * self.world.size, result)

    def _exchange(self, given, taken):
        """Begin to give each replica its part; as messages, for gloo's collectives copy all of it."""
        operations = [
            dist.P2POp(act, part, peer=q)
            for act, parts in ((dist.isend, given), (dist.irecv, taken))
            for q, part in enumerate(parts)
            if q != self.world.rank
        ]
        if operations:
            self.works = dist.batch_isend_irecv(operations)

    def wait(self):
        while self.works:
            self.works.pop(0).wait()
            wait_by_polling(mark(self.flat.device))


def is_missing(first):
    """Return whether the first number of a sum is -0.0."""
    return not first and math.copysign(1.0, first.real) < 0


def gradient_of(tensor):
    """Return the gradient that a slice, or two, have left; -0.0 where they do not use the tensor."""
    if tensor.grad is None:
        tensor.grad = torch.full_like(tensor, -0.0)
    return tensor.grad


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
