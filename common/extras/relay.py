"""A checkpoint for ranks that cannot read it, or have other bytes under its name, from a rank that can."""

import torch

from common.checkpoint import Damaged, read_file
from common.sealed import sha
from common.store import unreadable
from common.world import gather


def relay(world, layout, giver, choice, tables_and_facts):
    """Send each tensor from the rank `giver`, as its disk has it, to all; call on every rank.

    Return (that rank's facts, whether all bytes are right on all ranks). UserError if it cannot read them.
    """
    gives = world.rank == giver
    files, facts = gather(world, tables_and_facts if gives else None)[giver]
    right = True
    failed = None
    for path, table in files.items():
        for name, target in layout.targets(path, table).items():
            piece = torch.zeros(target.nbytes, dtype=torch.uint8)
            if gives:
                try:
                    read_file(choice[1] / path, table, {name: piece})
                except Damaged:
                    pass  # then the bytes are wrong, and all ranks see that
                except OSError as error:
                    failed = unreadable(choice[1], error)
            world.all_sum(piece)  # zeros, but for those of the giver
            stated = table[name][2]
            right = right and sha(piece.numpy()) == stated  # a rank that left here would let the others hang
            target.copy_(piece.view(target.dtype).view(target.shape))
    with world.all_or_none():
        if failed:
            raise failed
    return facts, all(gather(world, right))
