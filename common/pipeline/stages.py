"""Stage and Pipeline: one loop over the work of all ticks, whether stages are ranks or local devices."""
import contextlib
import itertools
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.data import forward_sizes
from common.pipeline.cut import count, place, prune
from common.pipeline.schedule import timetable
from common.pipeline.transfer import NO_NOTE, Devices, Ranks
from common.training import loss, placed, seed

BUCKET_BYTES = 25 << 20      # of gradients summed at once


class Stage(nn.Module):
    """Some pieces in a row on one device."""

    def __init__(self, net, index, group, device, opts):
        super().__init__()
        self.index, self.group, self.device, self.opts = index, group, device, opts
        self.run = torch.compile(self._run) if opts.compile else self._run
        self.norms = [m for m in net.modules() if getattr(m, "track_running_stats", False)]

    def forward(self, x):
        with loss.autocast(self.opts, self.device):
            return self.run(x)

    def _run(self, x):
        x = x.clone()  # layers may work in place, and x is a leaf or a part of the batch
        for piece in self.group:
            if self.opts.recompute and torch.is_grad_enabled():
                x = checkpoint(piece.call, x, use_reentrant=False, context_fn=partial(_contexts, self.norms))
            else:
                x = piece.call(x)
        return x if self.opts.virtual_ranks else x.contiguous()  # its strides travel with bits alone

    @property
    def generator(self):
        """The random generator of this device."""
        gpu = self.device.type == "cuda"
        return torch.cuda.default_generators[self.device.index or 0] if gpu else torch.default_generator


class Pipeline(nn.Module):
    """A net in stages: `backward` trains, `forward` evaluates; `net` has this rank's weights."""

    def __init__(self, net, groups, measures, opts, world, device_of):
        super().__init__()
        self.net, self.opts, self.world, self.groups, self.measures = net, opts, world, groups, measures
        self.parts, self.devices = len(groups), device_of
        self.even = opts.shard  # replicas of a stage then need as many forwards
        self.parameters_of = [sum(count(net, piece.owns) for piece in group) for group in groups]
        own = range(world.stage, self.parts, world.stages)
        self.stages = [Stage(net, i, groups[i], device_of[i], opts) for i in own]
        self.stage_at = dict(zip(own, self.stages, strict=True))
        weights = [p for p in net.parameters() if p.requires_grad]
        self.weights = len(weights)
        self.kind = torch.float64 if any(p.dtype == torch.float64 for p in weights) else torch.float32
        prune(net, [prefix for stage in self.stages for piece in stage.group for prefix in piece.owns])
        for stage in self.stages:
            for piece in stage.group:
                place(net, piece, stage.device)
        left = {id(p) for p in net.parameters()}
        self.order = [i for i, p in enumerate(weights) if id(p) in left]  # their places in the whole net
        if world.stages == 1:
            self.transfer = Devices(device_of)
        else:
            note = len(self.stages[0].generator.get_state()) if opts.virtual_ranks else None
            self.transfer = Ranks(world, [(facts[-1].shape, facts[-1].dtype) for facts in measures], note)

    def run(self, sizes, ahead, back=None, own=None):
        """Does this process's work of every tick, for micro batches of these sizes; `own` adds up its times.

        `ahead(stage, k, came)` returns the (output, note) that the next stage gets, `back`, if there is one,
        the (gradient, note) for the stage before; `came` is what the other stage returned.
        """
        arrived, at = {}, self.stage_at
        places = self.parts if self.world.stages == 1 else self.world.stages  # every stage has its own turn
        for tick in timetable(self.opts.schedule, len(sizes), self.parts, places):
            gives, takes = [], []
            for i, k, forward in tick if back else [work for work in tick if work[2]]:
                to = i + 1 if forward else i - 1
                if i in at:
                    came = arrived.pop((i, k, forward))() if (i, k, forward) in arrived else None
                    began = own and own.now()
                    out = (ahead if forward else back)(at[i], k, came)
                    if own:
                        own.add(began)
                    gives += [((to, k, forward), *out)] if 0 <= to < self.parts else []
                elif to in at:
                    takes.append(((to, k, forward), sizes[k]))
            arrived |= self.transfer.move(gives, takes)
        self.transfer.drain()

    def forward(self, x):
        """The net's output on the rank that has the last stage, None on the others."""
        found = []

        def ahead(stage, k, came):
            if came and self.opts.virtual_ranks:  # draw as one generator would
                stage.generator.set_state(came[1])
            y = stage(came[0] if came else x)
            found[:] = [y.to(self.world.device)] if stage.index == self.parts - 1 else []
            return y, stage.generator.get_state() if self.opts.virtual_ranks else NO_NOTE

        self.run([len(x)], ahead)
        return found[0] if found else None

    def backward(self, batch, state):
        """Leaves the mean gradient of the global batch in `.grad`; returns this rank's totals."""
        world, opts, task, in_flight = self.world, self.opts, state.task, {}
        last = self.parts - 1
        totals, sizes = task.zeros(self.stages[-1].device), [n for n, _ in batch.parts]
        if self.even:  # all replicas run forwards as large as those of the largest share
            sizes = forward_sizes(batch.size, world.replicas - 1, world.replicas, opts)
        # copied before the run: a copy of samples must not delay it
        inputs, answers = ([placed(part, self.stage_at[i].device, opts) for _, part in batch.parts]
                           if i in self.stage_at else None for i in (0, last))

        def ahead(stage, k, came):
            x = came[0] if came else self._padded(task.input_of(inputs[k], state), sizes[k])
            x = x.detach().requires_grad_(came is not None and x.is_floating_point())
            seed(world, opts.seed, "stage", state.step, world.replica, stage.index, k)
            y = stage(x)
            if stage.index == last:
                y = loss_of(y[:batch.parts[k][0]], answers[k], totals, batch, state)
            in_flight[stage.index, k] = x, y
            return y.detach(), NO_NOTE

        def back(stage, k, came):
            if opts.shard:
                stage.set_requires_gradient_sync(k == len(sizes) - 1)  # one exchange a batch
            return gradient_of(*in_flight.pop((stage.index, k)), came), NO_NOTE

        self.run(sizes, ahead, back, state.own)
        if world.replicas > 1:
            self._sum_gradients()
            state.buffers.average(world, sum(n for n, _ in batch.parts) / batch.size)
        totals = totals.to(world.device)
        state.count(totals[1], batch.size, world.all_sum)
        return totals

    def _padded(self, x, size):
        """`x` with zeros up to `size` samples; the loss ignores them. All replicas run equal forwards."""
        x = torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])]) if len(x) < size else x
        channels_last = self.opts.channels_last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x

    @torch.no_grad()
    def _sum_gradients(self):
        """Over the ranks with the same stage; the loss is divided by the size of the whole batch."""
        bucket, size = [], 0
        parameters = [p for p in self.net.parameters() if p.requires_grad and not hasattr(p, "to_local")]
        for p, following in itertools.zip_longest(parameters, parameters[1:]):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            bucket.append(p.grad)
            size += p.grad.nbytes
            if size >= BUCKET_BYTES or following is None or following.dtype != p.dtype:
                flat = self.world.sum_over_replicas(torch.cat([g.flatten() for g in bucket]))
                sums = flat.split([g.numel() for g in bucket])
                torch._foreach_copy_(bucket, [own.view(g.shape) for own, g in zip(sums, bucket, strict=True)])
                bucket, size = [], 0

    def norm(self, gradients):
        """The norm of the whole net's gradient."""
        # --virtual-ranks: norms are added in one order, wherever the net is cut
        if self.opts.virtual_ranks and self.world.stages > 1:
            lengths = torch.zeros(self.weights, dtype=self.kind, device=self.world.device)
            if gradients:
                lengths[self.order] = torch.stack(torch._foreach_norm(gradients)).to(self.kind)
            return torch.linalg.vector_norm(self.world.sum_over_stages(lengths))
        rows = [g.to_local() for g in gradients if hasattr(g, "to_local")]
        own, mine = (torch.nn.utils.get_total_norm(part).to(self.world.device)  # of none it is on the CPU
                     for part in ([g for g in gradients if not hasattr(g, "to_local")], rows))
        if self.world.stages == 1 and not rows:
            return own
        mine = self.world.sum_over_replicas(mine.square()) if self.even else 0.0
        return self.world.sum_over_stages(own.square() + mine).sqrt()


def loss_of(y, part, totals, batch, state):
    """The last stage's loss, ready for its backward; adds all that the task finds to `totals`."""
    found = state.task.answered(y, part, state)
    state.task.add(totals, found)
    scaled = state.task.minimised(found, lambda: y.flatten()[:0].sum()) / batch.size
    return state.scaler.scale(scaled) if state.scaler else scaled


def gradient_of(x, y, came):
    """The gradient of a stage's input, given what the next stage returned for its output."""
    if y.requires_grad:
        y.backward(came and came[0])
    return torch.zeros_like(x) if x.grad is None else x.grad


def _contexts(norms):
    """Contexts of a forward and of its repetition, which must not change running statistics again."""
    return contextlib.nullcontext(), _frozen(norms)


@contextlib.contextmanager
def _frozen(norms):
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, tracked
