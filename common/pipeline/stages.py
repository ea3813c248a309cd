"""Stage and Pipeline: everything that threads on one machine and ranks of torchrun have in common."""
import contextlib
import time
from functools import partial
from threading import Lock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.data import forward_sizes
from common.pipeline.cut import belongs, count, place, prune
from common.sampler import hash_seed
from common.training import loss, placed

BUCKET_BYTES = 25 << 20      # of gradients summed at once


class Stage(nn.Module):
    """Some pieces in a row on one device; they draw from (seed, step, replica, stage, micro batch)."""

    def __init__(self, net, index, group, device, opts, world, random, lock):
        super().__init__()
        self.index, self.group, self.device, self.opts, self.world = index, group, device, opts, world
        self.random, self.lock = random, lock if random else contextlib.nullcontext()
        self.run = torch.compile(self._run) if opts.compile else self._run
        norms = [(path, m) for path, m in net.named_modules() if getattr(m, "track_running_stats", False)]
        self.norms = [[m for path, m in norms if belongs(path, piece.owns)] for piece in group]
        self.step, self.forwards = 0, 0

    def begin(self, step):
        self.step, self.forwards = step, 0

    def forward(self, x):
        with self.lock, loss.autocast(self.opts, self.device):
            if torch.is_grad_enabled() and self.random and not self.opts.virtual_ranks:
                key = "stage", self.step, self.world.replica, self.index, self.forwards
                self.generator.manual_seed(hash_seed(self.opts.seed, *key))
            self.forwards += torch.is_grad_enabled()
            return self.run(x)

    def backward(self, y, gradient=None):
        with self.lock:  # --recompute draws the numbers of the forward again
            y.backward(gradient)

    def _run(self, x):
        x = x.clone()  # layers may work in place, and x is a leaf or a part of the batch
        for piece, norms in zip(self.group, self.norms, strict=True):
            if self.opts.recompute and torch.is_grad_enabled():
                # the generator is shared: only a stage that draws may set it
                x = checkpoint(piece.call, x, use_reentrant=False, preserve_rng_state=self.random,
                               context_fn=partial(_contexts, norms))
            else:
                x = piece.call(x)
        return x if self.opts.virtual_ranks else x.contiguous()  # as torch's schedules need it

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
        self.parameters_of = [sum(count(net, piece) for piece in group) for group in groups]
        locks = {device: Lock() for device in device_of}
        random = [any(m.random for m in measured) for measured in measures]
        self.stages = [Stage(net, i, group, device_of[i], opts, world, random[i], locks[device_of[i]])
                       for i, group in enumerate(groups) if self.owns(i)]
        weights = [p for p in net.parameters() if p.requires_grad]
        self.weights = len(weights)
        self.kind = torch.float64 if any(p.dtype == torch.float64 for p in weights) else torch.float32
        prune(net, [prefix for stage in self.stages for piece in stage.group for prefix in piece.owns])
        for stage in self.stages:
            for piece in stage.group:
                place(net, piece, stage.device)
        own = {id(p) for p in net.parameters()}
        self.order = [i for i, p in enumerate(weights) if id(p) in own]  # their places in the whole net

    def backward(self, batch, state):
        """Leaves the mean gradient of the global batch in `.grad`; returns this rank's totals."""
        world, n, task = self.world, sum(n for n, _ in batch.parts), state.task
        began = time.monotonic()
        totals = task.zeros(self.stages[-1].device)
        for stage in self.stages:
            stage.begin(state.step)
        sizes = [n for n, _ in batch.parts]
        if self.even:  # all replicas run forwards as large as those of the largest share
            sizes = forward_sizes(batch.size, world.replicas - 1, world.replicas, self.opts)

        def graded(out, k):
            n, part = batch.parts[int(k)]
            found = task.answered(out[:n], placed(part, out.device, self.opts), state)
            task.add(totals, found)
            loss = found[task.names[0]][0] / batch.size
            return state.scaler.scale(loss) if state.scaler else loss

        if sizes:
            inputs = [self._padded(task.input_of(placed(part, self.stages[0].device, self.opts), state), size)
                      for (_, part), size in zip(batch.parts, sizes, strict=True)]
            self.run(inputs, graded)
        state.own_seconds += time.monotonic() - began
        if world.replicas > 1:
            self._sum_gradients()
            state.buffers.average(world, n / batch.size)
        totals = totals.to(world.device)
        state.count(totals[1], batch.size, world.all_sum)
        return totals

    def _padded(self, x, size):
        """With samples that the loss ignores, in front of stages that all replicas run together."""
        x = torch.cat([x, x.new_zeros(size - len(x), *x.shape[1:])]) if len(x) < size else x
        channels_last = self.opts.channels_last and x.dim() == 4
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x

    @torch.no_grad()
    def _sum_gradients(self):
        """Over the ranks with the same stage; the loss is divided by the size of the whole batch."""
        bucket, size = [], 0
        parameters = [p for p in self.net.parameters() if p.requires_grad and not hasattr(p, "to_local")]
        for i, p in enumerate(parameters):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            bucket.append(p.grad)
            size += p.grad.nbytes
            following = parameters[i + 1] if i + 1 < len(parameters) else None
            if size >= BUCKET_BYTES or following is None or following.dtype != p.dtype:
                flat = self.world.sum_over_replicas(torch.cat([g.flatten() for g in bucket]))
                sums = flat.split([g.numel() for g in bucket])
                torch._foreach_copy_([g.view(-1) for g in bucket], list(sums))
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

    # ---- for a person to read ---------------------------------------------------------------------
    def describe(self, samples, optimizer):
        """The cut as lines of a table, and a warning if too few micro batches leave stages idle."""
        opts, sliced, ranks = self.opts, self.opts.virtual_ranks, self.world.stages > 1
        micro = min(opts.micro_batch_size or samples, samples)
        if sliced:
            micro = -(-opts.global_batch_size // sliced)
        count, stages = -(-samples // max(1, micro)), self.world.stages if ranks else len(set(self.devices))
        flights = count if ranks or not sliced else 1
        spent = [sum(m.seconds for m in facts) for facts in self.measures]
        copies = _copies(optimizer)
        lines = ["stage  place     layers                              parameters   time   memory (MiB)"]
        for i, group in enumerate(self.groups):
            at = f"rank {i % self.world.stages}" if self.world.stages > 1 else str(self.devices[i])
            layers = group[0].name + (f" ... {group[-1].name} ({len(group)})" if len(group) > 1 else "")
            flying = min(flights, self.parts - i) if opts.schedule != "gpipe" else flights
            kept = sum(m.kept for m in self.measures[i]) * micro * flying
            memory, own = (self.parameters_of[i] * copies * 4 + kept) / 2**20, self.parameters_of[i]
            lines.append(f"{i:5}  {at:8}  {layers:34}  {own:11,}  {spent[i] / sum(spent):5.0%}"
                         f"  {memory:13,.1f}")
        if stages > 1:
            bubble = (stages - 1) / (flights * max(1, self.parts // stages) + stages - 1)
            of = "micro batches" if not sliced else "slices" if ranks else "slices, one after the other,"
            lines.append(f"{opts.schedule}: {count} {of} of {micro} or less over {stages} places, "
                         f"idle {bubble:.0%} of the time")
            if flights < stages and not sliced:
                better = max(1, samples // (4 * stages))
                lines.append(f"warning: {flights} micro batches cannot keep {stages} places busy; "
                             f"--micro-batch-size {better}: "
                             f"idle {(stages - 1) / (-(-samples // better) + stages - 1):.0%}")
        return lines


def _copies(optimizer):
    """How many tensors of a weight's size a step needs: weight, gradient, and what the optimizer keeps."""
    return 2 + max((sum(torch.is_tensor(value) and value.shape == p.shape for value in values.values())
                    for p, values in optimizer.state.items() if p.dim()), default=0)


def orders(schedule, flights, left):
    """(forward?, micro batch) in the order of a stage that has `left` stages from itself to the end."""
    ahead = flights if schedule == "gpipe" else min(flights, left)
    for k in range(ahead):
        yield True, k
    for k in range(flights):
        yield False, k
        if ahead + k < flights:
            yield True, ahead + k


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
