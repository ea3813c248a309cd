"""The gradient of a global batch as one fixed sum over slices (order.py): the same bits at any world size.

Each rank adds the subtrees it owns whole. Then every rank ends the tree for its part of each bucket
(all_to_all) and sends the result to all (all_gather). Collectives only move data; additions follow the tree.

    sums of rank 0   [a0 a1 a2]     all_to_all     rank 0 adds a0 b0 c0     all_gather
    sums of rank 1   [b0 b1 b2]   ------------->   rank 1 adds a1 b1 c1   ------------->   the sum, everywhere
    sums of rank 2   [c0 c1 c2]    (a part each)   rank 2 adds a2 b2 c2    (a part each)

A missing term is -0.0, the one number whose addition never changes a bit (+0.0 would turn -0.0 into +0.0):
for a parameter that a slice does not use, and for a slice of a short last batch without samples.
"""
import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from common.sampler import share
from common.training.bitwise.buffers import Buffers
from common.training.bitwise.order import blocks_of_ranks, carries, merges

ALIGN_BYTES = 64             # every gradient starts where an allocation of its own could start
FIRST_BUCKET_BYTES = 1 << 20     # small, to leave early; as in DDP
BUCKET_BYTES = 25 << 20      # of the other buckets
DIRECT_BYTES = 1 << 20       # with gloo, larger buckets travel as messages instead of collectives
PIECE_BYTES = 12 << 20       # exchanged at once: while one piece is added up, the next arrives


class Tree:
    """In each step: `begin`, one `leaf` around the backward of each of this rank's `slices`, `finish`."""

    def __init__(self, net, world, slices):
        self.world, self.count, self.slices = world, slices, share(slices, world.replica, world.replicas)
        self.params = [p for p in net.parameters() if p.requires_grad][::-1]  # roughly the order of backward
        self.buffers = Buffers(net, world.device)
        self.tail = len(self.params)  # index of the tensor after the gradients: changes of buffers, totals
        self.nothing = torch.zeros(self.buffers.numel + 2, dtype=self.buffers.dtype, device=world.device)
        self.nothing.neg_()  # the tail of a slice without samples
        shapes = [*self.params, self.nothing]
        blocks = blocks_of_ranks(slices, world.replicas)
        self.rows_of, self.order = [len(b) for b in blocks], merges([block for b in blocks for block in b])
        self.buckets = [Bucket(members, shapes, world, sum(self.rows_of)) for members in _cut(shapes)]
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}
        self.rows, self.sending = [], False
        if world.replicas > 1:
            for i, p in enumerate(self.params):
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._ready(i))

    # ---- this rank's slices -----------------------------------------------------------------------
    def begin(self, state):
        """Begins a step; the buffers are those of the last one."""
        self.rows = []
        self.buffers.begin(state.buffers)

    @contextlib.contextmanager
    def leaf(self, v):
        """Inside: `measure`, then exactly one backward; or nothing, for a slice without samples."""
        self.carries = carries(v, self.slices.start)
        if not self.carries:  # otherwise autograd adds into the gradients of the slice before
            self.rows.append([None] * (self.tail + 1))
            for p in self.params:
                p.grad = None
        self.done = 0
        self.sending = v == self.slices[-1] and self.world.replicas > 1
        if self.sending:
            for bucket in self.buckets:
                bucket.waiting = len(bucket.params)
        yield
        with torch.no_grad():
            while self.done < len(self.buckets):
                self._collect()
        self.sending = False
        if self.carries > 1:
            del self.rows[1 - self.carries:]

    @torch.no_grad()
    def moves(self, v, weight):
        """After the forward of a slice: its part in the changes of the buffers."""
        return self.buffers.moves(weight, counts=v == self.count - 1)

    @torch.no_grad()
    def measure(self, loss, hits, moves):
        """Before the backward: takes the slice's totals and its part in the changes of the buffers."""
        tail = torch.cat([*moves, torch.stack([loss.detach(), hits]).to(self.buffers.dtype)])
        row = self.rows[-1]
        row[self.tail] = tail if row[self.tail] is None else row[self.tail].add_(tail)

    def _ready(self, i):
        """Autograd's hook: the last slice sends buckets while backward runs, in one order on every rank."""
        if self.sending:
            self.bucket_of[i].waiting -= 1
            with torch.no_grad():
                while self.done < len(self.buckets) and not self.buckets[self.done].waiting:
                    self._collect()

    def _collect(self):
        """Adds the subtrees that this slice's next bucket completes; the last slice also sends it."""
        bucket, top = self.buckets[self.done], self.rows[-1]
        for i in bucket.params if not self.carries else ():
            p = self.params[i]
            if p.grad is None:
                p.grad = torch.full_like(p, -0.0)
            top[i] = p.grad
        if self.tail in bucket.members and top[self.tail] is None:
            top[self.tail] = self.nothing.clone()
        kept, plus = len(self.rows) - max(0, self.carries - 1), None
        for depth in range(len(self.rows) - 1, kept - 1, -1):
            if self.sending and depth == kept:
                plus = self.rows[depth]  # added while the bucket is filled
            else:
                left, right = ([row[i] for i in bucket.members] for row in self.rows[depth - 1:depth + 1])
                torch._foreach_add_(left, right)
        self.done += 1
        if self.sending:
            bucket.send(self.rows[:kept], self.rows_of, plus)

    # ---- the rest of the tree ---------------------------------------------------------------------
    @torch.no_grad()
    def finish(self):
        """Leaves the sum of all slices in `.grad`, updates buffers; returns this rank's share of totals."""
        if self.world.replicas == 1:
            for i, j in self.order:  # not empty if V is no power of two
                torch._foreach_add_(self.rows[i], self.rows[j])
            grads = self.rows[0]
        else:
            works = []
            for bucket in self.buckets:
                works += bucket.add(self.order, self.rows_of)
            for work in works:
                work.wait()
            grads = [self.bucket_of[i].views[i] for i in range(self.tail + 1)]
        for p, grad in zip(self.params, grads, strict=False):
            p.grad = grad
        self.buffers.apply(grads[self.tail][:-2])
        self.rows = []
        totals = grads[self.tail][-2:].double()
        # every replica has all totals; callers add those of the ranks
        return totals if self.world.replica == 0 else torch.zeros_like(totals)


def _cut(shapes):
    """Indices of tensors, in runs of one type, one device and about BUCKET_BYTES."""
    runs, size, kind = [], 0, None
    for i, t in enumerate(shapes):
        limit = BUCKET_BYTES if len(runs) > 1 else FIRST_BUCKET_BYTES
        if kind != (t.dtype, t.device) or size >= limit:
            runs.append([])
            size, kind = 0, (t.dtype, t.device)
        runs[-1].append(i)
        size += t.numel() * t.element_size()
    return runs


@dataclass(eq=False)
class Bucket:
    """Some gradients as one flat tensor that divides evenly among the replicas."""

    members: list
    shapes: list = field(repr=False)
    world: object
    rows: int
    waiting: int = 0

    def __post_init__(self):
        shapes, self.shapes = self.shapes, None
        kind = shapes[self.members[0]]
        self.params, self.size = [i for i in self.members if i < len(shapes) - 1], kind.element_size()
        align, starts, at = ALIGN_BYTES // self.size, {}, 0
        for i in self.members:
            starts[i] = at
            at += -(-shapes[i].numel() // align) * align
        count = max(1, round(at * self.size / PIECE_BYTES))
        self.part = -(-at // (count * align * self.world.replicas)) * align  # of a piece, per rank
        self.numel = self.part * self.world.replicas * count
        # gloo's collectives copy all data once or twice more, but are quicker than messages for small buckets
        self.direct = self.world.backend == "gloo" and at * self.size > DIRECT_BYTES
        if self.world.replicas == 1:
            return
        self.flat = torch.zeros(self.numel, dtype=kind.dtype, device=kind.device)
        self.pieces = self.flat.view(count, self.world.replicas, self.part)
        self.received = self.flat.new_zeros(count, self.rows, self.part)
        self.views = {i: _like(self.flat[at:at + shapes[i].numel()], shapes[i]) for i, at in starts.items()}

    def _fill(self, row, plus=None):
        for i in self.members if plus else ():
            torch.add(row[i], plus[i], out=self.views[i])
        if not plus:
            torch._foreach_copy_([self.views[i] for i in self.members], [row[i] for i in self.members])
        return self.pieces

    def send(self, rows, rows_of, plus=None):
        """Every rank gets its part of every piece of these sums; `plus` is added to the last sum first."""
        if len(rows) == 1:
            self.out = self._fill(rows[0], plus).unsqueeze(2)
        else:
            count, size, part = self.pieces.shape
            self.out = self.flat.new_empty(count, size, len(rows), part)  # must live until it is sent
            for k, row in enumerate(rows):
                self.out[:, :, k] = self._fill(row, plus if k == len(rows) - 1 else None)
        self.works = [self._scatter(*pair, rows_of) for pair in zip(self.out, self.received, strict=True)]

    def _scatter(self, out, received, rows_of):
        if self.direct:
            return _swap(self.world, out, received.split(rows_of), tag=1)
        sizes = [count * self.part for count in rows_of], [out[0].numel()] * self.world.replicas
        return [dist.all_to_all_single(received.view(-1), out.reshape(-1), *sizes, self.world.peers, True)]

    def add(self, order, rows_of):
        """Ends the tree for this rank's part of each piece; sends it to all while later pieces arrive."""
        handed, rank, group = [], self.world.replica, self.world.peers
        for works, piece, out, received in zip(self.works, self.pieces, self.out, self.received, strict=True):
            for work in works:
                work.wait()
            rows = list(received)
            if self.direct:  # `_swap` does not send a rank its own sums
                rows[sum(rows_of[:rank]):sum(rows_of[:rank + 1])] = out[rank]
            for i, j in order[:-1]:
                rows[i] += rows[j]
            i, j = order[-1]  # row 0 and the last row added to it
            torch.add(rows[i], rows[j], out=piece[rank])
            if self.direct:
                handed += _swap(self.world, [piece[rank]] * self.world.replicas, piece, tag=2)
            else:
                handed.append(dist.all_gather_into_tensor(piece.view(-1), piece[rank], group, async_op=True))
        self.out = self.works = None
        return handed


def _swap(world, outs, ins, tag):
    """Sends outs[q] to replica q and receives ins[q] from it."""
    works, group = [], world.peers
    for k in range(1, world.replicas):
        to, source = (world.replica + k) % world.replicas, (world.replica - k) % world.replicas
        works += [dist.isend(outs[to], group=group, group_dst=to, tag=tag),
                  dist.irecv(ins[source], group=group, group_src=source, tag=tag)]
    return works


def _like(flat, tensor):
    """A view with the strides of a dense tensor: fused optimizers walk gradient and weight in step."""
    if not dense(tensor):
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


def dense(tensor: torch.Tensor) -> bool:
    """Whether the numbers lie side by side, in any order of the dimensions."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()
