"""Which stage works when, and how a tensor comes from the rank of one stage to that of the next.

It travels with its strides: kernels are chosen by them, with others the same numbers could lead to other
bits. The state of the random generator travels too: a cut net draws what the whole one would.
"""

import functools
from math import prod

import torch
import torch.distributed as dist

from common.errors import UserError

NOTE_TAG = 1
KEPT_TICKS = 4  # times the stages: what was given earlier has arrived long ago


@functools.cache
def timetable(count, stages):
    """For each tick the work of all stages: (stage, micro batch, forward?).

    3 stages,         F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     1f1b: a stage goes forward until it has as many
    4 micro batches   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .      in flight as stages are left, then alternately
                      .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      back and forward.

    Every work needs what an earlier tick made. A stage takes the micro batches in their order, both ways.
    """
    ahead = [0] * stages
    back = [0] * stages
    done = set()
    ticks = []
    while min(back) < count:
        tick = []
        for stage in range(stages):
            forward = ahead[stage] < min(count, back[stage] + stages - stage)
            k = ahead[stage] if forward else back[stage]
            before = stage - 1 if forward else stage + 1
            if k < count and (before in (-1, stages) or (before, k, forward) in done):
                tick.append((stage, k, forward))
                ahead[stage] += forward
                back[stage] += not forward
        done.update(tick)
        ticks.append(tick)
    return ticks


class Ranks:
    """Transfers between the ranks of one pipeline; `shapes`: (shape, dtype) of a sample behind each stage."""

    def __init__(self, world, shapes, generator):
        self.world = world
        self.shapes = shapes
        self.generator = generator
        self.sent = []

    def move(self, gives, takes):
        """{key: a function that waits for the tensor}; it also sets the generator to the giver's state.

        `gives` are (to stage, tensor), `takes` are (from stage, samples, key). NCCL needs all transfers of a
        tick in one group: then no rank waits in a group for one that waits in another.
        """
        group = self.world.stage_group
        here = self.world.stage
        operations = []
        for to, tensor in gives:
            self._check(tensor, self.shapes[min(here, to)])
            if not dense(tensor):
                tensor = tensor.contiguous()
            flat = tensor.as_strided((tensor.numel(),), (1,))
            operations.append(dist.P2POp(dist.isend, flat, group=group, group_peer=to))
            note = torch.cat([torch.tensor(tensor.stride()).view(torch.uint8), self.generator.get_state()])
            self.sent.append((dist.isend(note, group=group, group_dst=to, tag=NOTE_TAG), note))
        arriving = []
        for source, samples, key in takes:
            shape, dtype = self.shapes[min(here, source)]
            flat = torch.empty(samples * prod(shape), dtype=dtype, device=self.world.device)
            operations.append(dist.P2POp(dist.irecv, flat, group=group, group_peer=source))
            note = torch.empty(8 + 8 * len(shape) + len(self.generator.get_state()), dtype=torch.uint8)
            noted = dist.irecv(note, group=group, group_src=source, tag=NOTE_TAG)
            arriving.append((key, flat.view(samples, *shape), note, noted))
        works = dist.batch_isend_irecv(operations) if operations else []
        self.sent += [(work, gives) for work in works[: len(gives)]]
        self.drain(KEPT_TICKS * self.world.stages)
        came = works[len(gives) :] or works  # NCCL has one work for all
        return {key: functools.partial(self._receive, came, *rest) for key, *rest in arriving}

    def _receive(self, works, tensor, note, noted):
        for work in [*works, noted]:
            work.wait()
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
            self.sent.pop(0)[0].wait()


def dense(tensor):
    """Whether the numbers lie side by side, in any order of the dimensions."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).is_contiguous()
