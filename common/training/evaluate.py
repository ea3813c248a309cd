"""Exact metrics: each sample counts once, and no bit of the result depends on the number of ranks."""
import contextlib
from typing import Any

import torch
from torch import nn

from common.data import Shares, from_workers
from common.sampler import share
from common.training.backward import placed
from common.training.loss import SHOWN_SAMPLES
from common.training.state import TrainState
from common.world import World

BLOCK = 256                 # samples per forward: the same blocks at every world size
BLOCK_TOKENS = 4096         # tokens per forward, if these are fewer samples
BLOCK_LOGITS = 1 << 24      # outputs per forward, if these are fewer samples: 64 MiB


@torch.no_grad()
def evaluate(model: nn.Module, split: Any, state: TrainState, world: World) -> dict[str, Any]:
    """{"val_loss": ..., "val_acc": ...}, of few samples also {"predictions", "labels"}; on every rank."""
    state.net.eval()
    size, task = block_size(split, state.opts), state.task
    count, pairs = -(-len(split) // size), 2 * len(task.names)
    rows = torch.zeros(count, pairs, dtype=torch.float64)  # of each block: added up in one order, at the end
    bins, shares = task.zeros(world.device)[pairs:], Shares(split, 0, False, False)
    totals, predictions = dict[int, torch.Tensor](), dict[str, Any]()
    with averaged_weights(state):
        mine: list[int | None] = list(share(count, world.replica, world.replicas))
        if getattr(model, "even", False):  # all replicas run as many blocks: the last may not count
            mine += [None] * (-(-count // world.replicas) - len(mine))
        starts = [(block or 0) * size for block in mine]
        cuts = [[list(range(start, min(start + size, len(split))))] for start in starts]
        workers = 0 if split.in_memory else state.opts.workers
        loaded = from_workers(shares, cuts, workers, world.device.type == "cuda") if workers else \
            map(shares.load, cuts)
        for block, (((_, part),), _) in zip(mine, loaded, strict=True):
            state.progress += 1
            found = judge(model, placed(part, world.device, state.opts), state) if part is not None else None
            if found is None or block is None:
                continue
            found = task.add(task.zeros(world.device), found)
            totals[block], bins = found[:pairs], bins + found[pairs:]
            if len(split) <= SHOWN_SAMPLES:
                predictions = task.predictions
    if totals:  # only now: reading a GPU waits for it
        rows[list(totals)] = torch.stack(list(totals.values())).cpu()
    world.all_sum(rows), world.all_sum(bins := bins.cpu())
    sums = torch.tensor([sum(column) for column in rows.T.tolist()], dtype=torch.float64)
    metrics = task.metrics(torch.cat([sums, bins]))
    return {f"val_{name}": value for name, value in metrics.items()} | predictions


def block_size(split, opts):
    """Samples per forward; of a user's own task no more than a forward of the training has."""
    logits, most = split.tokens * (getattr(split, "classes", 0) or 1), BLOCK
    if ".py" in opts.task:
        most = min(BLOCK, opts.micro_batch_size or -(-opts.global_batch_size // (opts.virtual_ranks or 1)))
    return max(1, min(most, BLOCK_TOKENS // split.tokens, BLOCK_LOGITS // logits))


def judge(model, part, state):
    """What the task returns of a block; None on a rank that does not hold the last stage."""
    if not hasattr(model, "stages"):
        return state.task(model, part, state)
    out = model(state.task.input_of(part, state))
    return None if out is None else state.task.answered(out, part, state)


@contextlib.contextmanager
def averaged_weights(state):
    """Inside this block the net has the averaged weights (--ema-decay), outside its own."""
    if not state.ema:
        yield
        return
    state.updates.settle()
    with state.changing():
        own = {p: p.detach().clone() for p in state.net.parameters()}  # saved during the evaluation
        state.own_weights = {name: own[p] for name, p in state.net.named_parameters(remove_duplicate=False)}
        for name, p in state.net.named_parameters():
            p.copy_(state.ema[name])
    try:
        yield
    finally:
        with state.changing():
            for p, weights in own.items():
                p.copy_(weights)
            state.own_weights = {}
