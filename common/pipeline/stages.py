"""Stage and Pipeline: a net in stages, over ranks with micro batches in flight, or over local devices."""

import functools
import itertools
import random
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.utils.checkpoint import checkpoint

from common.device import is_gpu, module_of
from common.errors import UserError, blamed
from common.pipeline.transfer import Ranks, timetable
from common.sampler import seed
from common.training import autocast, average, local, placed
from common.world import buckets_of

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
        if is_gpu(self.device):
            return module_of(self.device).default_generators[self.device.index or 0]
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
        self.is_first = world.stage == 0
        self.is_last = world.stage == self.parts - 1
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
        # functions that wait for what other stages have sent, in the order of the micro batches
        self.inputs = []
        self.gradients = []
        self.transfer = Ranks(world, shapes, self.stages[0].generator)

    # ---- evaluation ----
    def forward(self, *args, **kwargs):
        """The net's output, in one process."""
        x = self.stages[0](*args, **kwargs)
        places = {}  # by kind of device: its stages draw as one generator would
        for before, stage in itertools.pairwise(self.stages):
            places[before.device.type] = before.generator.get_state()
            if stage.device.type in places:
                stage.generator.set_state(places[stage.device.type])
            x = stage(x.to(stage.device))
        return x.to(self.world.device) if self.parts > 1 else x

    def score(self, samples, state):
        """What the task returns of a block, on the ranks of the last stage."""
        if self.world.stages == 1:
            return state.task(self, samples, state)
        x = state.task.input_of(samples)
        if not self.is_first:
            x = self.transfer.move(take=(self.world.stage - 1, len(x)))()
        y = self.stages[0](x)
        if self.is_last:
            return state.task.answered(y, samples, state)
        self.transfer.move(give=(self.world.stage + 1, y))
        self.transfer.drain()

    # ---- training ----
    def backward(self, batch, state):
        """Leaves the mean gradient of the global batch in `.grad`; returns this rank's totals.

        With --virtual-ranks each stage sums its slices along a tree of its own, over the ranks that hold it.
        """
        totals = state.task.zeros(self.world.device)
        passages = {}
        sizes = []
        slices = self.tree.own if self.tree else range(len(batch.parts))
        for number, (ids, samples) in zip(slices, batch.parts, strict=True):
            if ids or self.opts.shard:  # the other shards cannot gather their weights without this rank
                passages[len(sizes)] = self.passage(number, ids, samples, batch.size, totals, state)
                sizes.append(len(ids or self.example))
        if self.tree:
            self.tree.begin(state)
        self.run(passages, sizes)
        if self.tree:
            return self.tree.finish(batch, state)
        if self.world.replicas > 1 and not self.opts.shard:  # FSDP has summed already
            self.sum_gradients()
        average(state, totals, batch, self.world)
        return totals

    def run(self, passages, sizes):
        """Does this rank's work for micro batches of these sizes, as the timetable says."""
        for tick in timetable(len(sizes), self.parts):
            give = None
            take = None
            for stage, k, is_forward in tick:
                to = stage + 1 if is_forward else stage - 1
                if stage == self.world.stage:
                    passage = passages[k] if is_forward else passages.pop(k)
                    tensor = next(passage, None)
                    if 0 <= to < self.parts:
                        give = to, tensor
                elif to == self.world.stage:
                    take = stage, sizes[k]
                    arriving = self.inputs if is_forward else self.gradients
            received = self.transfer.move(give, take)
            if take:
                arriving.append(received)
        self.transfer.drain()

    def passage(self, number, ids, samples, size, totals, state):
        """A micro batch on its way through this rank's stage, in two steps: forward, and later back.

        The first one yields the output for the next stage, the second one the gradient for the stage before.
        With --virtual-ranks a micro batch is a slice, and gets the bits that an uncut net would give.
        """
        opts = self.opts
        tree = self.tree
        if self.is_first or self.is_last:
            samples = placed(samples if ids else self.example, self.world.device, opts, own=bool(tree))
        replica = [] if tree else [self.world.replica]
        seed(opts.seed, "step", state.progress.step, *replica, number)
        if tree:
            state.statistics.renew()
        x = None
        y = None
        sums = state.task.zeros(self.world.device)
        with nullcontext() if ids else _unchanged(self.net):
            if self.parts > 1:  # otherwise the task calls the stage
                x = state.task.input_of(samples) if self.is_first else self.inputs.pop(0)()
                x, y = self.through_the_stage(x)
            if self.is_last:
                y = state.scaler.scale(self.loss(y, samples, sums, state) * bool(ids) / size)
        if ids:
            totals.add_(sums)
        tail = tree.measured(number, len(ids) / size, sums) if tree else None
        yield y.detach()

        gradient = None if self.is_last else self.gradients.pop(0)()
        if tree:
            tree.backward(number, tail, y, gradient)
        elif y.requires_grad:
            y.backward(gradient)
        if not self.is_first:
            yield torch.zeros_like(x) if x.grad is None else x.grad

    def through_the_stage(self, x):
        """(input, output); UserError if slices draw from a generator that does not travel."""
        fact = f"model {self.opts.model}, stage {self.world.stage}"
        places = places_of_draws()
        if not self.is_first:
            x = x.detach().requires_grad_(x.is_floating_point())
        with blamed(fact):
            # layers may work in place, and x is a leaf or a part of the batch
            y = self.stages[0](x.clone())
        if self.tree and places_of_draws() != places:
            raise UserError(
                f"{fact} draws from random or numpy\n"
                "between stages only torch's draws go on: draw from torch, or use train_ddp.py"
            )
        return x, y

    def loss(self, y, samples, sums, state):
        """What is minimised; adds all that the task returns to `sums`."""
        task = state.task
        if y is None:
            values = task(self.stages[0], samples, state)
            tensors = [p for p in self.stages[0].parameters() if p.requires_grad]
        else:
            values = task.answered(y, samples, state)
            tensors = [y]
        task.add(sums, values)
        return task.minimised(values, tensors)

    def sum_gradients(self):
        """Sums over the replicas, in buckets; a weight that one of them has not used adds zeros there."""
        trained = [p for p in self.net.parameters() if p.requires_grad]
        used = self.world.sum_over_replicas(torch.tensor([p.grad is not None for p in trained]).int())
        gradients = []
        for p in itertools.compress(trained, used.tolist()):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            gradients.append(p.grad)
        for bucket in buckets_of(gradients):
            total = self.world.sum_over_replicas(_flatten_dense_tensors(bucket))
            torch._foreach_copy_(bucket, _unflatten_dense_tensors(total, bucket))

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
    """For the forward of an example, or its repetition: it must not change running statistics."""
    kept = [(buffer, buffer.clone()) for buffer in call.buffers()]
    try:
        yield
    finally:  # checkpoint() leaves early, by an exception
        for buffer, value in kept:
            buffer.data.copy_(value)
