"""How a tensor comes from the rank of one stage to that of the next: with its strides, and where draws go on.

Kernels are chosen by strides: with other strides, the same tensor could lead to other bits. The random
generator's state travels too, so a cut net draws what the whole one would.
"""
from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from common.errors import UserError
from common.training import dense
from common.world import World

NOTE_TAG = 1
KEPT_TICKS = 4               # times the stages: what was given earlier has arrived long ago
NO_DRAWS = torch.empty(0, dtype=torch.uint8)


class Ranks:
    """Transfers between the ranks of one pipeline; `draws` is the size of a generator's state.

    `shapes` has the (shape, dtype) of a sample behind each stage.
    """

    def __init__(self, world: World, shapes: list[tuple[tuple, torch.dtype]], draws: int):
        self.world = world
        self.shapes = shapes
        self.draws = draws
        self.sent = []

    def move(self, gives: list[tuple], takes: list[tuple]) -> dict[tuple, Callable]:
        """{(micro batch, forward?): a function that waits for (tensor, draws)}.

        `gives` are (forward?, tensor, draws), `takes` are (micro batch, forward?, samples). NCCL needs all
        transfers of a tick in one group: then no rank waits in a group for one that waits in another.
        """
        group, stage = self.world.stage_group, self.world.stage
        operations = []
        for forward, tensor, draws in gives:
            shape = self.shapes[stage if forward else stage - 1]
            if (tuple(tensor.shape[1:]), tensor.dtype) != shape:
                raise UserError(f"stage {stage} passes on {tuple(tensor.shape[1:])}, {tensor.dtype} a "
                                f"sample; at the start it was {shape[0]}, {shape[1]}\n"
                                "in stages all batches have one shape: pad them alike, or use train_ddp.py")
            if not dense(tensor):
                tensor = tensor.contiguous()
            to = stage + 1 if forward else stage - 1
            flat = tensor.as_strided((tensor.numel(),), (1,))
            operations.append(dist.P2POp(dist.isend, flat, group=group, group_peer=to))
            note = torch.cat([torch.tensor(tensor.stride()).view(torch.uint8), draws])
            self.sent.append((dist.isend(note, group=group, group_dst=to, tag=NOTE_TAG), note))
        arriving = []
        for k, forward, samples in takes:
            shape, dtype = self.shapes[stage - 1 if forward else stage]
            source = stage - 1 if forward else stage + 1
            flat = torch.empty(samples * prod(shape), dtype=dtype, device=self.world.device)
            operations.append(dist.P2POp(dist.irecv, flat, group=group, group_peer=source))
            note = torch.empty(8 * (1 + len(shape)) + self.draws * forward, dtype=torch.uint8)
            noted = dist.irecv(note, group=group, group_src=source, tag=NOTE_TAG)
            arriving.append(((k, forward), flat.view(samples, *shape), note, noted))
        works = dist.batch_isend_irecv(operations) if operations else []
        self.sent += [(work, gives) for work in works[:len(gives)]]
        self.drain(KEPT_TICKS * self.world.stages)
        came = works[len(gives):] or works * len(arriving)  # NCCL has one work for all
        return {key: lambda work=work, rest=rest: _arrived(work, *rest)
                for work, (key, *rest) in zip(came, arriving, strict=False)}

    def drain(self, newest: int = 0) -> None:
        """Waits until all that was given has been sent, but for the newest."""
        while len(self.sent) > newest:
            self.sent.pop(0)[0].wait()


def _arrived(work, tensor, note, noted):
    work.wait()
    noted.wait()
    strides = 8 * tensor.dim()
    return tensor.as_strided(tensor.shape, note[:strides].view(torch.int64).tolist()), note[strides:].clone()


@torch.no_grad()
def sum_gradients(net: nn.Module, world: World) -> None:
    """Over the ranks with the same stage; --shard has added those of its rows."""
    works = []
    for p in net.parameters():
        if p.requires_grad and not hasattr(p, "to_local"):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            works.append(dist.all_reduce(p.grad, group=world.peers, async_op=True))
    for work in works:
        work.wait()
