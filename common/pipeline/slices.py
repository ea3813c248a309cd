"""--virtual-ranks in stages over ranks: every slice computed as if the net were whole, with other slices on
the other stages.

What decides bits goes on where the stage before has left it: the tensor with its strides (transfer.py), and the
generator's state. Each stage adds its slices up along its own tree, in their order, over the ranks that hold
it.
"""
import itertools
import time

import torch

from common.pipeline.stages import orders
from common.pipeline.transfer import NOTHING
from common.sampler import share
from common.training import loss, own_copy, seed


def backward_slices(model, batch, state):
    """As reduce.backward_slices; `model` is the pipeline, with one stage on this rank."""
    tree, stage, transfer = model.tree, model.stages[0], model.transfer
    first, last, out, at = stage.index == 0, stage.index == model.parts - 1, None, tree.slices.start
    tree.begin(state)
    sizes = [len(share(batch.size, v, tree.count)) for v in tree.slices]
    # some may be empty
    flights = [each for each in zip(tree.slices, sizes, itertools.accumulate(sizes), strict=True) if each[1]]
    held = {}
    for ahead, k in orders("1f1b", len(flights), model.parts - stage.index):
        v, n, end = flights[k]
        if ahead:
            came = transfer.exchange(out, None if first else
                                 model.edge(stage.index - 1, n, stage.index - 1, len(stage.generator.get_state())))
            began = time.monotonic()
            held[k] = _forward(model, v, batch.x[end - n:end], batch.y[end - n:end], came, batch.size, state)
            out = None if last else (held[k][1], stage.index + 1, stage.generator.get_state())
        else:
            came = transfer.exchange(out, None if last else model.edge(stage.index, n, stage.index + 1))
            began = time.monotonic()
            x, y, totals, moves = held.pop(k)
            _add_nothing(tree, range(at, v))
            with tree.leaf(v):
                tree.measure(*totals, moves)
                if y.requires_grad:
                    stage.backward(y, came and came[0])
            at, out = v + 1, None
            if not first:
                out = torch.zeros_like(x) if x.grad is None else x.grad, stage.index - 1, NOTHING
        state.own_seconds += time.monotonic() - began
    transfer.exchange(out)
    _add_nothing(tree, range(at, tree.slices.stop))
    transfer.drain()
    return tree.finish()


def _forward(model, v, x, y, came, size, state):
    """(input, output or loss, (summed loss, hits), moves of the buffers) of a slice in this rank's stage."""
    opts, stage, tree = model.opts, model.stages[0], model.tree
    seed(model.world, opts.seed, "step", state.step, v)
    x, y = (own_copy(t, model.world) for t in (x, y))
    n, (x, targets) = len(x), loss.inputs_and_targets(x, y, state)
    if came:
        x = came[0].requires_grad_(came[0].is_floating_point())
        stage.generator.set_state(came[1].clone())  # it would read a view from the beginning of its memory
    if v > tree.slices.start:
        tree.buffers.renew()
    out, totals = stage(x), (torch.zeros((), device=stage.device),) * 2
    if stage.index == model.parts - 1:
        summed = loss.summed_loss(out, targets, opts)
        totals, out = (summed.detach(), loss.correct(out, y)), summed / size
        out = state.scaler.scale(out) if state.scaler else out
    return x, out, totals, tree.moves(v, n / size)


def _add_nothing(tree, slices):
    """The leaves of slices without samples."""
    for v in slices:
        with tree.leaf(v):
            pass
