"""Stage and Pipeline: a net in stages, over ranks with micro batches in flight, or over local devices."""

import contextlib
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.errors import blamed
from common.pipeline.transfer import Ranks, timetable
from common.training import autocast, placed, seed


def module(net, piece):
    """What runs the parts of these names."""
    parts = [net._modules[name] if name else net for name in piece]
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def weight(net, piece):
    return sum(p.numel() for p in module(net, piece).parameters())


class Stage(nn.Module):
    """Some pieces in a row on one device."""

    def __init__(self, net, index, group, device, opts):
        super().__init__()
        self.net = net
        self.index = index
        self.device = device
        self.opts = opts
        self.calls = [module(net, piece).to(device) for piece in group]
        self.run = torch.compile(self._run) if opts.compile else self._run

    def forward(self, *args, **kwargs):
        with autocast(self.opts, self.device):
            return self.run(*args, **kwargs)

    def _run(self, *args, **kwargs):
        for call in self.calls:
            if self.opts.recompute and torch.is_grad_enabled():
                if not self.opts.compile:  # compiled code does not repeat a change of a buffer
                    kwargs["context_fn"] = partial(_contexts, call)
                x = checkpoint(call, *args, use_reentrant=False, **kwargs)
            else:
                x = call(*args, **kwargs)
            args = (x,)
            kwargs = {}
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
        self.tree = None  # of the sums of --virtual-ranks
        self.parameters_of = [weight(net, sum(group, ())) for group in groups]
        here = [world.stage] if world.stages > 1 else range(self.parts)
        weights = [p for p in net.parameters() if p.requires_grad]
        self.lengths = torch.zeros(len(weights), dtype=weights[0].dtype, device=devices[0])
        kept = [name for i in here for name in sum(groups[i], ())]
        for name in net._modules:
            if name not in kept and kept != [""]:
                net._modules[name] = nn.Identity()
        mine = set(net.parameters())
        self.places = [i for i, p in enumerate(weights) if p in mine]  # in the whole net
        self.stages = [Stage(net, i, groups[i], devices[i], opts) for i in here]
        self.transfer = Ranks(world, shapes, self.stages[0].generator)

    # ---- the work of all ticks ----
    def run(self, sizes, ahead, back=None):
        """Does this rank's work for micro batches of these sizes.

        `ahead(k, receive)` returns the output for the next stage, `back`, if there is one, the gradient for
        the stage before. `receive` waits for what the other stage gave; None at the ends.
        """
        arriving = {}
        for tick in timetable(len(sizes), self.parts):
            gives = []
            takes = []
            for stage, k, forward in tick:
                act = ahead if forward else back
                to = stage + 1 if forward else stage - 1
                if act and stage == self.world.stage:
                    tensor = act(k, arriving.pop((k, forward), None))
                    if 0 <= to < self.parts:
                        gives.append((to, tensor))
                elif act and to == self.world.stage:
                    takes.append((stage, sizes[k], (k, forward)))
            arriving |= self.transfer.move(gives, takes)
        self.transfer.drain()

    # ---- evaluation ----
    def forward(self, *args, **kwargs):
        """The net's output; over ranks that of the one that has the last stage, None on the others."""
        first, *others = self.stages
        if self.world.stages == 1:
            before = first
            x = first(*args, **kwargs)
            for stage in others:
                stage.generator.set_state(before.generator.get_state())  # draw as one generator would
                x = stage(x.to(stage.device))
                before = stage
            return x.to(self.world.device) if others else x
        outputs = []

        def ahead(_, receive):
            outputs.append(first(receive() if receive else args[0]))
            return outputs[0]

        self.run([len(args[0])], ahead)
        return outputs[0] if first.index == self.parts - 1 else None

    def judge(self, samples, state):
        """What the task returns of a block; None on a rank that does not hold the last stage."""
        if self.world.stages == 1:
            return state.task(self, samples, state)
        output = self(state.task.input_of(samples, state))
        return None if output is None else state.task.answered(output, samples, state)

    # ---- training ----
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
        first = stage.index == 0
        last = stage.index == self.parts - 1
        totals = task.zeros(stage.device)
        in_flight = {}
        trained = [p for p in self.net.parameters() if p.requires_grad]
        # Slices without samples do not travel; with --shard a replica without samples runs an example.
        flights = [
            (k, n, part if n else self.example) for k, (n, part) in enumerate(batch.parts) if n or self.even
        ]
        if tree:
            tree.begin(state)

        def nothing(y):  # it has a gradient
            tensors = trained if y is None else [y]
            return sum(tensor.flatten()[:0].sum() for tensor in tensors)

        def ahead(i, receive):
            k, n, samples = flights[i]
            if first or last:
                samples = placed(samples, stage.device, opts, own=bool(tree))
            x = task.input_of(samples, state) if first and not last else None
            key = [tree.slices[k]] if tree else [world.replica, k]
            seed(world, opts.seed, "step", state.step, *key)
            if receive:
                x = receive().detach()  # and draws go on where the stage before ended
                x.requires_grad_(x.is_floating_point())
            if tree and k:
                state.buffers.renew()
            y = None
            if x is not None:
                with blamed(f"model {opts.model}, stage {stage.index}"):
                    y = stage(x.clone())  # layers may work in place, and x is a leaf or a part of the batch
            found = task.zeros(stage.device, tree.kind if tree else torch.float64)
            if last:
                values = task(stage, samples, state) if first else task.answered(y, samples, state)
                task.add(found, values)
                y = task.minimised(values, lambda: nothing(y)) * bool(n) / batch.size
                if state.scaler:
                    y = state.scaler.scale(y)
            tail = tree.measured(tree.slices[k], n / batch.size, found) if tree else None
            if n:
                totals.add_(found)
            in_flight[i] = x, y, tail
            return y.detach()

        def back(i, receive):
            k = flights[i][0]
            x, y, tail = in_flight.pop(i)
            gradient = receive() if receive else None
            if opts.shard:
                stage.set_requires_gradient_sync(i == len(flights) - 1)
            if tree:
                tree.backward(tree.slices[k], tail, y, gradient)
            elif y.requires_grad:
                y.backward(gradient)
            if first:
                return None
            return torch.zeros_like(x) if x.grad is None else x.grad

        self.run([n or 2 for _, n, _ in flights], ahead, back)
        if tree:
            return tree.finish(batch, state)
        if world.replicas > 1:
            if not opts.shard:  # which has summed what it holds
                for p in trained:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    world.sum_over_replicas(p.grad)
            state.buffers.average(world, sum(n for _, n, _ in flights) / batch.size)
        totals = totals.to(world.device)
        state.count(totals[1], batch.size, world.all_sum)
        return totals

    def norm(self, gradients):
        """The norm of the whole net's gradient; those of its weights are added in one order at any cut."""
        if self.world.stages == 1 and not self.even:
            return torch.nn.utils.get_total_norm(gradients)
        lengths = torch.zeros_like(self.lengths)
        if gradients:
            here = [g.to_local() if self.even else g for g in gradients]
            lengths[self.places] = torch.stack(torch._foreach_norm(here))
        if self.even:  # these have some rows each
            lengths = self.world.sum_over_replicas(lengths.square()).sqrt()
        return torch.linalg.vector_norm(self.world.sum_over_stages(lengths))


def _contexts(call):
    """Contexts of a forward and of its repetition, which must not change running statistics again."""
    return contextlib.nullcontext(), _unchanged(call)


@contextlib.contextmanager
def _unchanged(call):
    kept = [(buffer, buffer.clone()) for buffer in call.buffers()]
    try:
        yield
    finally:  # checkpoint() leaves early, by an exception
        for buffer, value in kept:
            buffer.data.copy_(value)
