"""A net in stages computes what the whole one does: any cut, over ranks or devices, ragged shares too."""
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from jobs import PACED, TESTS, audit, last_loss, lives, reached, wait_for, weights
from ranks import fork_ranks
from samples import Samples, share_of
from torch import nn

from common.data import batches
from common.errors import UserError
from common.models import build_model
from common.options import Options
from common.pipeline import backward, split
from common.pipeline.split import pieces
from common.pipeline.stages import Pipeline, Stage
from common.sampler import ElasticSampler
from common.training import TrainState, build_optimizer, distribute, evaluate, find_task
from common.training import backward as plain
from common.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, 0, (CPU,), "life", 0)
N = 22  # samples: 2 global batches of 10, and one of 2


def normed(data):
    """Convolutions with BatchNorm, which can be cut."""
    blocks = [nn.Sequential(nn.Conv2d(n, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for n in (1, 4, 4)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 16 * 16, 5))


def facts(model, dtype):
    draws = torch.Generator().manual_seed(5)
    if model.startswith("gpt"):
        tokens = torch.randint(0, 16, (N, 9), generator=draws)
        x, y, classes, vocab = tokens[:, :-1], tokens[:, 1:], 16, 16
    else:
        shape = (10,) if model == "mlp" else (1, 16, 16)
        x = torch.rand(N, *shape, generator=draws).to(dtype)
        y, classes, vocab = torch.randint(0, 5, (N,), generator=draws), 5, None
    split = Samples(x, y)
    return SimpleNamespace(name="drawn", train=split, test=split, classes=classes, vocab=vocab,
                           sample_shape=split.shape)


def train(world, model, dtype, stages=0, devices=1, n=N, drop=0.0, **more):
    """{"loss" of each step, "weights" of this rank, "metrics"} after one epoch."""
    opts = Options(script="mp", model=model, global_batch_size=10, optimizer="sgd", stages=stages, **more)
    cut = bool(stages) or devices > 1
    if cut:
        world = World(**(vars(world) | {"devices": (CPU,) * devices})).in_stages(stages or 1)
    data = facts(model, dtype)
    data.train = Samples(data.train.x[:n], data.train.y[:n])
    net = build_model(opts, data) if model != "normed" else normed(data)
    net = net.to(dtype)
    for each in net.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd):
            each.p = drop  # whoever cuts a net differently draws differently
    task = find_task(opts)
    made = split(net, opts, world, data, task) if cut else distribute(net, opts, world)
    state = TrainState(net, build_optimizer(net, opts), opts, N, stages=made if cut else None)
    order, losses = ElasticSampler(n, 10, world.replica, world.replicas), []
    net.train()
    for batch in batches(data.train, order, opts):
        totals = world.all_sum((backward if cut else plain)(made, batch, state, world))
        state.update(batch.size)
        losses.append(totals.tolist()[0] / batch.size)
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t
             for name, t in net.state_dict().items()}
    return {"loss": losses, "weights": {name: t.clone() for name, t in whole.items()},
            "metrics": evaluate(made, data.test, state, world)}


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


@pytest.mark.parametrize(("model", "size", "stages", "more"), [
    ("mlp", 2, 2, {"dtype": torch.float32}), ("net", 4, 4, {}), ("normed", 2, 2, {}), ("net", 3, 1, {}),
    ("net", 2, 1, {"shard": True}), ("mlp", 8, 2, {"shard": True}), ("gpt:6x2x8", 6, 3, {}),
    ("gpt:6x2x8", 4, 2, {"shard": True, "recompute": True})])
def test_stages_and_replicas_have_the_gradient_of_one_device_with_ragged_and_empty_shares(
        model, size, stages, more):
    given = {"micro_batch_size": 2, "clip_grad_norm": 0.1, "momentum": 0.9, "dtype": torch.float64} | more
    alone = {name: value for name, value in given.items() if name not in ("shard", "recompute")}
    ours = fork_ranks(size, partial(train, model=model, stages=stages, **given))
    assert_same(ours, train(ALONE, model, **alone), 1e-10 if given["dtype"] == torch.float64 else 1e-5)


@pytest.mark.parametrize(("model", "devices"), [("mlp", 2), ("net", 4), ("gpt:6x2x8", 2)])
def test_stages_over_the_devices_of_one_process_have_the_loss_of_one_device(model, devices):
    ours = train(ALONE, model, torch.float64, devices=devices, micro_batch_size=2)
    assert_same([ours], train(ALONE, model, torch.float64, micro_batch_size=2), 1e-10)


@pytest.mark.parametrize("how", [{"recompute": True}, {"shard": True}])
def test_running_statistics_in_stages_are_those_of_as_many_replicas(how):
    more = dict(model="normed", dtype=torch.float64, micro_batch_size=3, n=20)  # no sample alone
    assert_same(fork_ranks(4, partial(train, stages=2, **how, **more)),
                fork_ranks(2, partial(train, **more))[0], 1e-10)


def test_compiled_stages_may_recompute_and_count_running_statistics_once(monkeypatch):
    eager = partial(torch.compile, backend="aot_eager")  # inductor takes minutes
    monkeypatch.setattr(torch, "compile", eager)

    def counted(world):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        stage = Stage(net, 0, pieces(net), CPU, Options(script="mp", compile=True, recompute=True))
        stage(torch.rand(3, 4, requires_grad=True)).sum().backward()
        return int(net[1].num_batches_tracked), net[0].weight.grad is not None

    assert fork_ranks(1, counted) == [(1, True)]


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_frozen_stage_tells_of_its_gradient_lies_on_its_device_and_not_on_the_cpu(sharded):
    """On GPUs two groups sum what lies on CPUs and on GPUs: each rank would wait in another one."""
    device, told = torch.device("meta"), []

    def tell(tensor):
        told.append(tensor)
        return tensor

    world = SimpleNamespace(device=device, stages=2, sum_over_stages=tell, sum_over_replicas=tell)
    Pipeline.norm(SimpleNamespace(lengths=torch.zeros(2, device=device), world=world, even=sharded), [])
    assert [t.device for t in told] == [device] * (1 + sharded)


# ---- batches that are no tensors ----
DICTS = f"{TESTS}/dicts.py"


def test_a_batch_of_dicts_trains_sharded_and_cut_it_is_refused_before_any_life(jobs, tmp_path):
    flags = (f"--model={DICTS}:net", f"--dataset={DICTS}:data", f"--task={DICTS}:loss",
             "--global-batch-size=32", "--max-steps=4", "--log-every=1",
             "--no-tensorboard", f"--run-dir={tmp_path}/run")
    job = jobs.torchrun(2, "train_mp.py", *flags, "--stages=1", "--shard")
    assert job.wait() == 0, job.output
    job = jobs.torchrun(2, "train_mp.py", *flags, "--stages=2", f"--run-dir={tmp_path}/cut")
    assert job.wait() != 0 and "train_mp.py\", line" not in job.output
    assert "has 1 pieces" in job.output
    assert not (tmp_path / "cut/ledger.jsonl").exists(), "no life began"


class Uneven(nn.Module):
    """Passes on less for a sample of another kind."""

    def forward(self, x):
        return x[:, :3] if x[0, 0] > 1 else x[:, :4]


def test_stages_that_pass_on_another_shape_than_at_the_start_are_refused():
    def uneven(world):
        opts = Options(script="mp", stages=2, global_batch_size=4, optimizer="sgd")
        net = nn.Sequential(nn.Sequential(nn.Linear(5, 5), Uneven()), nn.Linear(4, 5))
        nn.init.zeros_(net[0][0].weight)
        nn.init.zeros_(net[0][0].bias)
        samples = Samples(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64))
        world = world.in_stages(2)
        model = split(net, opts, world, SimpleNamespace(train=samples), find_task(opts))
        state = TrainState(net, build_optimizer(net, opts), opts, 4, stages=model)
        if world.stage:
            return
        nn.init.constant_(net[0][0].bias, 2.0)
        with pytest.raises(UserError, match="in stages all batches have one shape"):
            backward(model, share_of(samples.x, samples.y, opts), state, world)

    fork_ranks(2, uneven)


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
    job = mp(jobs, 3, run)
    assert job.wait() == 0, job.output
    assert_ends_like(run, alone)
