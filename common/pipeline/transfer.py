"""Transfers between the ranks of one pipeline: a tensor with its strides, and the random generator's state.

Kernels are chosen by strides: with other strides, the same tensor could lead to other bits.
"""
from math import prod

import torch
import torch.distributed as dist

from common.training import dense

NOTE_TAG, DATA_TAG = 1, 0
NO_NOTE = torch.empty(0, dtype=torch.uint8)


class Transfer:
    """Call `exchange` in matching pairs: one rank takes what another gives."""

    def __init__(self, world):
        self.world, self.sent = world, []

    def exchange(self, give=None, take=None):
        """Sends `give` = (tensor, stage, note) and at the same time receives `take`; returns (tensor, note).

        `take` = (shape, dtype, stage, bytes of the note) describes what comes.
        """
        group, ops = self.world.stage_group, []
        if give:
            tensor, to, note = give
            tensor = tensor.detach() if dense(tensor) else tensor.detach().contiguous()
            note = torch.cat([torch.tensor(tensor.stride()).view(torch.uint8), note])
            flat = tensor.as_strided((tensor.numel(),), (1,))
            self.sent.append((dist.isend(note, group=group, group_dst=to, tag=NOTE_TAG), note))
            ops.append(dist.P2POp(dist.isend, flat, group=group, group_peer=to, tag=DATA_TAG))
        if take:
            shape, dtype, source, length = take
            came = torch.empty(8 * len(shape) + length, dtype=torch.uint8)
            flat = torch.empty(prod(shape), dtype=dtype, device=self.world.device)
            noted = dist.irecv(came, group=group, group_src=source, tag=NOTE_TAG)
            ops.append(dist.P2POp(dist.irecv, flat, group=group, group_peer=source, tag=DATA_TAG))
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
        """Waits until all that was given has been sent."""
        for work, _ in self.sent:
            work.wait()
        self.sent = []
