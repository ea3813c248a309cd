"""Which stage works when, and how a tensor comes from the rank of one stage to that of the next.

It travels with its strides: kernels are chosen by them, with others the same numbers could lead to other
bits. The state of the random generator travels too: a cut net draws what the whole one would.
"""

import functools
from math import prod

import torch
import torch.distributed as dist

from common.device import mark, wait_by_asking
from common.errors import UserError

NOTE_TAG = 1
KEPT_TICKS = 4  # times the stages: what was given earlier has arrived long ago


@functools.cache
def timetable(count, stages):
    """For each tick the work of all stages: (stage, micro batch, forward?).

    3 stages,         F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     1f1b: a stage goes forward until it has as many
    4 micro batches   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .      in flight as stages are left, then alternately
                      .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      back and forward.

    Every work needs what an earlier tick made, and in a tick one tensor at most arrives at a stage. A stage
    takes the micro batches in their order, both ways.
    """
    ticks = [[] for _ in range(2 * (count + stages - 1))]
    for stage in range(stages):
        for k in range(count):
            ahead = k if k < stages - stage else 2 * k
            ticks[stage + ahead].append((stage, k, True))
            ticks[2 * stages - 1 - stage + 2 * k].append((stage, k, False))
    return ticks


class Ranks:
    """Transfers between the ranks of one pipeline; `shapes`: (shape, dtype) of a sample behind each stage."""

    def __init__(self, world, shapes, generator):
        self.world = world
        self.shapes = shapes
        self.generator = generator
        self.sent = []  # each keeps its tensor alive

    def move(self, give=None, take=None):
        """A function that waits for the tensor taken; it also sets the generator to the giver's state.

        `give` is (to stage, tensor), `take` is (from stage, samples). NCCL needs both in one group: then no
        rank waits in a group for one that waits in another.
        """
        group = self.world.stage_group
        here = self.world.stage
        operations = []
        if give:
            to, tensor = give
            self._check(tensor, self.shapes[min(here, to)])
            if torch.empty_like(tensor, device="meta").stride() != tensor.stride():  # it has holes
                tensor = tensor.contiguous()
            flat = tensor.as_strided((tensor.numel(),), (1,))
            operations.append(dist.P2POp(dist.isend, flat, group=group, group_peer=to))
            note = torch.cat([torch.tensor(tensor.stride()).view(torch.uint8), self.generator.get_state()])
            self.sent.append(dist.isend(note, group=group, group_dst=to, tag=NOTE_TAG))
        if take:
            source, samples = take
            shape, dtype = self.shapes[min(here, source)]
            flat = torch.empty(samples * prod(shape), dtype=dtype, device=self.world.device)
            operations.append(dist.P2POp(dist.irecv, flat, group=group, group_peer=source))
            note = torch.empty(8 + 8 * len(shape) + len(self.generator.get_state()), dtype=torch.uint8)
            noted = dist.irecv(note, group=group, group_src=source, tag=NOTE_TAG)
        works = dist.batch_isend_irecv(operations) if operations else []  # NCCL has one for both
        if give:
            self.sent.append(works[0])
        self.drain(KEPT_TICKS * self.world.stages)
        if not take:
            return None
        return functools.partial(self._receive, flat.view(samples, *shape), note, noted, works[-1])

    def _receive(self, tensor, note, *works):
        for work in works:
            work.wait()
        wait_by_asking(mark(tensor.device))
        strides = note[: 8 * tensor.dim()].view(torch.int64).tolist()
        self.generator.set_state(note[8 * tensor.dim() :].clone())
        return tensor.as_strided(tensor.shape, strides)

    def _check(self, tensor, expected):
        if (tuple(tensor.shape[1:]), tensor.dtype) != expected:
            raise UserError(
                f"stage {self.world.stage} passes on {tuple(tensor.shape[1:])}, {tensor.dtype} a "
                f"sample; at the start: {expected}\n"
                "in stages all batches have one shape: pad them alike, or use train_ddp.py"
            )

    def drain(self, newest=0):
        """Waits until all that was given has been sent, but for the newest."""
        while len(self.sent) > newest:
            self.sent.pop(0).wait()
