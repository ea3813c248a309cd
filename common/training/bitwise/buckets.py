"""Gradients as flat tensors that the replicas exchange: each ends the tree (sums.py) for its own part."""
import torch
import torch.distributed as dist

ALIGN_BYTES = 64             # every gradient starts where an allocation of its own could start
DIRECT_BYTES = 1 << 20       # with gloo, larger buckets travel as messages instead of collectives
PIECE_BYTES = 12 << 20       # exchanged at once: while one piece is added up, the next arrives


class Bucket:
    """Some gradients as one flat tensor that divides evenly among the replicas."""

    def __init__(self, members, shapes, world, rows):
        self.members, self.world, self.waiting = members, world, 0
        kind, starts, at = shapes[members[0]], {}, 0
        self.params, size = [i for i in members if i < len(shapes) - 1], kind.element_size()
        align = ALIGN_BYTES // size
        for i in members:
            starts[i] = at
            at += -(-shapes[i].numel() // align) * align
        # gloo's collectives copy all data once or twice more, but are quicker than messages for small buckets
        self.direct = world.backend == "gloo" and at * size > DIRECT_BYTES
        if world.replicas == 1:
            return
        count = max(1, round(at * size / PIECE_BYTES))
        self.part = -(-at // (count * align * world.replicas)) * align  # of a piece, per rank
        self.flat = torch.zeros(count * world.replicas * self.part, dtype=kind.dtype, device=kind.device)
        self.pieces = self.flat.view(count, world.replicas, self.part)
        self.received = self.flat.new_zeros(count, rows, self.part)
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
