"""The gradient of a global batch as one fixed sum over slices (common/tree.py): the same bits at any number
of ranks.

Each rank adds what it owns whole of the tree; then every rank ends the tree for its part of each bucket
(all_to_all) and hands out the result (all_gather). Collectives here only move data: all arithmetic is in the
order of the tree.

    sums of rank 0    [a0 a1 a2]         all_to_all      rank 0 adds a0 b0 c0                  all_gather
    sums of rank 1    [b0 b1 b2]     --------------->    rank 1 adds a1 b1 c1     --------------->    the sum, everywhere
    sums of rank 2    [c0 c1 c2]      (a slice each)     rank 2 adds a2 b2 c2       (a slice each)

A missing term is -0.0, the one number whose addition changes no bit of anything (+0.0 would turn -0.0 into
+0.0): a parameter that a slice does not use, and a slice of a short last batch that has no samples, count the
same wherever they are.
"""
import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from common.sampler import share
from common.training.bitwise.buffers import Buffers
from common.training.bitwise.order import carries, held, merges

ALIGN = 64  # bytes: every gradient starts like an allocation of its own, as vector code likes it
FIRST, BUCKET = 1 << 20, 25 << 20  # bytes of the first bucket, early on its way, and of the others, as in DDP
DIRECT = 1 << 20  # bytes of a bucket from which on it travels as messages, not by collectives
PIECE = 12 << 20                     # bytes exchanged at once: while one piece is added up, the next arrives


class Tree:
    """One step: `begin`, then for each of this rank's `slices` one `leaf` with one backward in it, then
    `finish`.

    Of a net in stages each stage has a tree of its own, over the ranks that hold it.
    """

    def __init__(self, net, world, slices):
        self.world, self.count, self.slices = world, slices, share(slices, world.replica, world.replicas)
        self.params = [p for p in net.parameters() if p.requires_grad][::-1]  # about the order of backward
        self.buffers = Buffers(net, world.device)
        self.tail = len(self.params)  # what follows the gradients: moves of buffers, totals
        shapes = [*self.params, torch.zeros(self.buffers.numel + 2, dtype=self.buffers.dtype, device=world.device)]
        blocks = held(slices, world.replicas)
        self.rows_of, self.order = [len(b) for b in blocks], merges([block for b in blocks for block in b])
        self.buckets = [Bucket(members, shapes, world, sum(self.rows_of)) for members in _cut(shapes)]
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}
        self.rows, self.sending = [], False
        if world.replicas > 1:
            for i, p in enumerate(self.params):
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._ready(i))

    # ---- this rank's slices -----------------------------------------------------------------------
    def begin(self, state):
        """A new step; the buffers are as its last one left them."""
        self.rows = []
        self.buffers.begin(state.buffers)

    @contextlib.contextmanager
    def leaf(self, v):
        """Inside: `measure`, then exactly one backward; or nothing at all, for a slice without samples."""
        self.carries = carries(v, self.slices.start)
        if not self.carries:  # otherwise autograd adds straight into the sibling's gradients
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
        """After the forward of a slice: its part in the moves of the buffers."""
        return self.buffers.moves(weight, counts=v == self.count - 1)

    @torch.no_grad()
    def measure(self, loss, hits, moves):
        """Before the backward: the slice's totals, and its part in the moves of the buffers."""
        tail = torch.cat([*moves, torch.stack([loss.detach(), hits]).to(self.buffers.dtype)])
        row = self.rows[-1]
        row[self.tail] = tail if row[self.tail] is None else row[self.tail].add_(tail)

    def _ready(self, i):
        """Autograd's hook: in the last slice, buckets leave while backward still runs, in one order on every
        rank.
        """
        if self.sending:
            self.bucket_of[i].waiting -= 1
            with torch.no_grad():
                while self.done < len(self.buckets) and not self.buckets[self.done].waiting:
                    self._collect()

    def _collect(self):
        """The next bucket of this slice is whole: add the subtrees it completes; send it, if this was the
        last slice.
        """
        bucket, top = self.buckets[self.done], self.rows[-1]
        for i in bucket.params if not self.carries else ():
            p = self.params[i]
            if p.grad is None:
                p.grad = torch.full_like(p, -0.0)
            top[i] = p.grad
        if self.tail in bucket.members and top[self.tail] is None:
            top[self.tail] = torch.full((self.buffers.numel + 2,), -0.0, dtype=self.buffers.dtype, device=self.world.device)
        kept, plus = len(self.rows) - max(0, self.carries - 1), None
        for depth in range(len(self.rows) - 1, kept - 1, -1):
            if self.sending and depth == kept:
                plus = self.rows[depth]  # added on the way out
            else:
                torch._foreach_add_(*([row[i] for i in bucket.members] for row in self.rows[depth - 1:depth + 1]))
        self.done += 1
        if self.sending:
            bucket.send(self.rows[:kept], self.rows_of, plus)

    # ---- the rest of the tree ---------------------------------------------------------------------
    @torch.no_grad()
    def finish(self):
        """The sum over all slices is in `.grad`, the buffers have moved; returns this rank's part of the
        totals.
        """
        if self.world.replicas == 1:
            for i, j in self.order:  # no power of two: some subtrees have no right half
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
        # each replica knows them, one is asked
        return totals if self.world.replica == 0 else torch.zeros_like(totals)


def _cut(shapes):
    """Indices of tensors in runs of one type and device and at most so many bytes."""
    runs, size, kind = [], 0, None
    for i, t in enumerate(shapes):
        limit = BUCKET if len(runs) > 1 else FIRST
        if kind != (t.dtype, t.device) or size >= limit:
            runs.append([])
            size, kind = 0, (t.dtype, t.device)
        runs[-1].append(i)
        size += t.numel() * t.element_size()
    return runs


@dataclass(eq=False)
class Bucket:
    """Some gradients as one flat tensor that divides by the number of ranks."""

    members: list
    shapes: list = field(repr=False)
    world: object
    rows: int
    waiting: int = 0

    def __post_init__(self):
        shapes, self.shapes = self.shapes, None
        kind = shapes[self.members[0]]
        self.params, self.size = [i for i in self.members if i < len(shapes) - 1], kind.element_size()
        align, starts, at = ALIGN // self.size, {}, 0
        for i in self.members:
            starts[i] = at
            at += -(-shapes[i].numel() // align) * align
        count = max(1, round(at * self.size / PIECE))
        # what each rank adds up of a piece, and hands out
        self.part = -(-at // (count * align * self.world.replicas)) * align
        self.numel = self.part * self.world.replicas * count
        # gloo's collectives copy everything once or twice more; for little, they are quicker than messages.
        self.direct = self.world.backend == "gloo" and at * self.size > DIRECT
        if self.world.replicas == 1:
            return
        self.flat = torch.zeros(self.numel, dtype=kind.dtype, device=kind.device)
        self.pieces = self.flat.view(count, self.world.replicas, self.part)
        self.received = self.flat.new_zeros(count, self.rows, self.part)
        self.views = {i: _like(self.flat[start:start + shapes[i].numel()], shapes[i]) for i, start in starts.items()}

    def _fill(self, row, plus=None):
        if plus is None:
            torch._foreach_copy_([self.views[i] for i in self.members], [row[i] for i in self.members])
        else:
            for i in self.members:
                torch.add(row[i], plus[i], out=self.views[i])
        return self.pieces

    def send(self, rows, held, plus=None):
        """Every rank gets its part of every piece of these sums; `plus` is still to be added to the last one.
        """
        if len(rows) == 1:
            self.out = self._fill(rows[0], plus).unsqueeze(2)
        else:
            count, size, part = self.pieces.shape
            # kept: it must live until it is sent
            self.out = self.flat.new_empty(count, size, len(rows), part)
            for k, row in enumerate(rows):
                self.out[:, :, k] = self._fill(row, plus if k == len(rows) - 1 else None)
        self.works = [self._scatter(out, received, held) for out, received in zip(self.out, self.received, strict=True)]

    def _scatter(self, out, received, held):
        if self.direct:
            return _swap(self.world, out, received.split(held), tag=1)
        return [dist.all_to_all_single(received.view(-1), out.reshape(-1), [count * self.part for count in held],
                                       [out[0].numel()] * self.world.replicas, group=self.world.peers, async_op=True)]

    def add(self, order, held):
        """End the tree for this rank's part of each piece, and start to hand it out while the next ones still
        arrive.
        """
        handed, rank = [], self.world.replica
        for works, piece, out, received in zip(self.works, self.pieces, self.out, self.received, strict=True):
            for work in works:
                work.wait()
            rows = list(received)
            if self.direct:  # its own sums have not travelled
                rows[sum(held[:rank]):sum(held[:rank + 1])] = out[rank]
            for i, j in order[:-1]:
                rows[i] += rows[j]
            i, j = order[-1]  # row 0 and the last one added to it
            torch.add(rows[i], rows[j], out=piece[rank])
            if self.direct:
                handed += _swap(self.world, [piece[rank]] * self.world.replicas, piece, tag=2)
            else:
                handed.append(dist.all_gather_into_tensor(piece.view(-1), piece[rank], group=self.world.peers, async_op=True))
        self.out = self.works = None
        return handed


def _swap(world, outs, ins, tag):
    """outs[q] goes to replica q, ins[q] comes from it."""
    works, group = [], world.peers
    for k in range(1, world.replicas):
        to, source = (world.replica + k) % world.replicas, (world.replica - k) % world.replicas
        works += [dist.isend(outs[to], group=group, group_dst=to, tag=tag),
                  dist.irecv(ins[source], group=group, group_src=source, tag=tag)]
    return works


def _like(flat, tensor):
    """A view with the tensor's own strides where they leave no holes: fused optimizers walk gradient and
    weight in step.
    """
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset()) if dense else flat.view(tensor.shape)
