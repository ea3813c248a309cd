"""Stage and Pipeline: a net in stages, over ranks with micro batches in flight, or over local devices."""

import functools
import itertools
import random
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.errors import UserError, blamed
from common.pipeline.transfer import Ranks, timetable
from common.sampler import seed
from common.training import autocast, local, placed

CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict


def module(net, piece):
    """What runs the parts of these names."""
    parts = [net._modules[name] if name else net for name in piece]
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def weight(net, piece):
    return sum(p.numel() for p in module(net, piece).parameters())


def blocks(module):
    """The outermost parts of containers that are no containers."""
    for part in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(part, CONTAINERS):
            yield part
        else:
            yield from blocks(part)


class Stage(nn.Module):
    """Some pieces in a row on one device."""

    def __init__(self, net, group, device, opts):
        super().__init__()
        self.net = net
        self.device = device
        self.opts = opts
        self.calls = [module(net, piece) for piece in group]
        if opts.recompute:
            parts = [*blocks(net)] if group == [("",)] else []
            for part in parts or self.calls:
                part.forward = functools.partial(_recomputed, part, part.forward, opts)
        self.run = torch.compile(self._run) if opts.compile else self._run

    def forward(self, *args, **kwargs):
        with autocast(self.opts, self.device):
            return self.run(*args, **kwargs)

    def _run(self, *args, **kwargs):
        first, *others = self.calls
        x = first(*args, **kwargs)
        for call in others:
            x = call(x)
        return x

    @property
    def generator(self):
        """The random generator of this device."""
        if self.device.type == "cuda":
            return torch.cuda.default_generators[self.device.index or 0]
        return torch.default_generator


class Pipeline(nn.Module):
    """A net in stages: `backward` trains, `forward` evaluates; `net` has this rank's weights.

    In one process it is a module like any other, whose parts are on several devices. A net that is not cut
    (--stages 1) is called by the task as it likes.
    """

    def __init__(self, net, groups, shapes, opts, world, example):
        super().__init__()
        self.net = net
        self.opts = opts
        self.world = world
        self.groups = groups
        self.parts = len(groups)
        self.example = example  # two samples, for a forward without any
        self.tree = None  # of the sums of --virtual-ranks
        self.parameters_of = [weight(net, sum(group, ())) for group in groups]
        here = [world.stage] if world.stages > 1 else range(self.parts)
        devices = itertools.cycle(world.devices)
        self.stages = [Stage(net, groups[i], next(devices), opts) for i in here]
        weights = [p for p in net.parameters() if p.requires_grad]
        self.lengths = torch.zeros(len(weights), dtype=weights[0].dtype, device=world.device)
        for i, group in enumerate(groups):
            for name in sum(group, ()):
                if i not in here:
                    net._modules[name] = nn.Identity()
        mine = set(net.parameters())
        self.places = [i for i, p in enumerate(weights) if p in mine]  # in the whole net
        self.transfer = Ranks(world, shapes, self.stages[0].generator)

    # ---- evaluation ----
    def forward(self, *args, **kwargs):
        """The net's output, in one process."""
        x = self.stages[0](*args, **kwargs)
        for before, stage in itertools.pairwise(self.stages):
            stage.generator.set_state(before.generator.get_state())  # draw as one generator would
            x = stage(x.to(stage.device))
        return x.to(self.world.device) if self.parts > 1 else x

    def judge(self, samples, state):
        """What the task returns of a block; None on a rank that does not hold the last stage."""
        if self.world.stages == 1:
            return state.task(self, samples, state)
        here = self.world.stage
        x = state.task.input_of(samples)
        if here > 0:
            x = self.transfer.move(take=(here - 1, len(x)))()
        y = self.stages[0](x)
        if here == self.parts - 1:
            return state.task.answered(y, samples, state)
        self.transfer.move(give=(here + 1, y))
        return self.transfer.drain()

    # ---- training ----
    def run(self, sizes, ahead, back):
        """Does this rank's work for micro batches of these sizes, as the timetable says.

        `ahead(k, receive)` returns the output for the next stage, `back` the gradient for the stage before.
        `receive` waits for what the other stage gave; it returns None at the ends.
        """
        arriving = {}
        for tick in timetable(len(sizes), self.parts):
            give = None
            take = None
            for stage, k, forward in tick:
                act = ahead if forward else back
                to = stage + 1 if forward else stage - 1
                if stage == self.world.stage:
                    tensor = act(k, arriving.pop((k, forward), lambda: None))
                    if 0 <= to < self.parts:
                        give = to, tensor
                elif to == self.world.stage:
                    take = stage, sizes[k]
                    taken = k, forward
            receive = self.transfer.move(give, take)
            if take:
                arriving[taken] = receive
        self.transfer.drain()

    def backward(self, batch, state):
        """Leaves the mean gradient of the global batch in `.grad`; returns this rank's totals.

        With --virtual-ranks every slice gets the bits that an uncut net would give, and each stage sums its
        slices along a tree of its own, over the ranks that hold the stage.
        """
        world = self.world
        opts = self.opts
        task = state.task
        tree = self.tree
        stage = self.stages[0]
        first = world.stage == 0
        last = world.stage == self.parts - 1
        totals = task.zeros(stage.device)
        in_flight = {}
        trained = [p for p in self.net.parameters() if p.requires_grad]
        flights = []
        for k, (n, part) in enumerate(batch.parts):  # slices without samples do not travel
            if n or opts.shard:  # with --shard a replica without samples runs an example
                flights.append((tree.slices[k] if tree else k, n, part if n else self.example))
        if tree:
            tree.begin(state)

        def ahead(i, receive):
            v, n, samples = flights[i]
            if first or last:
                samples = placed(samples, stage.device, opts, own=bool(tree))
            seed(opts.seed, "step", state.step, *([v] if tree else [world.replica, v]))
            places = tree and places_of_draws()
            if first:
                x = None if last else task.input_of(samples)
            else:
                x = receive().detach()  # and draws go on where the stage before ended
                x.requires_grad_(x.is_floating_point())
            if tree and i:
                state.buffers.renew()
            y = None
            if x is not None:
                with blamed(f"model {opts.model}, stage {world.stage}"):
                    y = stage(x.clone())  # layers may work in place, and x is a leaf or a part of the batch
            if tree and places_of_draws() != places:
                raise UserError(
                    f"model {opts.model}: stage {world.stage} draws from random or numpy\n"
                    "between stages only torch's draws go on: draw from torch, or use train_ddp.py"
                )
            found = task.zeros(stage.device, tree.kind if tree else torch.float64)
            if last:
                values = task(stage, samples, state) if first else task.answered(y, samples, state)
                task.add(found, values)
                y = task.minimised(values, trained if first else [y])
                y = state.scaler.scale(y * bool(n) / batch.size)
            tail = tree.measured(v, n / batch.size, found) if tree else None
            if n:
                totals.add_(found)
            in_flight[i] = x, y, tail
            return y.detach()

        def back(i, receive):
            x, y, tail = in_flight.pop(i)
            gradient = receive()
            if tree:
                tree.backward(flights[i][0], tail, y, gradient)
            elif y.requires_grad:
                y.backward(gradient)
            if first:
                return None
            return torch.zeros_like(x) if x.grad is None else x.grad

        self.run([n or 2 for _, n, _ in flights], ahead, back)
        if tree:
            return tree.finish(batch, state)
        if world.replicas > 1 and not opts.shard:  # --shard has summed already
            used = world.sum_over_replicas(torch.tensor([p.grad is not None for p in trained]).int())
            for p in itertools.compress(trained, used.tolist()):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                world.sum_over_replicas(p.grad)
        state.average(totals, batch, world)
        return totals

    def norm(self, gradients):
        """The norm of the whole net's gradient; those of its weights are added in one order at any cut."""
        if self.world.stages == 1 and not self.opts.shard:
            return torch.nn.utils.get_total_norm(gradients)
        lengths = torch.zeros_like(self.lengths)
        if gradients:
            used = [p.grad is not None for p in self.net.parameters() if p.requires_grad]
            here = [local(gradient) for gradient in gradients]
            lengths[list(itertools.compress(self.places, used))] = torch.stack(torch._foreach_norm(here))
        if self.opts.shard:  # these have some rows each
            lengths = (self.world.sum_over_replicas(lengths.square()) / self.world.copies).sqrt()
        return torch.linalg.vector_norm(self.world.sum_over_stages(lengths))


def places_of_draws():
    """How far the generators of random and numpy have come."""
    return random.getstate()[1][-1], np.random.get_state()[2]


def _recomputed(part, forward, opts, *args, **kwargs):
    """Forward of a part that keeps its inputs alone: the backward makes the rest again."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not opts.compile:  # compiled code does not repeat a change of a buffer
        kwargs["context_fn"] = lambda: (nullcontext(), _unchanged(part))
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def _unchanged(call):
    """For the repetition of a forward, which must not change running statistics again."""
    kept = [(buffer, buffer.clone()) for buffer in call.buffers()]
    try:
        yield
    finally:  # checkpoint() leaves early, by an exception
        for buffer, value in kept:
            buffer.data.copy_(value)
