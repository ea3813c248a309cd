"""A net in stages computes what the whole one does: any cut, any schedule, over ranks or local devices,
ragged shares included.
"""
import random
import signal
from functools import cache, partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from fakes import Stream, fake_gpus
from jobs import PACED, TESTS, audit, last_loss, lives, reached, wait_for, weights
from ranks import fork_ranks
from samples import share_of

from common.data import batches
from common.models import build_model
from common.options import Options
from common.pipeline import backward, split, stages
from common.pipeline.cut import pieces
from common.pipeline.stages import Pipeline
from common.pipeline.transfer import NO_NOTE, Devices
from common.sampler import ElasticSampler
from common.training import TrainState, build_optimizer, distribute, evaluate, find_task
from common.training import backward as plain
from common.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, 0, (CPU,), "life", 0)
N = 22  # samples: 2 global batches of 10, and one of 2


class Samples:
    """Drawn once, in memory, in the floating-point type of the test."""

    in_memory = True

    def __init__(self, x, y):
        self.x, self.y, self.shape, self.tokens = x, y, tuple(x.shape[1:]), y.shape[1:].numel()

    def __len__(self):
        return len(self.y)

    def fetch(self, ids, epoch=0, augment=False):
        return self.x[list(ids)], self.y[list(ids)]


def facts(model, dtype):
    draws = torch.Generator().manual_seed(5)
    if model.startswith("gpt"):
        tokens = torch.randint(0, 16, (N, 9), generator=draws)
        x, y, classes, vocab = tokens[:, :-1], tokens[:, 1:], 16, 16
    else:
        shape = {"mlp": (10,), "net": (1, 16, 16)}.get(model.split(":")[-1], (3, 32, 32))
        x, y, classes, vocab = (torch.rand(N, *shape, generator=draws).to(dtype),
                               torch.randint(0, 5, (N,), generator=draws), 5, None)
    return SimpleNamespace(name="drawn", train=Samples(x, y), test=Samples(x, y), classes=classes,
                           sample_shape=tuple(x.shape[1:]),
                           vocab=vocab)


def train(world, model, dtype, stages=0, devices=1, n=N, drop=0.0, **more):
    """{"loss": of each step, "weights": afterwards (of this rank), "metrics"} of one epoch."""
    opts = Options(script="mp", model=model, global_batch_size=10, optimizer="sgd", stages=stages, **more)
    if stages or devices > 1:
        world = World(**(vars(world) | {"devices": (CPU,) * devices})).in_stages(stages or 1)
    data = facts(model, dtype)
    data.train = Samples(data.train.x[:n], data.train.y[:n])
    net = build_model(opts, data).to(dtype)
    for module in net.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = drop  # whoever cuts a net differently draws differently
    run, made = plain, distribute(net, opts, world)
    if stages or devices > 1:
        made, run = split(net, opts, world, data, find_task(opts)), backward
        net = made.net
    state = TrainState(net, build_optimizer(net, opts), opts, N)
    if run is backward:
        state.norm = made.norm
    order, losses = ElasticSampler(n, 10, world.replica, world.replicas), []
    net.train()
    for batch in batches(data.train, order, opts):
        totals = world.all_sum(run(made, batch, state, world))
        state.update(batch.size)
        losses.append(totals.tolist()[0] / batch.size)
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in net.state_dict().items()}
    return {"loss": losses, "weights": {n: t.clone() for n, t in whole.items()},
            "metrics": evaluate(made, data.test, state, world)}


@cache
def one_device(model, dtype, **more):
    """What one process makes of it, once for all cuts and schedules."""
    return train(ALONE, model, dtype, **more)


def assert_same(ours, theirs, tolerance):
    """`ours` is every rank's result; together they have all the weights there are."""
    for one in ours:
        assert one["loss"] == pytest.approx(theirs["loss"], abs=tolerance)
        assert one["metrics"]["val_loss"] == pytest.approx(theirs["metrics"]["val_loss"],
                                                           abs=max(tolerance, 1e-7))
        assert one["metrics"]["val_acc"] == theirs["metrics"]["val_acc"]
        for name, tensor in one["weights"].items():
            assert (tensor.double() - theirs["weights"][name].double()).abs().max() < 100 * tolerance, name
    assert set().union(*(one["weights"] for one in ours)) == set(theirs["weights"])


GRID = [(model, dtype, stages, schedule, micro)
        for model, places in (("mlp", 2), ("net", 4), ("gpt:6x2x8", 8), ("resnet18", 10))
        for stages in (1, 2, 3, 4) for schedule in ("gpipe", "1f1b", "interleaved")
        for dtype, micro in ((torch.float64, 2),)
        if stages * (2 if schedule == "interleaved" else 1) <= places
        and (model != "resnet18" or stages in (2, 3))]
GRID += [(model, torch.float32, 2, "1f1b", 3) for model in ("mlp", "net", "gpt:6x2x8")]


@pytest.mark.parametrize(("model", "dtype", "stages", "schedule", "micro"), GRID)
def test_stages_over_ranks_have_the_loss_of_one_device(model, dtype, stages, schedule, micro):
    ours = fork_ranks(stages, partial(train, model=model, dtype=dtype, stages=stages, schedule=schedule,
                                      micro_batch_size=micro))
    assert_same(ours, one_device(model, dtype, micro_batch_size=micro),
                1e-10 if dtype == torch.float64 else 1e-5)


WHOLE = [(model, dtype, stages, schedule, shard)
         for model,
         places in (("mlp", 2), ("net", 4), ("gpt:6x2x8", 8), ("resnet18", 10)) for stages in (1, 2, 3, 4)
         for schedule in ("gpipe", "1f1b", "interleaved") for shard in (False, True)
         for dtype in (torch.float64, torch.float32)
         if stages * (2 if schedule == "interleaved" else 1) <= places]


@pytest.mark.long
@pytest.mark.parametrize(("model", "dtype", "stages", "schedule", "shard"), WHOLE)
def test_every_cut_schedule_and_sharding_has_the_loss_of_one_device(model, dtype, stages, schedule, shard):
    """With BatchNorm, two replicas have the loss of two replicas: each normalizes what it sees.

    And it magnifies rounding: one weight of a float32 ResNet moved by its last bit moves the second step's
    loss by 0.04.
    """
    normed = model == "resnet18"  # BatchNorm refuses a sample alone: micro batches of 3 and 2
    steps = 1 if dtype == torch.float32 and shard else 2
    more = dict(model=model, dtype=dtype, micro_batch_size=3 if normed and shard else 2,
                n=10 * steps if normed else N)
    ours = fork_ranks(stages * (1 + shard),
                      partial(train, stages=stages, schedule=schedule, shard=shard, **more))
    theirs = fork_ranks(2, partial(train, **more))[0] if shard and normed else one_device(**more)
    assert_same(ours, theirs, 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_in_stages_is_the_same_in_one_process_and_in_ranks(recompute):
    more = dict(model="net", dtype=torch.float32, micro_batch_size=2, drop=0.5, recompute=recompute)
    ranks = fork_ranks(4, partial(train, stages=4, **more))[0]["loss"]
    first, again = (train(ALONE, devices=4, **more)["loss"] for _ in range(2))
    assert first == again == pytest.approx(ranks, abs=1e-6)
    assert first != train(ALONE, devices=4, **(more | {"drop": 0.0}))["loss"]


class Drawing(torch.nn.Module):
    """Draws many times, and remembers for each micro batch every mask it drew."""

    def __init__(self):
        super().__init__()
        self.layer, self.masks = torch.nn.Linear(16, 16), {}

    def forward(self, x):
        mask = torch.cat([torch.nn.functional.dropout(torch.ones(8), 0.5) for _ in range(60)])
        self.masks.setdefault(hash(x.detach().numpy().tobytes()), []).append(mask)
        return self.layer(x) * mask.mean()


def test_compiled_stages_may_recompute_and_count_running_statistics_once(monkeypatch):
    compiled = partial(torch.compile, backend="aot_eager")  # inductor takes minutes
    monkeypatch.setattr(torch, "compile", compiled)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    stage = stages.Stage(net, 0, pieces(net), CPU, Options(script="mp", compile=True, recompute=True))
    stage(torch.rand(3, 4, requires_grad=True)).sum().backward()
    assert net[1].num_batches_tracked == 1 and net[0].weight.grad is not None


def test_recomputation_draws_what_the_forward_drew_with_other_micro_batches_in_between():
    opts = Options(script="mp", recompute=True, micro_batch_size=2, global_batch_size=32, optimizer="sgd")
    world = World(**(vars(ALONE) | {"devices": (CPU, CPU)}))
    drawing = Drawing()
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Sequential(drawing, torch.nn.Linear(16, 4)))
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    model = split(net, opts, world, SimpleNamespace(train=Samples(x, y)), find_task(opts))
    drawing.masks.clear()  # those of the measurement
    backward(model, share_of(x, y, opts), TrainState(net, build_optimizer(net, opts), opts, 32), world)
    assert [len(masks) for masks in drawing.masks.values()] == [2] * 16
    assert all(torch.equal(*masks) for masks in drawing.masks.values())


class Shaky(torch.nn.Linear):
    """Draws from Python's and numpy's generators."""

    def forward(self, x):
        return super().forward(x) * random.random() * numpy.random.rand()


def test_a_stage_that_draws_from_python_or_numpy_draws_the_same_after_a_restart():
    opts, found = Options(script="mp", micro_batch_size=2, global_batch_size=8, optimizer="sgd"), []
    world = World(**(vars(ALONE) | {"devices": (CPU, CPU)}))
    x, y = torch.randn(8, 4), torch.randint(0, 4, (8,))
    for life in range(2):
        torch.manual_seed(0)
        net = torch.nn.Sequential(Shaky(4, 4), Shaky(4, 4))
        model = split(net, opts, world, SimpleNamespace(train=Samples(x, y)), find_task(opts))
        random.seed(life)
        numpy.random.seed(life)
        backward(model, share_of(x, y, opts), TrainState(net, build_optimizer(net, opts), opts, 8), world)
        found.append(net[0].weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_frozen_stage_tells_of_its_gradient_lies_on_its_device_and_not_on_the_cpu(sharded):
    """On GPUs two groups sum what lies on CPUs and on GPUs: each rank would wait in another one."""
    device, told = torch.device("meta"), []

    def tell(tensor):
        told.append(tensor)
        return tensor

    world = SimpleNamespace(device=device, stages=2, sum_over_stages=tell, sum_over_replicas=tell)
    Pipeline.norm(SimpleNamespace(opts=Options(clip_grad_norm=1.0), world=world, even=sharded), [])
    assert [t.device for t in told] == [device] * (1 + sharded)


@pytest.mark.parametrize(("model", "devices", "schedule"), [
    (model, devices, schedule) for model,
    places in (("mlp", 2), ("net", 4), ("gpt:6x2x8", 8)) for devices in (2, 4)
    for schedule in ("gpipe", "1f1b", "interleaved")
    if devices * (2 if schedule == "interleaved" else 1) <= places])
def test_stages_over_the_devices_of_one_process_have_the_loss_of_one_device(model, devices, schedule):
    ours = train(ALONE, model, torch.float64, devices=devices, schedule=schedule, micro_batch_size=2)
    assert_same([ours], one_device(model, torch.float64, micro_batch_size=2), 1e-10)


@pytest.mark.parametrize(("model", "size", "stages"),
                         [("net", 4, 2), ("gpt:4x2x8", 6, 2), ("gpt:4x2x8", 6, 3), ("mlp", 8, 2),
                                                       ("net", 3, 1)])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_pipelines_side_by_side_have_the_gradient_of_one_device_with_ragged_and_empty_shares(
        model, size, stages, schedule):
    if stages == 1 or model == "mlp":
        schedule = "gpipe"
    more = dict(micro_batch_size=2, clip_grad_norm=0.1, momentum=0.9)
    ours = fork_ranks(size, partial(train, model=model, dtype=torch.float64, stages=stages, schedule=schedule,
                                    **more))
    assert_same(ours, one_device(model, torch.float64, **more), 1e-10)


@pytest.mark.parametrize(("model", "size", "stages", "schedule", "dtype"), [
    ("net", 2, 1, "1f1b", torch.float64), ("gpt:4x2x8", 4, 2, "1f1b", torch.float64),
    ("mlp", 4, 2, "gpipe", torch.float64),
    ("gpt:4x2x8", 6, 2, "interleaved", torch.float64), ("net", 3, 1, "gpipe", torch.float32)])
@pytest.mark.parametrize("recompute", [False, True])
def test_sharded_weights_have_the_gradient_of_one_device(model, size, stages, schedule, dtype, recompute):
    more = dict(micro_batch_size=2, clip_grad_norm=0.1, momentum=0.9)
    ours = fork_ranks(size,
                      partial(train, model=model, dtype=dtype, stages=stages, schedule=schedule, shard=True,
                                    recompute=recompute, **more))
    assert_same(ours, one_device(model, dtype, **more), 1e-10 if dtype == torch.float64 else 1e-5)


def test_a_copy_between_gpus_waits_for_the_work_before_it_and_only_its_consumer_waits_for_the_copy():
    one, two = torch.device("cpu", 0), torch.device("cpu", 1)
    with fake_gpus(one, two) as working:
        transfer, key = Devices([one, two]), (1, 0, True)
        transfer.streams = {device: Stream(device) for device in (one, two)}
        working[one].submit(made := [].clear)  # the output that is to be copied
        came = transfer.move([(key, torch.ones(3), NO_NOTE)], [])[key]
        assert len(transfer.streams[one].work) == 1, "the copy waits for the output"
        assert working[one].work == [made] and working[two].work == [], "no stage waits for it yet"
        assert came()[0].tolist() == [1.0] * 3
        assert len(working[two].work) == 1 and working[one].work == [made], "its consumer waits for the copy"


def test_all_samples_are_on_their_way_before_the_first_micro_batch_begins(monkeypatch):
    done, run, placed = [], Pipeline.run, stages.placed
    monkeypatch.setattr(stages, "placed", lambda *given: (done.append("placed"), placed(*given))[1])
    monkeypatch.setattr(Pipeline, "run", lambda *given: (done.append("run"), run(*given))[1])
    train(ALONE, "mlp", torch.float32, devices=2, micro_batch_size=5, n=10)
    assert done[:5] == ["placed"] * 4 + ["run"] and "placed" not in done[5:], "two parts, at both ends"


def test_running_statistics_in_stages_are_those_of_as_many_replicas():
    more = dict(model="resnet18", dtype=torch.float64, micro_batch_size=3, n=20)
    assert_same(fork_ranks(4, partial(train, stages=2, recompute=True, **more)),
                fork_ranks(2, partial(train, **more))[0], 1e-10)


# ---- elastic: the same checkpoint whatever the cut ------------------------------------------------
DEEP = (*PACED, f"--model={TESTS}/paced.py:deep", "--micro-batch-size=4")


def mp(jobs, nproc, run, *flags, **kwargs):
    return jobs.torchrun(nproc, "train_mp.py", *DEEP, f"--run-dir={run}", *flags, **kwargs)


@pytest.fixture(scope="module")
def alone(warm, tmp_path_factory):
    """The run of one process that nobody disturbed."""
    run = tmp_path_factory.mktemp("alone") / "run"
    job = warm.python("train_ddp.py", *DEEP, f"--run-dir={run}", PACE="0")
    assert job.wait() == 0, job.output
    return run


def assert_ends_like(run, alone):
    counts = audit(run)
    assert counts["missed"] == counts["repeated"] == 0
    assert abs(last_loss(run) - last_loss(alone)) < 1e-9
    ours, theirs = weights(run), weights(alone)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-9 for name in ours)


def test_a_sharded_run_stops_and_goes_on_under_train_ddp_and_one_of_train_ddp_is_sharded(jobs, tmp_path,
                                                                                         alone):
    run = tmp_path / "run"
    job = jobs.torchrun(2, "train_ddp.py", *DEEP, f"--run-dir={run}")
    wait_for(run, 3, job=job)
    job.kill(signal.SIGTERM)
    job.wait()
    job = mp(jobs, 4, run, "--stages=2", "--shard", "--recompute", "--save-every=2")
    wait_for(run, 8, 1, job)
    job.kill(signal.SIGTERM)
    job.wait()
    stopped = reached(run)
    job = jobs.python("train_ddp.py", *DEEP, f"--run-dir={run}", PACE="0")
    assert job.wait() == 0, job.output
    assert lives(run)[2]["step"] == stopped
    assert_ends_like(run, alone)


def test_a_run_goes_on_with_4_then_2_then_3_stages_and_kills_in_between(jobs, tmp_path, alone):
    run = tmp_path / "run"
    job = mp(jobs, 4, run, "--save-every=2")
    # no replica of this stage is left: the periodic save stands
    jobs.kill(wait_for(run, 5, job=job)["pids"][1])
    wait_for(run, 7, 1, job)
    job.kill(signal.SIGTERM)  # all are asked to stop: each stage writes its part
    assert job.wait() != 0
    stopped = reached(run)
    job = mp(jobs, 4, run, "--stages=2")
    life = wait_for(run, stopped + 2, 2, job)
    assert life["step"] == stopped
    jobs.kill(life["pids"][3])  # stage 1 lives on in rank 1: the survivors' rescue is whole
    wait_for(run, stopped + 4, 3, job)
    job.kill(signal.SIGTERM)
    job.wait()
    assert audit(run)["lost"] <= 5  # two steps of the interval, one save under way, and see below
    assert lives(run)[3]["step"] >= life["step"] + 1  # or the step it died in, if one stage had made it
    job = mp(jobs, 3, run, "--schedule=gpipe")
    assert job.wait() == 0, job.output
    assert_ends_like(run, alone)
