"""Stage and Pipeline: a net in stages, over ranks with micro batches in flight, or over local devices."""
import contextlib
import functools
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.errors import blamed
from common.pipeline.cut import keep, module, weight
from common.pipeline.transfer import NO_DRAWS, Ranks, sum_gradients
from common.training import autocast, placed, seed


@functools.cache
def timetable(count: int, stages: int) -> list[list[tuple[int, int, bool]]]:
    """For each tick the work of all stages: (stage, micro batch, forward?).

    3 stages,         F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3     1f1b: a stage goes forward until it has as many
    4 micro batches   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .      in flight as stages are left, then alternately
                      .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .      back and forward.

    Every work needs what an earlier tick made. A stage takes the micro batches in their order, both ways.
    """
    ahead = [0] * stages
    back = [0] * stages
    done = set()
    ticks = []
    while min(back) < count:
        tick = []
        for stage in range(stages):
            forward = ahead[stage] < min(count, back[stage] + stages - stage)
            k = ahead[stage] if forward else back[stage]
            before = stage - 1 if forward else stage + 1
            if k < count and (before in (-1, stages) or (before, k, forward) in done):
                tick.append((stage, k, forward))
                ahead[stage] += forward
                back[stage] += not forward
        done.update(tick)
        ticks.append(tick)
    return ticks


class Stage(nn.Module):
    """Some parts in a row on one device."""

    def __init__(self, net, index, group, device, opts):
        super().__init__()
        self.net = net
        self.index = index
        self.device = device
        self.opts = opts
        self.calls = [module(net, piece).to(device) for piece in group]
        self.run = torch.compile(self._run) if opts.compile else self._run
        self.norms = [m for m in net.modules() if getattr(m, "track_running_stats", False)]

    def forward(self, *args, **kwargs):
        with autocast(self.opts, self.device):
            return self.run(*args, **kwargs)

    def _run(self, *args, **kwargs):
        for call in self.calls:
            if self.opts.recompute and torch.is_grad_enabled():
                contexts = partial(_contexts, self.norms)
                x = checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)
            else:
                x = call(*args, **kwargs)
            args, kwargs = (x,), {}
        return x

    @property
    def generator(self):
        """The random generator of this device."""
        gpu = self.device.type == "cuda"
        return torch.cuda.default_generators[self.device.index or 0] if gpu else torch.default_generator


class Pipeline(nn.Module):
    """A net in stages: `backward` trains, `forward` evaluates; `net` has this rank's weights.

    In one process it is a module like any other, whose parts are on several devices. A net that is not cut
    (--stages 1) is called by the task as it likes.
    """

    def __init__(self, net, groups, shapes, opts, world, devices, example):
        super().__init__()
        self.net = net
        self.opts = opts
        self.world = world
        self.groups = groups
        self.parts = len(groups)
        self.devices = devices
        self.example = example  # two samples, for a forward without any
        self.even = opts.shard  # replicas of a stage then need as many forwards
        self.parameters_of = [weight(net, sum(group, ())) for group in groups]
        weights = [p for p in net.parameters() if p.requires_grad]
        self.weights = len(weights)
        self.kind = torch.float64 if any(p.dtype == torch.float64 for p in weights) else torch.float32
        here = [world.stage] if world.stages > 1 else range(self.parts)
        keep(net, [name for i in here for name in sum(groups[i], ())])
        net._apply(lambda tensor: tensor.to(devices[0]), recurse=False)  # what belongs to no part
        self.stages = [Stage(net, i, groups[i], devices[i], opts) for i in here]
        kept = {id(p) for p in net.parameters()}
        self.order = [i for i, p in enumerate(weights) if id(p) in kept]  # their places in the whole net
        self.tree = None  # of the sums of --virtual-ranks
        self.transfer = Ranks(world, shapes, len(self.stages[0].generator.get_state()))

    def run(self, sizes, ahead, back=None):
        """Does this rank's work of every tick, for micro batches of these sizes.

        `ahead(k, came)` returns the (output, draws) that the next stage gets, `back`, if there is one, the
        (gradient, draws) for the stage before; `came` is what the other stage returned.
        """
        arrived = {}
        for tick in timetable(len(sizes), self.parts):
            gives = []
            takes = []
            for stage, k, forward in tick:
                if not forward and not back:
                    continue
                to = stage + 1 if forward else stage - 1
                if stage == self.world.stage:
                    wait = arrived.pop((k, forward), None)
                    act = ahead if forward else back
                    result = act(k, wait() if wait else None)
                    if 0 <= to < self.parts:
                        gives.append((forward, *result))
                elif to == self.world.stage:
                    takes.append((k, forward, sizes[k]))
            arrived |= self.transfer.move(gives, takes)
        self.transfer.drain()

    def forward(self, *args, **kwargs):
        """The net's output; over ranks that of the one that has the last stage, None on the others."""
        if self.world.stages == 1:
            return self._forward_here(*args, **kwargs)
        stage = self.stages[0]
        output = None

        def ahead(_, came):
            nonlocal output
            x = args[0]
            if came:
                x, draws = came
                stage.generator.set_state(draws)
            output = stage(x)
            return output, stage.generator.get_state()

        self.run([len(args[0])], ahead)
        return output if stage.index == self.parts - 1 else None

    def _forward_here(self, *args, **kwargs):
        first, *others = self.stages
        x = first(*args, **kwargs)
        for stage, before in zip(others, self.stages, strict=False):
            stage.generator.set_state(before.generator.get_state())  # draw as one generator would
            x = stage(x.to(stage.device))
        return x.to(self.world.device) if others else x

    def judge(self, samples, state):
        """What the task returns of a block; None on a rank that does not hold the last stage."""
        if self.world.stages == 1:
            return state.task(self, samples, state)
        output = self(state.task.input_of(samples, state))
        return None if output is None else state.task.answered(output, samples, state)

    def backward(self, batch, state):
        """Leaves the mean gradient of the global batch in `.grad`; returns this rank's totals.

        With --virtual-ranks every slice gets the bits that an uncut net would give, and each stage sums its
        slices along a tree of its own, over the ranks that hold the stage.
        """
        world, opts, task, tree, stage = self.world, self.opts, state.task, self.tree, self.stages[0]
        first = stage.index == 0
        last = stage.index == self.parts - 1
        totals = task.zeros(stage.device)
        in_flight = {}
        # Slices without samples do not travel; with --shard a replica without samples runs an example.
        flights = [k for k, (n, _) in enumerate(batch.parts) if n or self.even]
        sizes = [batch.parts[k][0] for k in flights]
        samples = {}
        if first or last:  # copied before the run: a copy of samples must not delay it
            for k in flights:
                n, part = batch.parts[k]
                samples[k] = placed(part if n else self.example, stage.device, opts, own=bool(tree))
        if tree:
            tree.begin(state)

        def ahead(k, came):
            n = sizes[k]
            k = flights[k]
            x = y = None
            if first and not last:
                x = task.input_of(samples[k], state)
            seed(world, opts.seed, "step", state.step, *([tree.slices[k]] if tree else [world.replica, k]))
            if came:
                x, draws = came
                x = x.detach().requires_grad_(x.is_floating_point())
                stage.generator.set_state(draws)
            if tree and k:
                state.buffers.renew()
            with blamed(f"model {opts.model}, stage {stage.index}"):
                if not (first and last):
                    y = stage(x.clone())  # layers may work in place, and x is a leaf or a part of the batch
                draws = stage.generator.get_state()
                if last:
                    values = task(stage, samples[k], state) if first else task.answered(y, samples[k], state)
            found = task.zeros(stage.device, tree.kind if tree else torch.float64)
            if last:
                task.add(found, values)
                y = task.minimised(values, lambda: self._nothing(y)) * (1.0 if n else 0.0) / batch.size
                y = state.scaler.scale(y) if state.scaler else y
            tail = tree.measured(tree.slices[k], n / batch.size, found) if tree else None
            if n:
                totals.add_(found)
            in_flight[k] = x, y, tail
            return y.detach(), draws

        def back(k, came):
            k = flights[k]
            x, y, tail = in_flight.pop(k)
            if opts.shard:
                stage.set_requires_gradient_sync(k == len(batch.parts) - 1)  # one exchange a batch
            gradient = came and came[0]
            if tree:
                tree.backward(tree.slices[k], tail, y, gradient)
            elif y.requires_grad:
                y.backward(gradient)
            if first:
                return None, NO_DRAWS
            return torch.zeros_like(x) if x.grad is None else x.grad, NO_DRAWS

        self.run([n or 2 for n in sizes], ahead, back)
        if tree:
            return tree.finish(batch, state)
        if world.replicas > 1:
            sum_gradients(self.net, world)
            state.buffers.average(world, sum(sizes) / batch.size)
        totals = totals.to(world.device)
        state.count(totals[1], batch.size, world.all_sum)
        return totals

    def _nothing(self, y):
        """A sum of nothing, which has a gradient."""
        tensors = [p for p in self.net.parameters() if p.requires_grad] if y is None else [y]
        return sum(tensor.flatten()[:0].sum() for tensor in tensors)

    def norm(self, gradients):
        """The norm of the whole net's gradient."""
        length = torch.nn.utils.get_total_norm
        if self.world.stages == 1 and not self.even:
            return length(gradients)
        if self.opts.virtual_ranks:  # norms are added in one order, wherever the net is cut
            lengths = torch.zeros(self.weights, dtype=self.kind, device=self.world.device)
            if gradients:
                lengths[self.order] = torch.stack(torch._foreach_norm(gradients)).to(self.kind)
            return torch.linalg.vector_norm(self.world.sum_over_stages(lengths))
        rows = [g.to_local() for g in gradients if hasattr(g, "to_local")]
        whole = [g for g in gradients if not hasattr(g, "to_local")]
        square = length(whole).to(self.world.device).square()  # of none it is on the CPU
        if self.even:
            square = square + self.world.sum_over_replicas(length(rows).to(self.world.device).square())
        return self.world.sum_over_stages(square).sqrt()


def _contexts(norms):
    """Contexts of a forward and of its repetition, which must not change running statistics again."""
    return contextlib.nullcontext(), _frozen(norms)


@contextlib.contextmanager
def _frozen(norms):
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None
    try:
        yield
    finally:  # checkpoint() leaves early, by an exception
        for norm, (momentum, tracked) in zip(norms, kept, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = tracked
