"""What the ranks of one life tell each other before they train, over tensors, never pickles."""
import torch

from common.errors import UserError

TEXT = 600                                       # bytes of a text of which every rank has one


def same_everywhere(world, mine):
    """UserError, naming two ranks and their values, if {what: value} differs between ranks."""
    texts = [_read(t).split("\n") for t in world.all_gather(_fixed("\n".join(f"{key} {value}" for key, value in mine.items())))]
    for values in zip(*texts, strict=True):
        if len(set(values)) > 1:
            rank = next(r for r, value in enumerate(values) if value != values[0])
            raise UserError(f"the ranks run different things: rank 0 has {values[0]}, rank {rank} has {values[rank]}\n"
                            "give every node the same code, environment, data and options")


def odd_ranks(world, mine):
    """None if all ranks of a stage have the same integers, else those without a majority: none, if there is
    no majority.
    """
    theirs, odd = [tuple(t.tolist()) for t in world.all_gather(torch.tensor(mine))], None
    for stage in range(world.stages):
        kind = theirs[stage::world.stages]
        if len(set(kind)) > 1:
            apart = [stage + i * world.stages for i, value in enumerate(kind) if kind.count(value) <= len(kind) // 2]
            odd = (odd or []) + (apart if len(apart) < len(kind) else [])
    return odd


def send(world, data, source):
    """The bytes that `source` has, on every rank."""
    length = world.broadcast(torch.tensor([len(data or b"")]), source)
    tensor = torch.zeros(int(length), dtype=torch.uint8)
    if world.rank == source:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return bytes(world.broadcast(tensor, source).tolist())


def _fixed(text):
    return torch.frombuffer(bytearray(text.encode()[:TEXT].ljust(TEXT)), dtype=torch.uint8)


def _read(tensor):
    return bytes(tensor.tolist()).rstrip().decode(errors="replace")


PIECE = 1 << 24                                  # bytes widened at once


@torch.no_grad()
def fingerprint_of(tensors):
    """A cheap 64-bit sum over every bit of named tensors: equal weights give equal sums, on every device."""
    sums = [torch.zeros((), dtype=torch.int64)]
    for tensor in tensors.values():
        flat = tensor.detach().contiguous().view(-1)
        size, start = flat.numel() * flat.element_size(), flat.storage_offset() * flat.element_size()
        words = (flat if start % 8 == 0 else flat.clone()).view(torch.uint8)
        # 64-bit sums wrap, in any order to the same value; the odd sizes are widened piece by piece.
        sums.append(words.view(torch.int64).sum().cpu() if size % 8 == 0 else
                    sum((piece.long() << 8 * (i % 4)).sum().cpu() for i in range(4) for piece in words[i::4].split(PIECE)))
    total = sum((2 * index + 1) * value for index, value in enumerate(torch.stack(sums).tolist())) % 2**64
    return total - 2**64 if total >= 2**63 else total
