"""Exact metrics: each sample counted once, at any world size; the numbers are the same to the last bit."""
import contextlib

import torch

from common.sampler import share
from common.training.loss import autocast, exact_losses

BLOCK = 256                                      # samples per forward: the same blocks at every world size
TOKENS = 4096                                    # or so many tokens, if that is fewer samples
FEW = 16                                         # samples whose predictions a person would like to see
FIXED = 2.0 ** 24  # losses are summed as integers: no order of addition can show


@torch.no_grad()
def evaluate(model, split, state, world):
    """{"val_loss", "val_acc"} of the averaged weights where there are some; of few samples, predictions and
    labels too.
    """
    state.net.eval()
    size = min(BLOCK, max(1, TOKENS // split.tokens))
    blocks = -(-len(split) // size)
    # loss in fixed point, hits, samples, samples without a finite loss
    sums = torch.zeros(4, dtype=torch.int64)
    predictions, labels = [], []
    with averaged_weights(state):
        mine = list(share(blocks, world.replica, world.replicas))
        # its replicas run in step: those with a block less run one that does not count
        if getattr(model, "even", False):
            mine += [None] * (-(-blocks // world.replicas) - len(mine))
        for block in mine:
            state.progress += 1
            counts, block = block is not None, block or 0
            ids = range(block * size, min((block + 1) * size, len(split)))
            x, y = split.fetch(list(ids), 0, False)
            x, y = x.to(world.device), y.to(world.device)
            with autocast(state.opts, world.device):
                out = model(x)
            if out is None or not counts:  # a stage before the last
                continue
            losses = exact_losses(out, y)
            finite = losses.isfinite()
            found = out.argmax(-1)
            sums += torch.stack([(losses[finite] * FIXED).round().long().sum(), (found == y).sum(),
                                 torch.tensor(len(y), device=y.device), (~finite).sum()]).cpu()
            if len(split) <= FEW and y.dim() == 1:
                predictions, labels = found.tolist(), y.tolist()
    world.all_sum(sums)
    loss, hits, samples, broken = sums.tolist()
    metrics = {"val_loss": float("nan") if broken else loss / FIXED / samples, "val_acc": hits / (samples * split.tokens)}
    return metrics | ({"predictions": predictions, "labels": labels} if predictions else {})


@contextlib.contextmanager
def averaged_weights(state):
    """Inside, the net has the averaged weights (--ema-decay); outside, its own."""
    if not state.ema:
        yield
        return
    own = {p: p.detach().clone() for p in state.net.parameters()}
    with state.changing():
        # for a save meanwhile
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
