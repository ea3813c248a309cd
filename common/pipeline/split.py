"""A net cut into stages, with micro batches in flight: over the devices of one process, or over the ranks of
torchrun.

    one process     a thread a stage; what one hands the next is a tensor moved to the next one's device
    ranks           torch.distributed.pipelining's schedules; a world of W ranks is W / stages pipelines side by side
"""
import json
import queue
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from common.errors import UserError
from common.pipeline.cut import count, cut, measure, pieces, refuse_ties
from common.pipeline.slices import backward_slices
from common.pipeline.stages import Pipeline, orders
from common.pipeline.transfer import NOTHING, Transfer
from common.training import backward as plain_backward
from common.training import distribute, fit, loss
from common.world import send

SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
             "interleaved": pipelining.ScheduleInterleaved1F1B}
LOOPS = 2                    # stages a rank or device has in turn, where they are interleaved


def split(net, opts, world, data):
    """The pipeline of a net, on every rank: measured, cut as --balance says, each part on its place."""
    if world.stages == 1 and len(world.devices) == 1 and opts.stages == 0:
        raise UserError(f"train_mp.py splits a net over two devices or more, here is one: {world.device}\n"
                        "for example --devices cuda:0,cuda:1, or torchrun --nproc_per_node=2 train_mp.py\n"
                        "on one device use train_ddp.py")
    net = fit(net, opts, world, data)
    found, places = pieces(net), world.devices if world.stages == 1 else range(world.stages)
    samples = data.train.fetch([0, len(data.train) - 1])[0]
    cast = partial(loss.autocast, opts, world.device)
    measures = measure(net, found, samples, world.device, cast)
    told = send(world, json.dumps([[m.seconds, m.kept] for m in measures]).encode(), 0) if world.size > 1 else None
    if told:  # one rank's clock decides for all
        measures = [m._replace(seconds=s, kept=k) for m, (s, k) in zip(measures, json.loads(told), strict=True)]
    loops = LOOPS if opts.schedule == "interleaved" else 1
    weights = [m.seconds for m in measures] if opts.balance == "time" else [count(net, piece) + 1 for piece in found]
    placement = getattr(net, "placement", ()) if opts.balance == "parameters" and loops == 1 and world.stages == 1 else ()
    if len(places) == 2 and len(placement) == len(found):
        starts = [i for i, at in enumerate(placement) if i == 0 or at != placement[i - 1]]
        groups = [found[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
        device_of = [world.devices[placement[i]] for i in starts]
    else:
        groups = cut(found, weights, loops * len(places), opts.balance)
        device_of = [world.devices[i % len(places)] if world.stages == 1 else world.device for i in range(len(groups))]
    refuse_ties(net, groups)
    if opts.shard and world.stages == 1 and len(groups) > 1:
        raise UserError(f"--shard: the {len(groups)} stages of one process are threads, which would gather weights in any order\n"
                        "give each process one stage: without --devices, and with --schedule gpipe or 1f1b")
    by_name = {piece.name: m for piece, m in zip(found, measures, strict=True)}
    kind = Local if world.stages == 1 else Ranks
    model = kind(net, groups, [[by_name[piece.name] for piece in group] for group in groups], opts, world, device_of)
    if opts.shard:
        shard(model)
    if opts.virtual_ranks:
        model.tree = distribute(net, opts, world).tree
    return model


def shard(model):
    """FSDP over the replicas of each stage: a rank keeps some rows of each weight, and gathers a module's
    while it runs.
    """
    mesh = DeviceMesh.from_group(model.world.peers or dist.group.WORLD, model.world.device.type)
    for prefix in [prefix for stage in model.stages for piece in stage.group for prefix in piece.owns]:
        try:
            part = model.net.get_submodule(prefix)
        except AttributeError:
            continue  # a weight in no module that is called: every replica has it
        if next(part.parameters(), None) is not None:
            # a root, as each is, would stay whole until backward
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
            part.set_gradient_divide_factor(1.0)  # each share is divided by the whole batch already
            part.set_force_sum_reduction_for_comms(True)  # gloo has no sum that also multiplies


class Local(Pipeline):
    """Stages over the devices of this process: a thread each, so that all of them work at once."""

    def __init__(self, *args):
        super().__init__(*args)
        cpus = max(1, sum(d.type == "cpu" for d in self.devices))
        each = max(1, torch.get_num_threads() // cpus)
        self.pool = ThreadPoolExecutor(self.parts, "stage", initializer=torch.set_num_threads, initargs=(each,))

    def owns(self, index):
        return True

    def forward(self, x):
        before = self.stages[0]
        for stage in self.stages:
            if self.opts.virtual_ranks and stage.device != before.device:  # as one generator would go on
                stage.generator.set_state(before.generator.get_state())
            x, before = stage(x.to(stage.device)), stage
        return x.to(self.world.device)

    def run(self, xs, loss):
        forward, backward = ([queue.SimpleQueue() for _ in self.stages] for _ in range(2))
        work = [self.pool.submit(self._work, stage, xs, loss, forward, backward) for stage in self.stages]
        errors = [error for error in (w.exception() for w in work) if error]
        for error in sorted(errors, key=lambda error: isinstance(error, _Elsewhere)):
            raise error  # the first cause, not its echo in the other threads

    def _work(self, stage, xs, loss, forward, backward):
        i, last, held = stage.index, stage.index == self.parts - 1, {}
        try:
            for ahead, k in orders(self.opts.schedule, len(xs), self.parts - i):
                if ahead:
                    x = (_take(forward[i]) if i else xs[k]).to(stage.device, non_blocking=True)
                    x = x.detach().requires_grad_(i > 0)
                    y = stage(x)
                    held[k] = x, loss(y, k) if last else y
                    if not last:
                        forward[i + 1].put(y.detach())
                else:
                    x, y = held.pop(k)
                    stage.backward(y, None if last else _take(backward[i]).to(stage.device, non_blocking=True))
                    if i:
                        backward[i - 1].put(x.grad)
        except BaseException:
            for line in (*forward, *backward):
                line.put(_Elsewhere())
            raise


class _Elsewhere(Exception):
    """Another stage's thread has failed."""


def _take(line):
    if isinstance(item := line.get(), Exception):
        raise item
    return item


class Ranks(Pipeline):
    """Stages over ranks: torch's schedules move the micro batches, each rank has one stage or, interleaved,
    several.
    """

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
            self.transfer.exchange(give=(y, (stage.index + 1) % self.world.stages, NOTHING))
        return None

    def edge(self, index, n, source, note=0):
        """What comes from the stage `source` where stage `index` ends: activations of n samples, or their
        gradient.
        """
        shape, dtype = self.edges[index]
        return (n, *shape), dtype, source % self.world.stages, note

    def run(self, xs, loss):
        at = 0
        for kind, flights, size in plan(self.opts.schedule, [len(x) for x in xs], self.world.stages):
            schedule, holder = self._schedule(kind, flights, size, xs[0])
            holder["loss"] = loss
            first, last = self.stages[0].index == 0, self.stages[-1].index == self.parts - 1
            inputs = (torch.cat([x.to(self.world.device) for x in xs[at:at + flights]]),) if first else ()
            target = torch.arange(at, at + flights, device=self.world.device).repeat_interleave(size) if last else None
            schedule.step(*inputs, target=target, **({"losses": []} if last else {}))
            at += flights

    def _schedule(self, kind, flights, size, x):
        """torch's schedule for so many micro batches of one size: another one for the rest of a share."""
        key = kind, flights, size
        if key not in self.schedules:
            holder, stages = {}, []
            for stage in self.stages:
                x = x.new_empty(size, *x.shape[1:], device="meta")
                before, after = ([torch.empty(size, *shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
                                  for shape, dtype in self.edges[at:at + 1]] for at in (stage.index - 1, stage.index))
                stages.append(pipelining.PipelineStage(
                    stage, stage.index, self.parts, stage.device, input_args=tuple(before) if stage.index else (x,),
                    output_args=tuple(after), group=self.world.stage_group))
            self.schedules[key] = SCHEDULES[kind](
                stages if kind == "interleaved" else stages[0], flights, scale_grads=False,
                loss_fn=lambda out, k: holder["loss"](out, k[0])), holder
        return self.schedules[key]


def plan(schedule, sizes, stages):
    """[(schedule, micro batches, size of each)]: what torch's schedules can do in one go each, in order."""
    runs, whole = [], sum(size == sizes[0] for size in sizes)
    groups = [(whole, sizes[0]), *((1, size) for size in sizes[whole:])]
    for flights, size in groups:
        if schedule == "interleaved" and flights > stages and flights % stages:
            runs.append((schedule, flights - flights % stages, size))
            flights %= stages
        runs.append(("gpipe" if schedule == "1f1b" and flights < stages else schedule, flights, size))
    return runs


def backward(model, batch, state, world):
    """One gradient of one global batch, as reduce.backward for the other scripts."""
    if state.opts.virtual_ranks and world.stages > 1:
        return backward_slices(model, batch, state)
    if state.opts.virtual_ranks:
        return plain_backward(SimpleNamespace(net=model, tree=model.tree), batch, state, world)
    return model.backward(batch, state)
