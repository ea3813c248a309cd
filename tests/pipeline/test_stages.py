"""A net in stages computes what the whole one does: any cut, over ranks or devices, ragged shares too."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from jobs import TESTS
from ranks import fork_ranks
from refusals import refusal
from samples import ALONE, CPU, Samples, state_of
from torch import nn

from common.data import batches
from common.models import build_model
from common.options import Options
from common.pipeline import backward, split
from common.pipeline.split import pieces
from common.pipeline.stages import Pipeline, Stage
from common.pipeline.transfer import Ranks
from common.sampler import ElasticSampler
from common.training import backward as plain
from common.training import build_optimizer, distribute, evaluate, find_task
from common.training.optimizer import ELEMENT_WISE

N = 22  # samples: 2 global batches of 10, and one of 2


def normed(data):
    """Convolutions with BatchNorm, which can be cut."""
    blocks = [nn.Sequential(nn.Conv2d(n, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for n in (1, 4, 4)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(4 * 16 * 16, 16))


class Unused(nn.Linear):
    """It has a weight that its forward does not use."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.never = nn.Parameter(torch.ones(3))


OWN = {"normed": normed, "unused": lambda data: nn.Sequential(nn.Flatten(), Unused(256, 8), nn.Linear(8, 16))}


def facts(model, dtype):
    draws = torch.Generator().manual_seed(5)
    if model.startswith("gpt"):
        tokens = torch.randint(0, 16, (N, 9), generator=draws)
        samples = Samples(tokens[:, :-1], tokens[:, 1:])
    else:
        x = torch.rand(N, *((10,) if model == "mlp" else (1, 16, 16)), generator=draws).to(dtype)
        samples = Samples(x, torch.randint(0, 5, (N,), generator=draws))
    vocab = 16 if model.startswith("gpt") else None
    return SimpleNamespace(
        name="drawn", train=samples, test=samples, classes=16, vocab=vocab, sample_shape=samples.shape
    )


def train(world, model, dtype, stages=0, devices=1, n=N, **more):
    """{"loss" of each step, "weights" of this rank, "metrics"} after one epoch."""
    opts = Options(
        script="mp", model=model, global_batch_size=10, stages=stages, **{"optimizer": "sgd"} | more
    )
    cut = bool(stages) or devices > 1
    world = replace(world, devices=(CPU,) * devices).in_stages(stages or 1, opts.shard)
    data = facts(model, dtype)
    data.train = Samples(data.train.x[:n], data.train.y[:n])
    torch.manual_seed(0)
    net = (OWN[model](data) if model in OWN else build_model(opts, data)).to(dtype)
    for each in net.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd):
            each.p = 0.0  # another cut draws other masks
    made = split(net, opts, world, data, find_task(opts)) if cut else distribute(net, opts, world)
    state = state_of(net, opts, N, stages=made if cut else None)
    order = ElasticSampler(n, 10, world.replica, world.replicas)
    losses = []
    net.train()
    for batch in batches(data.train, order, opts):
        totals = world.all_sum((backward if cut else plain)(made, batch, state, world))
        state.update(batch.size)
        losses.append(totals.tolist()[0] / batch.size)
    weights = {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
        for name, t in net.state_dict().items()
    }
    return {"loss": losses, "weights": weights, "metrics": evaluate(made, data.test, state, world)}


def assert_same(ours, theirs, tolerance):
    """`ours` is every rank's result; together they have all the weights there are."""
    for one in ours:
        assert one["loss"] == pytest.approx(theirs["loss"], abs=tolerance)
        assert one["metrics"]["val_loss"] == pytest.approx(
            theirs["metrics"]["val_loss"], abs=max(tolerance, 1e-7)
        )
        assert one["metrics"]["val_acc"] == theirs["metrics"]["val_acc"]
        for name, tensor in one["weights"].items():
            assert (tensor.double() - theirs["weights"][name].double()).abs().max() < 100 * tolerance, name
    assert set().union(*(one["weights"] for one in ours)) == set(theirs["weights"])


@pytest.mark.parametrize(
    "model, size, stages, more",
    [
        ("mlp", 2, 2, {"dtype": torch.float32}),
        ("net", 4, 4, {}),
        ("normed", 2, 2, {}),
        ("net", 3, 1, {}),
        ("unused", 2, 2, {}),
        ("unused", 4, 2, {"weight_decay": 0.1}),
        ("unused", 2, 1, {"weight_decay": 0.1, "shard": 2}),
        ("net", 2, 1, {"shard": 2}),
        ("net", 4, 1, {"shard": 2}),
        ("mlp", 8, 2, {"shard": 2}),
        ("mlp", 8, 2, {"shard": 4}),
        ("gpt:6x2x8", 6, 3, {}),
        ("gpt:6x2x8", 4, 2, {"shard": 2, "recompute": True}),
        *(
            pytest.param("gpt:6x2x8", size, stages, {"shard": shards}, marks=pytest.mark.long)
            for size in range(2, 9)
            for stages in range(1, size + 1)
            for shards in range(size // stages + 1)
            if size % stages == 0
        ),
    ],
)
def test_stages_shards_and_copies_have_the_gradient_of_one_device_with_ragged_and_empty_shares(
    model, size, stages, more
):
    given = {"micro_batch_size": 2, "clip_grad_norm": 0.1, "momentum": 0.9, "dtype": torch.float64} | more
    alone = {name: value for name, value in given.items() if name not in ("shard", "recompute")}
    ours = fork_ranks(size, partial(train, model=model, stages=stages, **given))
    assert_same(ours, train(ALONE, model, **alone), 1e-10 if given["dtype"] == torch.float64 else 1e-5)


@pytest.mark.parametrize("model, devices", [("mlp", 2), ("net", 4), ("gpt:6x2x8", 2)])
def test_stages_over_the_devices_of_one_process_have_the_loss_of_one_device(model, devices):
    ours = train(ALONE, model, torch.float64, devices=devices, micro_batch_size=2)
    assert_same([ours], train(ALONE, model, torch.float64, micro_batch_size=2), 1e-10)


@pytest.mark.parametrize("how", [{"recompute": True}, {"shard": 2}])
def test_running_statistics_in_stages_are_those_of_as_many_replicas(how):
    more = dict(model="normed", dtype=torch.float64, micro_batch_size=3, n=20)  # no sample alone
    assert_same(
        fork_ranks(4, partial(train, stages=2, **how, **more)),
        fork_ranks(2, partial(train, **more))[0],
        1e-10,
    )


def test_shard_with_amp_bf16_keeps_batch_norm_in_float32():
    given = dict(model="normed", dtype=torch.float32, stages=1, amp="bf16", n=20)
    whole, spread = (fork_ranks(2, partial(train, **given, shard=shard))[0] for shard in (0, 2))
    assert spread["loss"] == whole["loss"]


def test_compiled_stages_may_recompute_and_count_running_statistics_once(monkeypatch):
    eager = partial(torch.compile, backend="aot_eager")  # inductor takes minutes
    monkeypatch.setattr(torch, "compile", eager)

    def counted(world):
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        stage = Stage(net, pieces(net), CPU, Options(script="mp", compile=True, recompute=True))
        stage(torch.rand(3, 4, requires_grad=True)).sum().backward()
        return int(net[1].num_batches_tracked), net[0].weight.grad is not None

    assert fork_ranks(1, counted) == [(1, True)]


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_frozen_stage_tells_of_its_gradient_lies_on_its_device_and_not_on_the_cpu(sharded):
    """On GPUs two groups sum what lies on CPUs and on GPUs: each rank would wait in another one."""
    device = torch.device("meta")
    told = []

    def tell(tensor):
        told.append(tensor)
        return tensor

    world = SimpleNamespace(device=device, stages=2, copies=1, sum_over_stages=tell, sum_over_replicas=tell)
    opts = SimpleNamespace(shard=sharded)
    Pipeline.norm(SimpleNamespace(lengths=torch.zeros(2, device=device), world=world, opts=opts), [])
    assert [t.device for t in told] == [device] * (1 + sharded)


# ---- batches that are no tensors ----
DICTS = f"{TESTS}/tasks.py:padded"


def test_a_batch_of_dicts_trains_sharded_and_cut_it_is_refused_before_any_life(jobs, tmp_path, run):
    flags = (
        f"--model={DICTS}_net",
        f"--dataset={DICTS}_data",
        f"--task={DICTS}",
        "--global-batch-size=32",
        "--max-steps=4",
        "--log-every=1",
        "--no-tensorboard",
        f"--run-dir={run}",
    )
    jobs.torchrun(2, "train_mp.py", *flags, "--stages=1", "--shard=2").ends_with(0)
    job = jobs.torchrun(2, "train_mp.py", *flags, "--stages=2", f"--run-dir={tmp_path}/cut")
    assert job.wait() != 0 and 'train_mp.py", line' not in job.output
    assert "has 1 pieces" in job.output
    assert not (tmp_path / "cut/ledger.jsonl").exists(), "no life began"


def test_stages_that_pass_on_another_shape_than_at_the_start_are_refused():
    world = SimpleNamespace(stage=0, stages=2, stage_group=None)
    transfer = Ranks(world, [((4,), torch.float32)], torch.default_generator)
    for other in (torch.zeros(2, 3), torch.zeros(2, 4).double()):
        with refusal("in stages all batches have one shape"):
            transfer.move(give=(1, other))


# ---- optimizers of sharded weights -----------------------------------------------------------------
GROUPS = """
import torch

def adamw(net, opts):
    weights = list(net.parameters())
    return torch.optim.AdamW([{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}])
"""


def all_of(world, optimizers, shard):
    return [train(world, "mlp", torch.float64, 1, optimizer=name, shard=shard) for name in optimizers]


def test_shard_takes_each_optimizer_that_works_by_elements_and_a_function_that_makes_one(tmp_path):
    (tmp_path / "groups.py").write_text(GROUPS)
    optimizers = [*(kind.__name__.lower() for kind in ELEMENT_WISE), f"{tmp_path}/groups.py:adamw"]
    whole = all_of(ALONE, optimizers, 0)
    for found in zip(whole, *fork_ranks(2, all_of, optimizers, 2), strict=True):
        assert_same(found[1:], found[0], 1e-10)


@pytest.mark.parametrize("name", ["adafactor", "lbfgs", "muon", "rprop", "sparseadam"])
def test_shard_refuses_an_optimizer_that_may_need_a_whole_weight(name):
    net = nn.Linear(2, 2, bias=False)
    with refusal("--shard leaves a rank some rows of a weight"):
        build_optimizer(net, Options(script="mp", optimizer=name, shard=2))
