"""A net cut into stages, with micro batches in flight: over devices of one process, or over ranks.

W ranks are W / stages pipelines side by side. In one process one thread does the work of all stages: GPUs
work at once all the same, because it only gives them their orders.
"""
import contextlib
import json
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from common.data import Batch
from common.errors import UserError, only_deterministic
from common.options import Options
from common.pipeline.cut import HOST, count, cut, measure, pieces, refuse_ties
from common.pipeline.schedule import LOOPS
from common.pipeline.shard import Uses, shard
from common.pipeline.stages import Pipeline, gradient_of, loss_of
from common.pipeline.transfer import NO_NOTE
from common.training import TrainState, distribute, loss, placed, prepare, seed
from common.training import backward as plain_backward
from common.world import World, send


def split(net: nn.Module, opts: Options, world: World, data: Any, task: Any) -> Pipeline:
    """The pipeline of a net: measured, cut as --balance says, each stage in its place; call on every rank."""
    if world.stages == 1 and len(world.devices) == 1 and opts.stages == 0:
        raise UserError(f"train_mp.py splits a net over two devices or more, here is one: {world.device}\n"
                        "for example --devices cuda:0,cuda:1, or torchrun --nproc_per_node=2 train_mp.py\n"
                        "on one device use train_ddp.py")
    net = prepare(net, opts, world, data, task, HOST)
    found, places = pieces(net), world.devices if world.stages == 1 else range(world.stages)
    two = data.train.fetch([0, len(data.train) - 1])
    samples = task.input_of(two, SimpleNamespace(net=net, opts=opts, step=0))
    uses = Uses()

    @contextlib.contextmanager
    def forward():
        with loss.autocast(opts, world.device), uses if opts.shard else contextlib.nullcontext():
            yield

    measures = measure(net, found, samples, world.device, forward)
    if world.size > 1:  # the times of rank 0 decide for all
        told = json.loads(send(world, json.dumps([[m.seconds, m.kept] for m in measures]).encode(), 0))
        measures = [m._replace(seconds=s, kept=k) for m, (s, k) in zip(measures, told, strict=True)]
    loops = LOOPS if opts.schedule == "interleaved" else 1
    weights = [m.seconds if opts.balance == "time" else count(net, piece.owns) + 1
               for m, piece in zip(measures, found, strict=True)]
    own_places = opts.balance == "parameters" and loops == 1 and world.stages == 1
    placement = getattr(net, "placement", ()) if own_places else ()
    if len(places) == 2 and len(placement) == len(found):
        starts = [i for i, at in enumerate(placement) if i == 0 or at != placement[i - 1]]
        groups = [found[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        device_of = [world.devices[placement[i]] for i in starts]
    else:
        groups = cut(found, weights, loops * len(places), opts.balance)
        devices = world.devices if world.stages == 1 else [world.device]
        device_of = [devices[i % len(devices)] for i in range(len(groups))]
    refuse_ties(net, groups)
    each = iter(measures)
    measured = [[next(each) for _ in group] for group in groups]
    model = Pipeline(net, groups, measured, opts, world, device_of)
    if opts.shard:
        shard(net, model.stages, world, uses.of)
    if opts.virtual_ranks:
        model.tree = distribute(net, opts, world).tree
    return model


def backward(model: Pipeline, batch: Batch, state: TrainState, world: World) -> Tensor:
    """`backward` of common.training for a pipeline: one gradient of one global batch, on every rank."""
    if state.opts.virtual_ranks and world.stages > 1:
        return backward_slices(model, batch, state)
    if state.opts.virtual_ranks:
        # the whole pipeline is in this process: its slices run one after the other, as those of any net
        return plain_backward(SimpleNamespace(net=model, tree=model.tree), batch, state, world)
    return model.backward(batch, state)


@only_deterministic()
def backward_slices(model, batch, state):
    """--virtual-ranks over ranks with a stage each: every slice gets the bits that an uncut net would give.

    Strides and the random generator's state travel with a tensor (transfer.py), because both affect the bits.
    Each stage sums its slices along a tree of its own, over the ranks that hold the stage.
    """
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

    model.run([n for _, n, _ in flights], ahead, back, state.own)
    add_nothing(until=tree.slices.stop)
    return tree.finish(batch, state)


def describe(model: Pipeline, samples: int, optimizer: torch.optim.Optimizer) -> list[str]:
    """The cut as lines of a table, and how long so many micro batches leave stages idle."""
    opts, sliced, ranks = model.opts, model.opts.virtual_ranks, model.world.stages > 1
    micro = -(-opts.global_batch_size // sliced) if sliced else min(opts.micro_batch_size or samples, samples)
    count, places = -(-samples // max(1, micro)), model.world.stages if ranks else len(set(model.devices))
    flights = count if ranks or not sliced else 1
    spent = [sum(m.seconds for m in facts) for facts in model.measures]
    lines = ["stage  place     layers                              parameters   time   memory (MiB)"]
    for i, (group, own) in enumerate(zip(model.groups, model.parameters_of, strict=True)):
        at = f"rank {i % places}" if ranks else str(model.devices[i])
        layers = group[0].name + (f" ... {group[-1].name} ({len(group)})" if len(group) > 1 else "")
        flying = min(flights, model.parts - i) if opts.schedule != "gpipe" else flights
        kept = sum(m.kept for m in model.measures[i]) * micro * flying
        memory = (own * copies_of(optimizer) * 4 + kept) / 2**20
        lines.append(f"{i:5}  {at:8}  {layers:34}  {own:11,}  {spent[i] / sum(spent):5.0%}  {memory:13,.1f}")
    if places > 1:
        of = "micro batches" if not sliced else "slices" if ranks else "slices, one after the other,"
        idle = (places - 1) / (flights * max(1, model.parts // places) + places - 1)
        lines.append(f"{opts.schedule}: {count} {of} of {micro} or less over {places} places, "
                     f"idle {idle:.0%} of the time")
    return lines


def copies_of(optimizer):
    """How many tensors of a weight's size a step needs: weight, gradient, and what the optimizer keeps."""
    return 2 + max((sum(torch.is_tensor(value) and value.shape == p.shape for value in values.values())
                    for p, values in optimizer.state.items() if p.dim()), default=0)
