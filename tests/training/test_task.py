"""Tasks of one's own: exact means, the same bits at any world; what cannot be is refused at the start."""
from functools import partial

import pytest
import tasks
import torch
from jobs import TESTS
from ranks import fork_ranks

from common.data import batches, load_data
from common.models import build_model
from common.options import Options
from common.pipeline import backward as staged
from common.pipeline import split
from common.sampler import ElasticSampler
from common.training import (
    TrainState,
    backward,
    build_optimizer,
    distribute,
    evaluate,
    find_task,
    prepare,
    replicate,
)
from common.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, 0, (CPU,), "life", 0)


def options(name, **more):
    names = {"task": name, "model": f"{name}_net", "dataset": f"{name}_data"}
    spelled = {kind: f"{TESTS}/tasks.py:{value}" for kind, value in names.items()}
    few = {"workers": 0, "device": "cpu", "log_every": 1, "global_batch_size": 11}
    return Options(**spelled | few | more)


class Life:
    """What a script makes of its options, and its steps."""

    def __init__(self, opts, world=ALONE, double=False, devices=1):
        self.opts, self.data, self.task = opts, load_data(opts, world), find_task(opts)
        world = World(**(vars(world) | {"devices": (CPU,) * devices})).in_stages(opts.stages or 1)
        self.world = world
        net = build_model(opts, self.data)
        if double:
            net, fetch = net.double(), type(self.data.train).fetch
            for part in (self.data.train, self.data.test):
                part.fetch = lambda *a, part=part: doubled(fetch(part, *a))
        if opts.script == "mp":
            self.run, self.model = staged, split(net, opts, world, self.data, self.task)
            net = self.model.net
        else:
            self.run, net = backward, prepare(net, opts, world, self.data, self.task)
            self.model = (replicate if opts.script == "dp" else distribute)(net, opts, world)
        norm = (self.model.norm, world.all_sum) if opts.script == "mp" else ()
        n = len(self.data.train)
        self.state = TrainState(net, build_optimizer(net, opts), opts, n, *norm, task=self.task)
        self.order = ElasticSampler(n, opts.global_batch_size, world.replica, world.replicas, opts.seed,
                                    slices=opts.virtual_ranks)

    def step(self, batch):
        totals = self.world.all_sum(self.run(self.model, batch, self.state, self.world))
        self.state.update(batch.size)
        return self.state.note(totals)

    def epoch(self, most=99):
        self.state.net.train()
        found = batches(self.data.train, self.order, self.opts)
        return [self.step(batch) for batch, _ in zip(found, range(most), strict=False)]

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.state.net.state_dict().items()}

    def evaluation(self):
        model = self.model if self.opts.script != "ddp" else self.state.net
        return evaluate(model, self.data.test, self.state, self.world)


def doubled(tree):
    from common.data import map_tensors
    return map_tensors(lambda x: x.double() if x.is_floating_point() else x, tree)


def sgd(name, **more):
    """Plain descent at rate 1: the weights move by the gradient."""
    return options(name, optimizer="sgd", lr=1.0, momentum=0.0, **more)


def one_step(world, name, size, double=True, **more):
    life = Life(sgd(name, global_batch_size=size, **more), world, double)
    for module in life.state.net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    record = life.epoch(1)[0]
    return life.weights(), {key: record[key] for key in record if key not in ("step", "epoch", "lr")}


def full_batch(name, size):
    """The weights after one step by hand: the whole batch in one forward, its sum divided by its count."""
    opts = sgd(name, global_batch_size=size)
    data = load_data(opts, ALONE)
    net = build_model(opts, data).double()
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    ids = next(iter(ElasticSampler(len(data.train), size, seed=opts.seed)))
    found = getattr(tasks, name)(net, doubled(data.train.fetch(ids)))
    loss, count = found["loss"]
    (loss / count).backward()
    moved = {n: p.detach() - (p.grad if p.grad is not None else 0) for n, p in net.named_parameters()}
    return moved, (loss / count).item()


@pytest.mark.parametrize("name", tasks.NAMES)
def test_every_job_has_the_mean_of_the_full_batch_at_any_world_and_micro_batch(name):
    wanted, loss = full_batch(name, 11)
    for world, micro in ((1, 0), (1, 3), (2, 2), (3, 0), (5, 1)):
        for weights, record in fork_ranks(world, partial(one_step, micro_batch_size=micro), name, 11):
            assert record["loss"] == pytest.approx(loss, rel=1e-12), (world, micro)
            for key, tensor in wanted.items():
                torch.testing.assert_close(weights[key], tensor, rtol=0, atol=1e-12)
