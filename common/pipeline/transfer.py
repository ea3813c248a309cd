"""What the ranks of one pipeline hand each other: tensors in the layout they have, and where the draws go on.

Code chooses by strides how it computes, so a tensor that came in another layout could have other bits in what
follows.
"""
from math import prod

import torch
import torch.distributed as dist

NOTE, DATA = 1, 0            # tags
NOTHING = torch.empty(0, dtype=torch.uint8)


class Transfer:
    """Call `exchange` in matching pairs: what one rank gives, the other takes."""

    def __init__(self, world):
        self.world, self.sent = world, []

    def exchange(self, give=None, take=None):
        """Sends (tensor, to stage, note); of (shape, dtype, from stage, bytes of the note) returns (tensor,
        note). Both at once.
        """
        group, ops = self.world.stage_group, []
        if give:
            tensor, to, note = give
            tensor = tensor.detach() if _dense(tensor) else tensor.detach().contiguous()
            note = torch.cat([torch.tensor(tensor.stride()).view(torch.uint8), note])
            flat = tensor.as_strided((tensor.numel(),), (1,))
            self.sent.append((dist.isend(note, group=group, group_dst=to, tag=NOTE), note))
            ops.append(dist.P2POp(dist.isend, flat, group=group, group_peer=to, tag=DATA))
        if take:
            shape, dtype, source, length = take
            came = torch.empty(8 * len(shape) + length, dtype=torch.uint8)
            flat = torch.empty(prod(shape), dtype=dtype, device=self.world.device)
            noted = dist.irecv(came, group=group, group_src=source, tag=NOTE)
            ops.append(dist.P2POp(dist.irecv, flat, group=group, group_peer=source, tag=DATA))
        works = dist.batch_isend_irecv(ops) if ops else []
        if take:
            noted.wait()
            works.pop().wait()
        self.sent += [(work, give) for work in works]
        if not take:
            return None
        strides = came[:8 * len(shape)].view(torch.int64).tolist()
        return flat.as_strided(shape, strides), came[8 * len(shape):]

    def drain(self):
        """All that was given has been taken."""
        for work, _ in self.sent:
            work.wait()
        self.sent = []


def _dense(tensor):
    """Whether its numbers lie side by side, in whatever order of its dimensions."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()
