"""--virtual-ranks over pipeline ranks: each slice gets the bits that an uncut net would give.

A tensor keeps its strides and the random generator its state from stage to stage (transfer.py), because both
affect the bits. Each stage sums its slices along a tree of its own, over the ranks that hold the stage.
"""
from common.pipeline.stages import gradient_of, loss_of
from common.pipeline.transfer import NO_NOTE
from common.training import placed, seed


def backward_slices(model, batch, state):
    """Like backward_slices in training/backward.py; `model` is the pipeline, with one stage on this rank."""
    tree, opts, task, last = model.tree, model.opts, state.task, model.parts - 1
    slices = [(v, n, part) for v, (n, part) in zip(tree.slices, batch.parts, strict=True)]
    flights, in_flight = [each for each in slices if each[1]], {}  # slices without samples do not travel
    empty = [v for v, n, _ in slices if not n]
    tree.begin(state)

    def ahead(stage, k, came):
        v, n, part = flights[k]
        seed(model.world, opts.seed, "step", state.step, v)
        if stage.index in (0, last):
            part = placed(part, stage.device, opts, own=True)
        x = came[0].requires_grad_(came[0].is_floating_point()) if came else task.input_of(part, state)
        if came:
            stage.generator.set_state(came[1])
        if v > tree.slices.start:
            tree.buffers.renew()
        y, totals = stage(x), task.zeros(stage.device, tree.kind)
        note = stage.generator.get_state()
        if stage.index == last:
            y = loss_of(y, part, totals, batch, state)
        in_flight[k] = x, y, totals, tree.buffers.moves(n / batch.size, v == tree.count - 1)
        return y.detach(), note

    def back(stage, k, came):
        x, y, *facts = in_flight.pop(k)
        add_nothing(until=flights[k][0])
        with tree.leaf(flights[k][0]):
            tree.measure(*facts)
            return gradient_of(x, y, came), NO_NOTE

    def add_nothing(until):
        """Slices without samples still have a leaf in the tree."""
        while empty and empty[0] < until:
            with tree.leaf(empty.pop(0)):
                pass

    state.own_seconds += model.run(model.ticks(len(flights)), [n for _, n, _ in flights], ahead, back)
    add_nothing(until=tree.slices.stop)
    return tree.finish(batch, state)
