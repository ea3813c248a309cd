"""A net cut into stages, with micro batches in flight: over devices of one process, or over ranks.

    one process     a thread per stage; its output moves to the next stage's device
    ranks           torch.distributed.pipelining's schedules; W ranks are W / stages pipelines side by side
"""
import json
import queue
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from common.data import Batch
from common.errors import UserError
from common.options import Options
from common.pipeline.cut import HOST, count, cut, measure, pieces, refuse_ties
from common.pipeline.slices import backward_slices
from common.pipeline.stages import Pipeline, orders
from common.pipeline.transfer import NO_NOTE, Transfer
from common.training import TrainState, distribute, find_task, fit, loss
from common.training import backward as plain_backward
from common.world import World, send

SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
             "interleaved": pipelining.ScheduleInterleaved1F1B}
LOOPS = 2                    # stages per rank or device with --schedule interleaved


def split(net: nn.Module, opts: Options, world: World, data: Any, task: Any = None) -> Pipeline:
    """The pipeline of a net: measured, cut as --balance says, each stage in its place; call on every rank."""
    if world.stages == 1 and len(world.devices) == 1 and opts.stages == 0:
        raise UserError(f"train_mp.py splits a net over two devices or more, here is one: {world.device}\n"
                        "for example --devices cuda:0,cuda:1, or torchrun --nproc_per_node=2 train_mp.py\n"
                        "on one device use train_ddp.py")
    task = task or find_task(opts)
    net = fit(net, opts, world, data, task)
    task.try_out(net, data, opts, HOST)
    found, places = pieces(net), world.devices if world.stages == 1 else range(world.stages)
    two = data.train.fetch([0, len(data.train) - 1])
    samples = task.input_of(two, SimpleNamespace(net=net, opts=opts, step=0))
    cast = partial(loss.autocast, opts, world.device)
    measures = measure(net, found, samples, world.device, cast)
    if world.size > 1:  # the times of rank 0 decide for all
        told = json.loads(send(world, json.dumps([[m.seconds, m.kept] for m in measures]).encode(), 0))
        measures = [m._replace(seconds=s, kept=k) for m, (s, k) in zip(measures, told, strict=True)]
    loops = LOOPS if opts.schedule == "interleaved" else 1
    weights = [count(net, piece) + 1 for piece in found]
    if opts.balance == "time":
        weights = [m.seconds for m in measures]
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
    if opts.shard and world.stages == 1 and len(groups) > 1:
        raise UserError(f"--shard: the {len(groups)} stages of one process are threads, "
                        "which would gather weights in any order\n"
                        "give each process one stage: without --devices, and with --schedule gpipe or 1f1b")
    by_name = {piece.name: m for piece, m in zip(found, measures, strict=True)}
    kind = Local if world.stages == 1 else Ranks
    measured = [[by_name[piece.name] for piece in group] for group in groups]
    model = kind(net, groups, measured, opts, world, device_of)
    if opts.shard:
        shard(model)
    if opts.virtual_ranks:
        model.tree = distribute(net, opts, world).tree
    return model


def shard(model):
    """FSDP over the replicas of each stage: a rank keeps some rows, and gathers a module to run it."""
    mesh = DeviceMesh.from_group(model.world.peers or dist.group.WORLD, model.world.device.type)
    for prefix in [prefix for stage in model.stages for piece in stage.group for prefix in piece.owns]:
        try:
            part = model.net.get_submodule(prefix)
        except AttributeError:
            continue  # a weight outside of modules: every replica keeps it whole
        if next(part.parameters(), None) is not None:
            fully_shard(part, mesh=mesh, reshard_after_forward=True)  # a root would stay whole
            part.set_gradient_divide_factor(1.0)  # the loss is divided by the size of the whole batch
            part.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also multiplies


class Local(Pipeline):
    """Stages over the devices of this process: a thread each, so that all work at once."""

    def __init__(self, *args):
        super().__init__(*args)
        cpus = max(1, sum(d.type == "cpu" for d in self.devices))
        each = max(1, torch.get_num_threads() // cpus)
        self.pool = ThreadPoolExecutor(self.parts, "stage", torch.set_num_threads, (each,))

    def owns(self, index):
        return True

    def forward(self, x):
        before = self.stages[0]
        for stage in self.stages:
            if self.opts.virtual_ranks and stage.device != before.device:  # draw as one generator would
                stage.generator.set_state(before.generator.get_state())
            x, before = stage(x.to(stage.device)), stage
        return x.to(self.world.device)

    def run(self, xs, loss):
        forward, backward = ([queue.SimpleQueue() for _ in self.stages] for _ in range(2))
        work = [self.pool.submit(self._work, stage, xs, loss, forward, backward) for stage in self.stages]
        errors = [error for error in (w.exception() for w in work) if error]
        for error in sorted(errors, key=lambda error: isinstance(error, _Elsewhere)):
            raise error  # the cause, rather than an _Elsewhere of another thread

    def _work(self, stage, xs, loss, forward, backward):
        i, last, in_flight = stage.index, stage.index == self.parts - 1, {}
        try:
            for ahead, k in orders(self.opts.schedule, len(xs), self.parts - i):
                if ahead:
                    x = (_take(forward[i]) if i else xs[k]).to(stage.device, non_blocking=True)
                    x = x.detach().requires_grad_(i > 0)
                    y = stage(x)
                    in_flight[k] = x, loss(y, k) if last else y
                    if not last:
                        forward[i + 1].put(y.detach())
                else:
                    x, y = in_flight.pop(k)
                    gradient = None if last else _take(backward[i]).to(stage.device, non_blocking=True)
                    stage.backward(y, gradient)
                    if i:
                        backward[i - 1].put(x.grad)
        except BaseException:
            for queued in (*forward, *backward):
                queued.put(_Elsewhere())
            raise


class _Elsewhere(Exception):
    """Another stage's thread has failed."""


def _take(queued):
    if isinstance(item := queued.get(), Exception):
        raise item
    return item


class Ranks(Pipeline):
    """Stages over ranks, moved by torch's schedules; a rank has one stage or, interleaved, LOOPS."""

    def __init__(self, net, groups, measures, opts, world, device_of):
        super().__init__(net, groups, measures, opts, world, device_of)
        self.schedules, self.transfer = {}, Transfer(world)
        self.edges = [(facts[-1].shape, facts[-1].dtype) for facts in measures]

    def owns(self, index):
        return index % self.world.stages == self.world.stage

    def forward(self, x):
        """The net's output on the rank that has the last stage, None on the others."""
        self.transfer.drain()
        n = len(x)
        for stage in self.stages:
            if stage.index:
                x, _ = self.transfer.exchange(take=self.edge(stage.index - 1, n, stage.index - 1))
            y = stage(x)
            if stage.index == self.parts - 1:
                return y
            self.transfer.exchange(give=(y, (stage.index + 1) % self.world.stages, NO_NOTE))
        return None

    def edge(self, index, n, source, note=0):
        """What to receive from stage `source` at the end of stage `index`: activations or their gradient."""
        shape, dtype = self.edges[index]
        return (n, *shape), dtype, source % self.world.stages, note

    def run(self, xs, loss):
        """Forward and backward of all micro batches.

        torch's schedules split `target` like the inputs, so each of its rows is the number of a micro batch,
        by which `loss` finds the samples. `holder` hands this batch's `loss` to a schedule made earlier.
        """
        at = 0
        for kind, flights, size in plan(self.opts.schedule, [len(x) for x in xs], self.world.stages):
            schedule, holder = self._schedule(kind, flights, size, xs[0])
            holder["loss"] = loss
            first, last = self.stages[0].index == 0, self.stages[-1].index == self.parts - 1
            inputs = (torch.cat([x.to(self.world.device) for x in xs[at:at + flights]]),) if first else ()
            numbers = torch.arange(at, at + flights, device=self.world.device).repeat_interleave(size)
            schedule.step(*inputs, target=numbers if last else None, **({"losses": []} if last else {}))
            at += flights

    def _schedule(self, kind, flights, size, x):
        """torch's schedule for `flights` micro batches of one size, made once."""
        key = kind, flights, size
        if key not in self.schedules:
            holder, stages = {}, []
            for stage in self.stages:
                x = x.new_empty(size, *x.shape[1:], device="meta")
                before = self._hollow(stage.index - 1, size) if stage.index else x
                stages.append(pipelining.PipelineStage(
                    stage, stage.index, self.parts, stage.device, input_args=(before,),
                    output_args=(self._hollow(stage.index, size),), group=self.world.stage_group))
            self.schedules[key] = SCHEDULES[kind](
                stages if kind == "interleaved" else stages[0], flights, scale_grads=False,
                loss_fn=lambda out, k: holder["loss"](out, k[0])), holder
        return self.schedules[key]

    def _hollow(self, index, size):
        """The output of stage `index`, without memory."""
        shape, dtype = self.edges[index]
        return torch.empty(size, *shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def plan(schedule, sizes, stages):
    """[(schedule, micro batches, size of each)]: the runs of torch's schedules that make one batch."""
    runs, whole = [], sum(size == sizes[0] for size in sizes)
    groups = [(whole, sizes[0]), *((1, size) for size in sizes[whole:])]
    for flights, size in groups:
        if schedule == "interleaved" and flights > stages and flights % stages:
            runs.append((schedule, flights - flights % stages, size))
            flights %= stages
        runs.append(("gpipe" if schedule == "1f1b" and flights < stages else schedule, flights, size))
    return runs


def backward(model: Pipeline, batch: Batch, state: TrainState, world: World) -> Tensor:
    """`backward` of common.training for a pipeline: one gradient of one global batch, on every rank."""
    if state.opts.virtual_ranks and world.stages > 1:
        return backward_slices(model, batch, state)
    if state.opts.virtual_ranks:
        # the whole pipeline is in this process: its slices run one after the other, as those of any net
        return plain_backward(SimpleNamespace(net=model, tree=model.tree), batch, state, world)
    return model.backward(batch, state)
