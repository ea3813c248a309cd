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
import torch
import torch.distributed as dist

from common.sampler import hash_seed, share
from common.world import fingerprint_of

ALIGN_BYTES = 64                 # every gradient starts where an allocation of its own could start
FIRST_BUCKET_BYTES = 1 << 20     # small, to leave early; as in DDP
BUCKET_BYTES = 25 << 20          # of the other buckets


class Tree:
    """In each step: `begin`, a `backward` for each of this rank's slices that has samples, `finish`.

    A slice's totals and its changes of buffers are summed as the gradient of one more tensor, `tail`.
    """

    def __init__(self, net, world, slices):
        self.world = world
        self.count = slices
        self.slices = share(slices, world.replica, world.replicas)
        self.params = [p for p in net.parameters() if p.requires_grad][::-1]  # roughly the order of backward
        self.buckets = []
        self.sending = False
        self.seen = 0  # the bits of the slice that all ranks compute (--cross-check)
        if world.replicas > 1:
            for p in self.params:
                p.register_post_accumulate_grad_hook(self._ready)

    def _plan(self, state):
        """Before the first step: how many totals there are decides the last bucket."""
        committed = state.buffers.committed.values()
        exact = not state.task.ahead or any(b.dtype == torch.float64 for b in committed)
        self.kind = torch.float64 if exact else torch.float32
        self.totals = len(state.task.zeros(self.world.device))
        size = state.buffers.numel + self.totals
        self.tail = torch.empty(size, dtype=self.kind, device=self.world.device)
        self.tensors = [*self.params, self.tail]
        self.buckets = [Bucket(members, self.world, self.count) for members in _cut(self.tensors)]
        self.bucket_of = {tensor: bucket for bucket in self.buckets for tensor in bucket.members}

    # ---- this rank's slices -----------------------------------------------------------------------
    def begin(self, state):
        """Begins a step; the buffers are those of the last one."""
        self.buffers = state.buffers
        if not self.buckets:
            self._plan(state)
        self.checked = checked(state.opts, state.step, self.world.size)
        self.next = self.slices.start

    def measured(self, v, weight, totals):
        """What slice v adds to the tail: call it after its forward."""
        moves = self.buffers.moves(weight, v == self.count - 1, self.kind)
        return torch.cat([moves.to(totals.device), totals])

    def backward(self, v, tail, output, gradient=None):
        """The backward of slice v; slices that are left out have no samples."""
        self._skip(v)
        self._open()
        if self.carries:
            tail = self.tail.grad.add_(tail)
        self.tail.grad = tail
        if output.requires_grad:
            output.backward(gradient)
        self._close()

    def _skip(self, end):
        while self.next < end:
            self._open()
            self._close()

    def _open(self):
        self.carries = carries(self.next, self.slices.start)
        if not self.carries:  # otherwise autograd adds to the gradients of the slice before
            for tensor in self.tensors:
                tensor.grad = None
        self.done = 0
        self.sending = self.next == self.slices[-1]
        for bucket in self.buckets:
            bucket.waiting = sum(tensor.requires_grad for tensor in bucket.members)

    @torch.no_grad()
    def _close(self):
        while self.done < len(self.buckets):
            self._collect()
        self.sending = False
        if self.next == self.checked:
            self.seen = self.bits()
        self.next += 1

    @torch.no_grad()
    def _ready(self, p):
        """Autograd's hook: the last slice sends buckets while backward runs, in one order on every rank."""
        if self.sending:
            self.bucket_of[p].waiting -= 1
            while self.done < len(self.buckets) and not self.buckets[self.done].waiting:
                self._collect()

    def _collect(self):
        bucket = self.buckets[self.done]
        self.done += 1
        bucket.collect(self.carries)
        if self.sending:
            bucket.send()

    def bits(self):
        """A sum over all bits of the gradient of one slice."""
        return fingerprint_of({i: gradient_of(tensor) for i, tensor in enumerate(self.tensors)})

    # ---- the rest of the tree ---------------------------------------------------------------------
    @torch.no_grad()
    def finish(self, batch, state):
        """Leaves the sum of all slices in `.grad`, updates buffers; returns this rank's share of totals."""
        self._skip(self.slices.stop)
        works = [work for bucket in self.buckets for work in bucket.add()]
        for work in works:
            work.wait()
        for bucket in self.buckets:
            for tensor, total in zip(bucket.members, bucket.views[0], strict=True):
                tensor.grad = total
        self.buffers.apply(self.tail.grad[:-self.totals])
        totals = self.tail.grad[-self.totals:].double()
        state.count(totals[1], batch.size, self.world.sum_over_stages)
        # every replica has all totals; callers add those of the ranks
        return totals if self.world.replica == 0 else torch.zeros_like(totals)


class Bucket:
    """Tensors whose gradients are exchanged together; each replica ends the tree for its part of them."""

    def __init__(self, members, world, slices):
        self.members = members
        self.world = world
        self.waiting = 0  # members without the gradient of the last slice
        self.rows = []    # gradients of the subtrees that wait for their other halves
        self.works = []   # messages under way
        subtrees = blocks_of_ranks(slices, world.replicas)
        self.rows_of = [len(blocks) for blocks in subtrees]
        self.order = merges([block for blocks in subtrees for block in blocks])
        first = members[0].detach()
        align = ALIGN_BYTES // first.element_size()
        sizes = [-(-tensor.numel() // align) * align for tensor in members]
        part = -(-sum(sizes) // (align * world.replicas)) * align
        self.flat = first.new_zeros(self.rows_of[world.replica], world.replicas, part)  # the rows to send
        self.views = [[_like(piece[:tensor.numel()], tensor) for piece, tensor
                       in zip(row.view(-1)[:sum(sizes)].split(sizes), members, strict=True)]
                      for row in self.flat]
        self.received = first.new_empty(sum(self.rows_of), part)

    def collect(self, carries):
        """Adds the subtrees that a slice completes; autograd has made the first of these additions."""
        if carries:
            self.rows.pop()
        self.rows.append([gradient_of(tensor) for tensor in self.members])
        for _ in range(carries - 1):
            right = self.rows.pop()
            torch._foreach_add_(self.rows[-1], right)

    def send(self):
        """Begins to send every replica its part of this rank's rows."""
        for views, row in zip(self.views, self.rows, strict=True):
            torch._foreach_copy_(views, row)
        self.rows.clear()
        outs = [[row[q] for row in self.flat] for q in range(self.world.replicas)]
        self.works = _swap(self.world, outs, self.received.split(self.rows_of))

    def add(self):
        """Ends the tree for this rank's part, and begins to send it to all; returns the messages."""
        for work in self.works:
            work.wait()
        rank = self.world.replica
        terms = [list(rows) for rows in self.received.split(self.rows_of)]
        terms[rank] = [row[rank] for row in self.flat]
        terms = [term for rows in terms for term in rows]
        for i, j in self.order:
            terms[i] += terms[j]
        result = self.flat[0]
        result[rank].copy_(terms[0])
        return _swap(self.world, [[terms[0]]] * self.world.replicas, [[part] for part in result])


def gradient_of(tensor):
    """The gradient that one slice, or two, have left; nothing where they do not use the tensor."""
    if tensor.grad is None:
        tensor.grad = torch.full_like(tensor, -0.0)
    return tensor.grad


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
    """Runs of tensors of one type, on one device, of about BUCKET_BYTES; the first is small."""
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
