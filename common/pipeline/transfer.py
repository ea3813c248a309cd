"""Which stage works when, and how a tensor comes from the rank of one stage to that of the next.

It travels with its strides: kernels are chosen by them, with others the same numbers could lead to other
bits. The state of the random generator travels too: a cut net draws what the whole one would.
"""

import functools

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
        """Begins to send and to receive; returns a function that waits for the tensor taken.

        It also sets the generator to the giver's state. `give` is (to stage, tensor), `take` is (from stage,
        samples). NCCL needs both in one group: then no rank waits in a group for one that waits in another.
        """
        here = self.world.stage
        parcels = []
        if give:
            to, tensor = give
            self._check(tensor, self.shapes[min(here, to)])
            if torch.empty_like(tensor, device="meta").stride() != tensor.stride():  # it has holes
                tensor = tensor.contiguous()
            parcels.append(self._parcel(dist.isend, to, tensor))
        if take:
            source, samples = take
            shape, dtype = self.shapes[min(here, source)]
            room = torch.empty(samples, *shape, dtype=dtype, device=self.world.device)
            parcels.append(self._parcel(dist.irecv, source, room))
        works = [dist.batch_isend_irecv([*operations]) for operations in zip(*parcels, strict=True)]
        if give:
            self.sent += [first for first, *_ in works]
        self.drain(KEPT_TICKS * self.world.stages)
        if not take:
            return None
        note, _ = parcels[-1]
        return functools.partial(self._receive, room, note.tensor, *[last for *_, last in works])

    def _parcel(self, act, stage, tensor):
        """Of a tensor its note and its numbers, to be sent or received."""
        strides = torch.tensor(tensor.stride()).view(torch.uint8)
        note = torch.cat([strides, self.generator.get_state()])
        numbers = tensor.as_strided((tensor.numel(),), (1,))
        operation = functools.partial(dist.P2POp, act, group=self.world.stage_group, group_peer=stage)
        return operation(tensor=note, tag=NOTE_TAG), operation(tensor=numbers)

    def _receive(self, tensor, note, *works):
        for work in works:
            work.wait()
        wait_by_asking(mark(tensor.device))
        strides, state = note.tensor_split([8 * tensor.dim()])
        self.generator.set_state(state.clone())
        return tensor.as_strided(tensor.shape, strides.view(torch.int64).tolist())

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
