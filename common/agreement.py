"""What the ranks of one life tell each other before they train, over tensors, never pickles."""
import torch

from common import UserError

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
    """None if all ranks have the same integers, else those without a majority: none of them, if there is no majority."""
    theirs = [tuple(t.tolist()) for t in world.all_gather(torch.tensor(mine))]
    if len(set(theirs)) == 1:
        return None
    odd = [rank for rank, value in enumerate(theirs) if theirs.count(value) <= len(theirs) // 2]
    return odd if len(odd) < len(theirs) else []


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
