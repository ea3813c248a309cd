"""Exact metrics: each sample counts once, and no bit of the result depends on the number of ranks."""
from typing import Any

import torch
from torch import nn

from common.data import loaded
from common.training.state import TrainState
from common.training.step import placed
from common.training.tasks import SHOWN_SAMPLES
from common.world import World

BLOCK = 256  # samples per forward: the same blocks at every world size
BLOCK_TOKENS = 4096  # tokens per forward, if these are fewer samples
BLOCK_LOGITS = 1 << 24  # outputs per forward, if these are fewer samples: 64 MiB


@torch.no_grad()
def evaluate(model: nn.Module, split: Any, state: TrainState, world: World) -> dict:
    """{"val_loss": ..., "val_acc": ...}, of few samples also {"predictions", "labels"}; on every rank."""
    state.net.eval()
    task = state.task
    size = block_size(split, state.opts)
    count = -(-len(split) // size)
    pairs = 2 * len(task.names)
    rows = torch.zeros(count, pairs, dtype=torch.float64, device=world.device)  # of each block
    whole_numbers = task.zeros(world.device)[pairs:]
    shown = torch.zeros(2, len(split) if len(split) <= SHOWN_SAMPLES else 0)
    end = count
    if getattr(model, "even", False):  # all replicas run as many blocks: some the first one again, uncounted
        end = -(-count // world.replicas) * world.replicas
    mine = range(world.replica, end, world.replicas)
    with state.averaged():
        for block, part in zip(mine, load(split, mine, size, state.opts), strict=True):
            state.progress += 1
            values = judge(model, placed(part, world.device, state.opts), state) if part is not None else None
            if values is None or block >= count:
                continue
            totals = task.add(task.zeros(world.device), values)
            rows[block] = totals[:pairs]
            whole_numbers += totals[pairs:]
            if shown.numel() and task.predictions is not None:
                shown += 1 + task.predictions.cpu()  # 0: there are none
    rows = world.all_sum(rows.cpu())
    whole_numbers = world.all_sum(whole_numbers.cpu())
    sums = torch.tensor([sum(column) for column in rows.T.tolist()], dtype=torch.float64)  # in one order
    metrics = {f"val_{name}": value for name, value in task.metrics(torch.cat([sums, whole_numbers])).items()}
    if shown.numel() and world.all_sum(shown).any():
        metrics["predictions"], metrics["labels"] = (shown.long() - 1).tolist()
    return metrics


def load(split, blocks, size, opts):
    """The samples of each block; of one behind the last, those of the first."""
    starts = [block * size if block * size < len(split) else 0 for block in blocks]
    cuts = [[list(range(start, min(start + size, len(split))))] for start in starts]
    for parts, _ in loaded(split, cuts, opts):
        yield parts[0][1]


def block_size(split, opts):
    """Samples per forward; of a user's own task no more than a forward of the training has."""
    sizes = [BLOCK, BLOCK_TOKENS // split.tokens, BLOCK_LOGITS // (split.tokens * (split.classes or 1))]
    if ".py" in opts.task:
        sizes.append(opts.micro_batch_size or -(-opts.global_batch_size // (opts.virtual_ranks or 1)))
    return max(1, min(sizes))


def judge(model, part, state):
    """What the task returns of a block; None on a rank that does not hold the last stage."""
    if hasattr(model, "judge"):
        return model.judge(part, state)
    return state.task(model, part, state)
