"""--virtual-ranks over pipeline ranks: each slice gets the bits that an uncut net would give.

A tensor keeps its strides and the random generator its state from stage to stage (transfer.py), because both
affect the bits. Each stage sums its slices along a tree of its own, over the ranks that hold the stage.
"""
import time

import torch

from common.pipeline.stages import orders
from common.pipeline.transfer import NO_NOTE
from common.training import placed, seed


def backward_slices(model, batch, state):
    """Like backward_slices in training/backward.py; `model` is the pipeline, with one stage on this rank."""
    tree, stage, transfer = model.tree, model.stages[0], model.transfer
    first, last, out, at = stage.index == 0, stage.index == model.parts - 1, None, tree.slices.start
    tree.begin(state)
    slices = ((v, n, part) for v, (n, part) in zip(tree.slices, batch.parts, strict=True))
    flights, in_flight = [each for each in slices if each[1]], {}  # slices without samples do not travel
    for ahead, k in orders("1f1b", len(flights), model.parts - stage.index):
        v, n, part = flights[k]
        if ahead:
            note = len(stage.generator.get_state())
            came = transfer.exchange(
                out, None if first else model.edge(stage.index - 1, n, stage.index - 1, note))
            began = time.monotonic()
            in_flight[k] = _forward(model, v, n, part, came, batch.size, state)
            out = None if last else (in_flight[k][1], stage.index + 1, stage.generator.get_state())
        else:
            came = transfer.exchange(out, None if last else model.edge(stage.index, n, stage.index + 1))
            began = time.monotonic()
            x, y, totals, moves = in_flight.pop(k)
            _add_nothing(tree, range(at, v))
            with tree.leaf(v):
                tree.measure(totals, moves)
                if y.requires_grad:
                    stage.backward(y, came and came[0])
            at, out = v + 1, None
            if not first:
                out = torch.zeros_like(x) if x.grad is None else x.grad, stage.index - 1, NO_NOTE
        state.own_seconds += time.monotonic() - began
    transfer.exchange(out)
    _add_nothing(tree, range(at, tree.slices.stop))
    transfer.drain()
    return tree.finish(batch, state)


def _forward(model, v, n, part, came, size, state):
    """(input, output or loss, totals, changes of buffers) of a slice in this rank's stage."""
    opts, stage, tree, task = model.opts, model.stages[0], model.tree, state.task
    seed(model.world, opts.seed, "step", state.step, v)
    part = placed(part, model.world.device, opts, own=True)
    x = came[0].requires_grad_(came[0].is_floating_point()) if came else task.input_of(part, state)
    if came:
        stage.generator.set_state(came[1].clone())  # set_state ignores where a view begins in its memory
    if v > tree.slices.start:
        tree.buffers.renew()
    out, totals = stage(x), task.zeros(stage.device, tree.kind)
    if stage.index == model.parts - 1:
        found = task.answered(out, part, state)
        task.add(totals, found)
        out = found[task.names[0]][0] / size
        out = state.scaler.scale(out) if state.scaler else out
    return x, out, totals, tree.buffers.moves(n / size, v == tree.count - 1)


def _add_nothing(tree, slices):
    """Slices without samples still have a leaf in the tree."""
    for v in slices:
        with tree.leaf(v):
            pass
