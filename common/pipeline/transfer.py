"""How a tensor comes from one stage to the next: between ranks, or between devices of one process."""
from functools import partial
from math import prod

import torch
import torch.distributed as dist

from common.training import dense

NOTE_TAG, DATA_TAG = 1, 0
KEPT_TICKS = 4               # times the stages: what was given earlier has arrived long ago
NO_NOTE = torch.empty(0, dtype=torch.uint8)


class Ranks:
    """Between ranks; under --virtual-ranks with strides and `note` bytes, the random generator's state.

    Kernels are chosen by strides: with other strides, the same tensor could lead to other bits.
    """

    def __init__(self, world, edges, note=None):
        self.world, self.edges, self.note, self.sent = world, edges, note, []

    def move(self, gives, takes):
        """{(stage, micro batch, forward?): a function that waits for (tensor, note)}.

        `gives` are (this key, tensor, note), `takes` are (this key, samples). NCCL needs all transfers of a
        tick in one group: then no rank waits in a group for one that waits in another.
        """
        ops, came, group, stages = [], [], self.world.stage_group, self.world.stages
        for (stage, _, _), tensor, note in gives:
            tensor = tensor if dense(tensor) and self.note is not None else tensor.contiguous()
            flat = tensor.as_strided((tensor.numel(),), (1,))
            ops.append(dist.P2POp(dist.isend, flat, group=group, group_peer=stage % stages, tag=DATA_TAG))
            if self.note is not None:
                note = torch.cat([torch.tensor(tensor.stride()).view(torch.uint8), note])
                work = dist.isend(note, group=group, group_dst=stage % stages, tag=NOTE_TAG)
                self.sent.append((work, note))
        for (stage, k, forward), n in takes:
            shape, dtype = self.edges[stage - forward]  # the input, or the gradient of the output
            source = (stage - 1 if forward else stage + 1) % stages
            flat = torch.empty(n * prod(shape), dtype=dtype, device=self.world.device)
            ops.append(dist.P2POp(dist.irecv, flat, group=group, group_peer=source, tag=DATA_TAG))
            note = work = None
            if self.note is not None:
                note = torch.empty(8 * (1 + len(shape)) + self.note * forward, dtype=torch.uint8)
                work = dist.irecv(note, group=group, group_src=source, tag=NOTE_TAG)
            came.append(((stage, k, forward), flat.view(n, *shape), note, work))
        works = dist.batch_isend_irecv(ops) if ops else []  # NCCL: one work for all
        self.sent += [(work, gives) for work in works[:len(gives)]]
        self.drain(KEPT_TICKS * stages)
        return {key: partial(_arrived, works[min(len(gives) + i, len(works) - 1)], *parts)
                for i, (key, *parts) in enumerate(came)}

    def drain(self, left=0):
        """Waits until all that was given has been sent, but for the newest `left`."""
        while len(self.sent) > left:
            self.sent.pop(0)[0].wait()


def _arrived(work, tensor, note, noted):
    work.wait()
    if not noted:
        return tensor, NO_NOTE
    noted.wait()
    strides = 8 * tensor.dim()
    return tensor.as_strided(tensor.shape, note[:strides].view(torch.int64).tolist()), note[strides:].clone()


class Devices:
    """Between the devices of one process; on GPUs copies have streams of their own."""

    def __init__(self, device_of):
        self.device_of = device_of
        self.streams = {gpu: torch.cuda.Stream(gpu) for gpu in set(device_of) if gpu.type == "cuda"}

    def move(self, gives, takes):
        """See Ranks.move; there is nothing to take."""
        return {key: partial(self._arrived, *self._copy(key, tensor), note) for key, tensor, note in gives}

    def _copy(self, key, tensor):
        stage, _, forward = key
        source, target = self.device_of[stage - 1 if forward else stage + 1], self.device_of[stage]
        if source == target or not {source, target} <= self.streams.keys():
            return tensor.to(target, non_blocking=True), None, target
        out, into = self.streams[source], self.streams[target]
        out.wait_stream(torch.cuda.current_stream(source))
        with torch.cuda.stream(out), torch.cuda.stream(into):
            copy = tensor.to(target, non_blocking=True)
        tensor.record_stream(out)
        return copy, into.record_event(), target

    def _arrived(self, tensor, copied, target, note):
        if copied:
            torch.cuda.current_stream(target).wait_event(copied)
            tensor.record_stream(torch.cuda.current_stream(target))
        return tensor, note

    def drain(self):
        """Nothing is on its way: streams keep the order."""
