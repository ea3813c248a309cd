r"""The gradient of a global batch as one fixed sum over V slices: the same bits at any number of ranks.

    slice    0   1   2   3   4   5   6
              \ /     \ /     \ /   /          V = 7: a perfect tree of 8, without the missing slices
               +       +       +   /
                \     /         \ /            A rank adds the subtrees it owns whole, as a binary counter
                   +             +             carries; `merges` lists the other additions in their order.
                    \           /
                          +

Floating-point addition is not associative: only a fixed tree gives the same bits at any number of ranks. If V
and the world are powers of two, each rank's slices are one subtree, so it sends one sum. No tree does that
for all divisors: halves and thirds of six slices overlap, and subtrees of one tree never do.

Every rank ends the tree for its part of each bucket (all_to_all) and sends the result to all (all_gather).
Collectives only move data; additions follow the tree.

    sums of rank 0   [a0 a1 a2]     all_to_all     rank 0 adds a0 b0 c0     all_gather
    sums of rank 1   [b0 b1 b2]   ------------->   rank 1 adds a1 b1 c1   ------------->   the sum, everywhere
    sums of rank 2   [c0 c1 c2]    (a part each)   rank 2 adds a2 b2 c2    (a part each)

A missing term is -0.0, the one number whose addition never changes a bit (+0.0 would turn -0.0 into +0.0):
for a parameter that a slice does not use, and for a slice of a short last batch without samples.
"""
import contextlib

import torch

from common.sampler import hash_seed, share
from common.training.bitwise.buckets import Bucket
from common.world import fingerprint_of

FIRST_BUCKET_BYTES = 1 << 20     # small, to leave early; as in DDP
BUCKET_BYTES = 25 << 20      # of the other buckets


class Tree:
    """In each step: `begin`, one `leaf` around the backward of each of this rank's `slices`, `finish`."""

    def __init__(self, net, world, slices, mine=None):
        self.world, self.count = world, slices
        self.slices = mine or share(slices, world.replica, world.replicas)
        self.seen = 0  # the bits of the slice that a second rank computes too (--cross-check)
        self.buckets, self.rows, self.sending = [], [], False
        self.params = [p for p in net.parameters() if p.requires_grad][::-1]  # roughly the order of backward
        self.tail = len(self.params)  # index of the tensor after the gradients: changes of buffers, totals
        if world.replicas > 1:
            for i, p in enumerate(self.params):
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._ready(i))

    def _plan(self, task):
        """Before the first step: how many totals there are decides the last bucket."""
        exact = not task.ahead or any(b.dtype == torch.float64 for b in self.buffers.committed.values())
        self.kind, self.totals = torch.float64 if exact else torch.float32, len(task.zeros(self.world.device))
        self.nothing = torch.full((self.buffers.numel + self.totals,), -0.0, dtype=self.kind,
                                  device=self.world.device)  # the tail of a slice without samples
        shapes = [*self.params, self.nothing]
        blocks = blocks_of_ranks(self.count, self.world.replicas)
        self.rows_of, self.order = [len(b) for b in blocks], merges([block for b in blocks for block in b])
        self.buckets = [Bucket(members, shapes, self.world, sum(self.rows_of)) for members in _cut(shapes)]
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}

    # ---- this rank's slices -----------------------------------------------------------------------
    def begin(self, state):
        """Begins a step; the buffers are those of the last one."""
        self.rows, self.buffers = [], state.buffers
        if not self.buckets:
            self._plan(state.task)
        self.buffers.begin(self.world.device, self.kind)
        self.checked = checked(state.opts, state.step, self.world.size)

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
        if self.checked and self.checked[:2] == (self.world.rank, v):
            self.seen = fingerprint_of(dict(enumerate(self.rows[-1])))
        if self.carries > 1:
            del self.rows[1 - self.carries:]

    @torch.no_grad()
    def measure(self, totals, moves):
        """Before the backward: takes the slice's totals and its part in the changes of the buffers."""
        tail = torch.cat([*moves, totals])
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
    def finish(self, batch, state):
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
        self.buffers.apply(grads[self.tail][:-self.totals])
        self.rows = []
        totals = grads[self.tail][-self.totals:].double()
        state.count(totals[1], batch.size, self.world.sum_over_stages)
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


def carries(v, start):
    """How many additions slice v completes on a rank whose slices begin at `start`, the first with v - 1."""
    count = 0
    while (v + 1) % (2 << count) == 0 and v + 1 - (2 << count) >= start:
        count += 1
    return count


def checked(opts, step, world):
    """(rank, its slice, another rank): both compute it after `step` steps (--cross-check); or None."""
    if world == 1 or not opts.cross_check or (step + 1) % opts.cross_check:
        return None
    rank, nth, other = (hash_seed(word, opts.seed, step) for word in ("rank", "slice", "second"))
    mine = share(opts.virtual_ranks, rank % world, world)
    alone = [v for v in mine if not carries(v, mine.start)]  # its gradient is not added to another's at once
    return rank % world, alone[nth % len(alone)], (rank + 1 + other % (world - 1)) % world


def blocks(mine):
    """The subtrees a rank has after its additions, as (first slice, slices): they tile its range."""
    out, first = [], mine.start
    while first < mine.stop:
        size = first & -first if first else 1 << mine.stop.bit_length()
        while first + size > mine.stop:
            size >>= 1
        out.append((first, size))
        first += size
    return out


def merges(rows):
    """[(i, j)]: the additions `row[i] += row[j]` that end the tree in row 0, for `rows` = all blocks."""
    stack, order = [], []  # of [first slice, slices, row]

    def add():
        right = stack.pop()[2]
        order.append((stack[-1][2], right))
        stack[-1][1] *= 2

    for row, (first, size) in enumerate(rows):
        stack.append([first, size, row])
        while len(stack) > 1 and stack[-2][1] == stack[-1][1] and not stack[-2][0] % (2 * stack[-1][1]):
            add()
    while len(stack) > 1:  # V is no power of two: some right halves are missing
        add()
    return order


def blocks_of_ranks(slices, world):
    """The blocks that each rank sends; in rank order they tile all slices."""
    return [blocks(share(slices, rank, world)) for rank in range(world)]
