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

Every rank ends the tree for its part of each bucket, and sends the result to all. Messages only move data;
additions follow the tree. The last slice sends a bucket as soon as backward has filled it.

    sums of rank 0   [a0 a1 a2]       `send`       rank 0 adds a0 b0 c0       `add`
    sums of rank 1   [b0 b1 b2]   ------------->   rank 1 adds a1 b1 c1   ------------->   the sum, everywhere
    sums of rank 2   [c0 c1 c2]    (a part each)   rank 2 adds a2 b2 c2    (a part each)

A missing term is -0.0, the one number whose addition never changes a bit (+0.0 would turn -0.0 into +0.0):
for a parameter that a slice does not use, and for a slice of a short last batch without samples.
"""
import contextlib

import torch
import torch.distributed as dist

from common.sampler import hash_seed, share
from common.world import fingerprint_of

ALIGN_BYTES = 64                 # every gradient starts where an allocation of its own could start
FIRST_BUCKET_BYTES = 1 << 20     # small, to leave early; as in DDP
BUCKET_BYTES = 25 << 20          # of the other buckets


class Tree:
    """In each step: `begin`, one `leaf` around the backward of each of this rank's `slices`, `finish`."""

    def __init__(self, net, world, slices, mine=None):
        self.world = world
        self.count = slices
        self.slices = mine or share(slices, world.replica, world.replicas)
        self.params = [p for p in net.parameters() if p.requires_grad][::-1]  # roughly the order of backward
        self.tail = len(self.params)  # index of the tensor after the gradients: changes of buffers, totals
        self.buckets = []
        self.seen = 0  # the bits of the slice that all ranks compute (--cross-check)
        if world.replicas > 1:
            for i, p in enumerate(self.params):
                p.register_post_accumulate_grad_hook(lambda _, i=i: self._ready(i))

    def _plan(self, task):
        """Before the first step: how many totals there are decides the last bucket."""
        exact = not task.ahead or any(b.dtype == torch.float64 for b in self.buffers.committed.values())
        self.kind = torch.float64 if exact else torch.float32
        self.totals = len(task.zeros(self.world.device))
        tail = torch.empty(self.buffers.numel + self.totals, dtype=self.kind, device=self.world.device)
        tensors = [*self.params, tail]
        self.buckets = [Bucket({i: tensors[i] for i in members}, self.world, self.count)
                        for members in _cut(tensors)]
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}

    # ---- this rank's slices -----------------------------------------------------------------------
    def begin(self, state):
        """Begins a step; the buffers are those of the last one."""
        self.buffers = state.buffers
        if not self.buckets:
            self._plan(state.task)
        self.buffers.begin(self.world.device, self.kind)
        self.checked = checked(state.opts, state.step, self.world.size)
        self.next = self.slices.start
        self.rows = 0  # subtrees that wait for their other halves
        self.sending = False

    @contextlib.contextmanager
    def leaf(self, v):
        """Inside: `measure`, then exactly one backward. Slices that were left out have no samples."""
        self._empty(v)
        self._open(v)
        yield
        self._close()

    def _empty(self, end):
        while self.next < end:
            self._open(self.next)
            self._close()

    def _open(self, v):
        self.carries = carries(v, self.slices.start)
        if not self.carries:  # otherwise autograd adds to the gradients of the slice before
            self.rows += 1
            for bucket in self.buckets:
                bucket.open(self.rows)
            for i, p in enumerate(self.params):
                p.grad = self._gradient(i, self.rows)
        self.done = 0
        self.sending = v == self.slices[-1] and self.world.replicas > 1
        if self.sending:
            for bucket in self.buckets:
                bucket.waiting = sum(i != self.tail for i in bucket.members)

    @torch.no_grad()
    def _close(self):
        while self.done < len(self.buckets):
            self._collect()
        self.sending = False
        if self.next == self.checked:
            self.seen = fingerprint_of({i: self._gradient(i, self.rows) for i in range(self.tail + 1)})
        self.rows -= max(0, self.carries - 1)
        self.next += 1

    def _gradient(self, i, row):
        return self.bucket_of[i].views[row - 1][i]

    @torch.no_grad()
    def measure(self, totals, moves):
        """Before the backward: takes the slice's totals and its part in the changes of the buffers."""
        self._gradient(self.tail, self.rows).add_(torch.cat([moves, totals]))

    @torch.no_grad()
    def _ready(self, i):
        """Autograd's hook: the last slice sends buckets while backward runs, in one order on every rank."""
        if self.sending:
            self.bucket_of[i].waiting -= 1
            while self.done < len(self.buckets) and not self.buckets[self.done].waiting:
                self._collect()

    def _collect(self):
        """Adds the subtrees that this slice's next bucket completes; the last slice also sends it."""
        bucket = self.buckets[self.done]
        self.done += 1
        for row in range(self.rows - 1, self.rows - self.carries, -1):
            bucket.rows[row - 1] += bucket.rows[row]
        if self.sending:
            bucket.send()

    # ---- the rest of the tree ---------------------------------------------------------------------
    @torch.no_grad()
    def finish(self, batch, state):
        """Leaves the sum of all slices in `.grad`, updates buffers; returns this rank's share of totals."""
        self._empty(self.slices.stop)
        works = [work for bucket in self.buckets for work in bucket.add()]
        for work in works:
            work.wait()
        for i, p in enumerate(self.params):
            p.grad = self._gradient(i, 1)
        tail = self._gradient(self.tail, 1)
        self.buffers.apply(tail[:-self.totals])
        totals = tail[-self.totals:].double()
        state.count(totals[1], batch.size, self.world.sum_over_stages)
        # every replica has all totals; callers add those of the ranks
        return totals if self.world.replica == 0 else torch.zeros_like(totals)


class Bucket:
    """Some gradients side by side, in a row for each subtree; a row divides evenly among the replicas."""

    def __init__(self, members, world, slices):
        self.members = members  # {index: a tensor of this shape}
        self.world = world
        self.rows = []  # (replicas, part) numbers each
        self.views = []  # of each row: {index: gradient}
        self.works = []  # messages under way
        first = next(iter(members.values()))
        align = ALIGN_BYTES // first.element_size()
        self.starts = {}
        size = 0
        for i, tensor in members.items():
            self.starts[i] = size
            size += -(-tensor.numel() // align) * align
        part = -(-size // (align * world.replicas)) * align
        self.empty = first.detach().new_empty(world.replicas, part)
        subtrees = blocks_of_ranks(slices, world.replicas)
        self.rows_of = [len(each) for each in subtrees]
        self.order = merges([block for each in subtrees for block in each])
        self.received = first.detach().new_empty(sum(self.rows_of), part)

    def open(self, count):
        """The last of so many rows begins as nothing."""
        if count > len(self.rows):
            row = torch.empty_like(self.empty)
            self.rows.append(row)
            self.views.append({i: _like(row.view(-1)[at:at + self.members[i].numel()], self.members[i])
                               for i, at in self.starts.items()})
        self.rows[count - 1].fill_(-0.0)

    def send(self):
        """Begins to send every replica its part of this rank's rows."""
        rows = self.rows[:self.rows_of[self.world.replica]]
        self.works = _swap(self.world, [[row[q] for row in rows] for q in range(self.world.replicas)],
                           self.received.split(self.rows_of))

    def add(self):
        """Ends the tree for this rank's part, and begins to send it to all; returns the messages."""
        for work in self.works:
            work.wait()
        rank = self.world.replica
        terms = [list(rows) for rows in self.received.split(self.rows_of)]
        terms[rank] = [row[rank] for row in self.rows[:self.rows_of[rank]]]
        terms = [term for rows in terms for term in rows]
        for i, j in self.order:
            terms[i] += terms[j]
        result = self.rows[0]
        result[rank].copy_(terms[0])
        return _swap(self.world, [[terms[0]]] * self.world.replicas, [[part] for part in result])


def _swap(world, outs, ins):
    """Begins to send the tensors outs[q] to replica q, and to receive ins[q] from it."""
    operations = []
    for k in range(1, world.replicas):
        to = (world.replica + k) % world.replicas
        source = (world.replica - k) % world.replicas
        operations += [dist.P2POp(dist.isend, out, group=world.peers, group_peer=to) for out in outs[to]]
        operations += [dist.P2POp(dist.irecv, into, group=world.peers, group_peer=source)
                       for into in ins[source]]
    return dist.batch_isend_irecv(operations) if operations else []


def _like(flat, tensor):
    """A view with the strides of a dense tensor: fused optimizers walk gradient and weight in step."""
    if not dense(tensor):
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


def dense(tensor: torch.Tensor) -> bool:
    """Whether the numbers lie side by side, in any order of the dimensions."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()


def _cut(tensors):
    """Indices of tensors, in runs of one type, one device and about BUCKET_BYTES; the first is small."""
    runs = []
    size = 0
    kind = None
    for i, tensor in enumerate(tensors):
        limit = BUCKET_BYTES if len(runs) > 1 else FIRST_BUCKET_BYTES
        if kind != (tensor.dtype, tensor.device) or size >= limit:
            runs.append([])
            kind = tensor.dtype, tensor.device
            size = 0
        runs[-1].append(i)
        size += tensor.nbytes
    return runs


def carries(v, start):
    """How many additions slice v completes on a rank whose slices begin at `start`, the first with v - 1."""
    count = 0
    while (v + 1) % (2 << count) == 0 and v + 1 - (2 << count) >= start:
        count += 1
    return count


def checked(opts, step, world):
    """The slice that all ranks compute after `step` steps (--cross-check), or None."""
    if world == 1 or not opts.cross_check or (step + 1) % opts.cross_check:
        return None
    rank = hash_seed("rank", opts.seed, step) % world
    mine = share(opts.virtual_ranks, rank, world)
    alone = [v for v in mine if not carries(v, mine.start)]  # its gradient is not added to another's at once
    return alone[hash_seed("slice", opts.seed, step) % len(alone)]


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
