"""The newest checkpoint that anybody has, on every rank: read by one rank of each folder, sent to those that lack it."""
from dataclasses import dataclass
from pathlib import Path

import torch

from common import UserError
from common.agreement import send
from common.files import Damaged, parse_json
from common.manifest import STATE, TENSORS, checkpoints, facts_to_json, verify


@dataclass(frozen=True)
class Found:
    step: int                                    # the newest that verifies anywhere, or -1
    own: int                                     # the newest of this node
    facts: dict
    skipped: list                                # this node's folders that do not verify
    damaged: int                                 # and how many the node with the most of them has


def load_newest(world, choices, images, identity, report):
    """Found, its tensors in the images of every rank. Call on every rank; `choices` is None on those that do not read."""
    own, facts, skipped = newest(choices or [], images, identity, report)
    world.meet(f"read {identity}")                                  # reading may take longer than a collective may
    layout = sum(image.layout() for image in images.values()) % 2**62
    views = [view.tolist() for view in world.all_gather(torch.tensor([own, len(skipped), layout]))]
    if len({view[2] for view in views}) > 1:
        raise UserError("the ranks have different nets or optimizers: names, shapes or types differ\n"
                        "run the same code and options on every node")
    step = max(view[0] for view in views)
    if step >= 0:
        source = [view[0] for view in views].index(step)
        facts = parse_json(send(world, facts and facts_to_json(facts), source), STATE)
        for image in images.values():
            world.broadcast(image.open(touch=False).buffer, source)
    return Found(step, own, facts, skipped, max(view[1] for view in views))


def newest(choices, images, identity=None, report=print):
    """(step, facts, folders skipped) of the first of `choices` that verifies, its tensors left in the images; step -1: none."""
    skipped = []
    for step, folder in choices:
        try:
            _, facts = verify(step, folder, {part: image.open(touch=False).bytes for part, image in images.items()}, identity)
            for part, image in images.items():
                image.check_header(TENSORS[part])
            return step, facts, skipped
        except Damaged as reason:
            skipped.append(folder)
            report(f"{folder.parent.name}/{folder.name}: {reason}; skipped, trying the one before")
    return -1, None, skipped


def choices_at(path):
    """--resume PATH: that checkpoint, or those of that run, newest first."""
    path = Path(path)
    one = [choice for choice in checkpoints(path.parent) if choice[1].name == path.name]
    return one or checkpoints(path / "checkpoints")
