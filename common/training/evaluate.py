"""Exact metrics: each sample counts once, and no bit of the result depends on the number of ranks."""
from typing import Any

import torch
from torch import Tensor, nn

from common.data import Shares, from_workers
from common.training.state import TrainState
from common.training.step import placed
from common.training.tasks import SHOWN_SAMPLES
from common.world import World

BLOCK = 256  # samples per forward: the same blocks at every world size
BLOCK_TOKENS = 4096  # tokens per forward, if these are fewer samples
BLOCK_LOGITS = 1 << 24  # outputs per forward, if these are fewer samples: 64 MiB


@torch.no_grad()
def evaluate(model: nn.Module, split: Any, state: TrainState, world: World) -> dict[str, Any]:
    """{"val_loss": ..., "val_acc": ...}, of few samples also {"predictions", "labels"}; on every rank."""
    state.net.eval()
    task = state.task
    size = block_size(split, state.opts)
    count = -(-len(split) // size)
    pairs = 2 * len(task.names)
    rows = torch.zeros(count, pairs, dtype=torch.float64)  # of each block: added up in one order, at the end
    bins = task.zeros(world.device)[pairs:]
    totals: dict[int, Tensor] = {}
    shown = torch.zeros(2, len(split) if len(split) <= SHOWN_SAMPLES else 0)
    mine: list[int | None] = [*range(world.replica, count, world.replicas)]
    if getattr(model, "even", False):  # all replicas run as many blocks: the last may not count
        mine += [None] * (-(-count // world.replicas) - len(mine))
    with state.averaged():
        for block, part in zip(mine, _load(split, mine, size, state.opts, world), strict=True):
            state.progress += 1
            values = judge(model, placed(part, world.device, state.opts), state) if part is not None else None
            if values is None or block is None:
                continue
            block_totals = task.add(task.zeros(world.device), values)
            totals[block] = block_totals[:pairs]
            bins += block_totals[pairs:]
            if shown.numel() and task.predictions is not None:
                shown += 1 + task.predictions.cpu()  # 0: there are none
    if totals:  # only now: reading a GPU waits for it
        rows[list(totals)] = torch.stack(list(totals.values())).cpu()
    world.all_sum(rows)
    world.all_sum(bins := bins.cpu())
    sums = torch.tensor([sum(column) for column in rows.T.tolist()], dtype=torch.float64)
    metrics: dict[str, Any] = {f"val_{n}": v for n, v in task.metrics(torch.cat([sums, bins])).items()}
    if shown.numel() and world.all_sum(shown).any():
        metrics["predictions"], metrics["labels"] = (shown.long() - 1).tolist()
    return metrics


def _load(split, blocks, size, opts, world):
    """What collate made of each block; of None, of the first block."""
    starts = [(block or 0) * size for block in blocks]
    cuts = [[list(range(start, min(start + size, len(split))))] for start in starts]
    shares = Shares(split, 0, False, False)
    workers = 0 if split.in_memory else opts.workers
    loaded = from_workers(shares, cuts, workers, world.device.type == "cuda") if workers else \
        map(shares.load, cuts)
    for ((_, part),), _ in loaded:
        yield part


def block_size(split: Any, opts: Any) -> int:
    """Samples per forward; of a user's own task no more than a forward of the training has."""
    sizes = [BLOCK, BLOCK_TOKENS // split.tokens, BLOCK_LOGITS // (split.tokens * (split.classes or 1))]
    if ".py" in opts.task:
        sizes.append(opts.micro_batch_size or -(-opts.global_batch_size // (opts.virtual_ranks or 1)))
    return max(1, min(sizes))


def judge(model: Any, part: Any, state: TrainState) -> dict[str, Any] | None:
    """What the task returns of a block; None on a rank that does not hold the last stage."""
    if hasattr(model, "judge"):
        return model.judge(part, state)
    return state.task(model, part, state)
