"""Exact metrics: each sample counts once, and no bit of the result depends on the number of ranks."""
import contextlib
from typing import Any

import torch
from torch import nn

from common.sampler import share
from common.training.loss import autocast, exact_losses
from common.training.state import TrainState
from common.world import World

BLOCK = 256                 # samples per forward: the same blocks at every world size
BLOCK_TOKENS = 4096         # tokens per forward, if these are fewer samples
SHOWN_SAMPLES = 16          # up to so many samples, the predictions are returned too
LOSS_UNITS = 2.0 ** 24      # losses are summed as integers of 1 / LOSS_UNITS: their order changes nothing


@torch.no_grad()
def evaluate(model: nn.Module, split: Any, state: TrainState, world: World) -> dict[str, Any]:
    """{"val_loss", "val_acc"}, with --ema-decay of the averaged weights; call on every rank.

    For at most SHOWN_SAMPLES samples also {"predictions", "labels"}.
    """
    state.net.eval()
    size = min(BLOCK, max(1, BLOCK_TOKENS // split.tokens))
    blocks = -(-len(split) // size)
    sums = torch.zeros(4, dtype=torch.int64)  # loss, right answers, samples, samples without a finite loss
    predictions, labels = [], []
    with averaged_weights(state):
        mine: list[int | None] = list(share(blocks, world.replica, world.replicas))
        if getattr(model, "even", False):  # all replicas run as many blocks: the last may not count
            mine += [None] * (-(-blocks // world.replicas) - len(mine))
        for block in mine:
            state.progress += 1
            counts, block = block is not None, block or 0
            ids = range(block * size, min((block + 1) * size, len(split)))
            x, y = split.fetch(list(ids), 0, False)
            x, y = x.to(world.device), y.to(world.device)
            with autocast(state.opts, world.device):
                out = model(x)
            if out is None or not counts:  # None: this rank does not hold the last stage
                continue
            losses = exact_losses(out, y)
            finite = losses.isfinite()
            found = out.argmax(-1)
            sums += torch.stack([(losses[finite] * LOSS_UNITS).round().long().sum(), (found == y).sum(),
                                 torch.tensor(len(y), device=y.device), (~finite).sum()]).cpu()
            if len(split) <= SHOWN_SAMPLES and y.dim() == 1:
                predictions, labels = found.tolist(), y.tolist()
    world.all_sum(sums)
    loss, hits, samples, broken = sums.tolist()
    metrics = {"val_loss": float("nan") if broken else loss / LOSS_UNITS / samples,
               "val_acc": hits / (samples * split.tokens)}
    return metrics | ({"predictions": predictions, "labels": labels} if predictions else {})


@contextlib.contextmanager
def averaged_weights(state):
    """Inside this block the net has the averaged weights (--ema-decay), outside its own."""
    if not state.ema:
        yield
        return
    own = {p: p.detach().clone() for p in state.net.parameters()}
    with state.changing():
        # a save during the evaluation writes these
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
