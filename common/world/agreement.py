"""What the ranks of one life tell each other before they train, over tensors, never pickles."""
from typing import Any

import torch
from torch import Tensor

from common.errors import UserError
from common.world.world import World

TEXT_BYTES = 600        # a longer text is cut before ranks gather it


def same_everywhere(world: World, mine: dict[str, Any]) -> None:
    """UserError, naming two ranks and their values, if {name: value} differs between ranks."""
    if odd := first_difference(world, mine):
        raise UserError(f"the ranks run different things: {odd[1]}\n"
                        "give every node the same code, environment, data and options")


def first_difference(world: World, mine: dict[str, Any]) -> tuple[int, str] | None:
    """(a rank, in words how its {name: value} differs from rank 0's), or None; call on every rank."""
    text = "\n".join(f"{key} {value}" for key, value in mine.items())
    texts = [other.split("\n") for other in gather_texts(world, text)]
    return next(((rank, f"rank 0 has {first}, rank {rank} has {value}")
                 for first, *others in zip(*texts, strict=True)
                 for rank, value in enumerate(others, 1) if value != first), None)


def odd_ranks(world: World, mine: list[int]) -> list[int] | None:
    """None if the ranks of each stage have equal integers; else those in the minority, [] without one."""
    theirs, odd = [tuple(t.tolist()) for t in world.all_gather(torch.tensor(mine))], None
    for stage in range(world.stages):
        values = theirs[stage::world.stages]
        if len(set(values)) > 1:
            few = [i for i, value in enumerate(values) if values.count(value) <= len(values) // 2]
            odd = (odd or []) + [stage + i * world.stages for i in few if len(few) < len(values)]
    return odd


def send(world: World, data: bytes | None, source: int) -> bytes:
    """The bytes of rank `source`, on every rank."""
    length = world.broadcast(torch.tensor([len(data or b"")]), source)
    tensor = torch.zeros(int(length), dtype=torch.uint8)
    if data and world.rank == source:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return bytes(world.broadcast(tensor, source).tolist())


def gather_texts(world: World, text: str) -> list[str]:
    """The text of every rank, cut after TEXT_BYTES."""
    own = torch.frombuffer(bytearray(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES)), dtype=torch.uint8)
    return [bytes(other.tolist()).rstrip().decode(errors="replace") for other in world.all_gather(own)]


@torch.no_grad()
def fingerprint_of(tensors: dict[str, Tensor]) -> int:
    """A cheap 64-bit sum over every bit of named tensors; equal weights give equal sums on every device."""
    sums = [torch.zeros((), dtype=torch.int64)]
    for tensor in tensors.values():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if flat.numel() % 8 or flat.storage_offset() % 8:
            flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))  # a copy
        sums.append(flat.view(torch.int64).sum().cpu())  # 64-bit sums wrap, so their order does not matter
    total = sum((2 * index + 1) * value for index, value in enumerate(torch.stack(sums).tolist())) % 2**64
    return total - 2**64 if total >= 2**63 else total
