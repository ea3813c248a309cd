"""Stages over ranks, to the last bit: one digest at any number of stages and of replicas, that of
train_ddp.py --virtual-ranks.

And what stages must agree on: a step that overflows in one of them, and a step that somebody's death cuts off
between the last gradient and the first update.
"""

import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_generators
from jobs import steps_on_disk
from ranks import fork_ranks
from samples import Samples, state_of
from test_bitwise import CNN, NETS, batch_at, life, options, run

import train_mp
from common.models import build_model
from common.pipeline import backward, split
from common.pipeline.transfer import Ranks
from common.training import backward as whole_backward
from common.training import distribute, find_task
from common.world import World
from common.world import world as pinned

GPT = {
    "model": f"{NETS}:tied",
    "dataset": f"{NETS}:words",
    "global_batch_size": 20,
    "optimizer": "adamw",
    "weight_decay": 0.1,
    "clip_grad_norm": 0.5,
    "ema_decay": 0.9,
    "epochs": 2,
}
MP = {"script": "mp", "hang_timeout": 20}


def pictures():
    """As much of a dataset as it takes to build a net of the tests and to cut it."""
    samples = Samples(torch.randn(2, 1, 12, 12), torch.zeros(2, dtype=torch.int64))
    return SimpleNamespace(classes=4, sample_shape=(1, 12, 12), vocab=None, name="pictures", train=samples)


# ---- any number of stages and of replicas ---------------------------------------------------------
@pytest.mark.parametrize(
    "given, cuts",
    [
        (CNN | {"epochs": 1}, ((2, 1), (2, 3), (3, 1), (1, 2))),
        (GPT, ((2, 3), (4, 1))),
        (CNN | {"model": f"{NETS}:frozen", "epochs": 1}, ((2, 3),)),
        (
            CNN | {"epochs": 1, "virtual_ranks": 7, "amp": "bf16", "channels_last": True, "recompute": True},
            ((2, 3), (4, 1)),
        ),
    ],
    ids=["cnn", "gpt", "frozen", "bf16"],
)
def test_any_stages_and_replicas_end_in_the_digest_of_train_ddp(tmp_path, given, cuts):
    ddp = run(tmp_path / "ddp", 1, given | {"recompute": False})
    for stages, replicas in cuts:
        found = run(
            tmp_path / f"{stages}x{replicas}", stages * replicas, given | MP | {"stages": stages}, train_mp
        )
        assert found == ddp, (
            f"{stages} stages, {replicas} replicas: weights, or a loss, a hit, an evaluation of some step"
        )


def test_a_tensor_arrives_with_its_strides_without_holes_and_with_the_generators_state():
    x = torch.arange(240.0).view(2, 5, 4, 6)
    tensors = [
        x,
        x.to(memory_format=torch.channels_last),
        x.permute(3, 1, 0, 2),
        x[:1],
        x[..., ::2],
        x[1:, :, :1].expand(3, 5, 4, 6),
    ]

    def hand_on(world):
        transfer = Ranks(world.in_stages(2), [], torch.Generator())
        arrived = []
        for seed, t in enumerate(tensors):
            transfer.shapes = [(tuple(t.shape[1:]), t.dtype)]
            if world.rank:
                came = transfer.move(take=(0, len(t)))()
                arrived.append((came.tolist(), came.stride(), transfer.generator.initial_seed()))
            else:
                transfer.generator.manual_seed(seed)
                transfer.move(give=(1, t))
        transfer.drain()
        return arrived

    for seed, (t, arrived) in enumerate(zip(tensors, fork_ranks(2, hand_on)[1], strict=True)):
        is_whole = t.untyped_storage().nbytes() == t.nbytes or t is tensors[3]
        assert arrived == (t.tolist(), (t if is_whole else t.contiguous()).stride(), seed)


def test_kills_and_resizes_of_stages_and_replicas_leave_no_trace_in_the_bits(tmp_path):
    unbroken = run(tmp_path / "unbroken", 2, CNN)
    lives = (
        (2, 3, (5, 3, "before")),
        (2, 2, (0, 8, "after")),
        (1, 3, (1, 11, "within")),
        (3, 1, (2, 15, "before")),
        (2, 4, (2, 21, "after")),
    )
    for stages, replicas, kill in lives:
        run(tmp_path / "killed", stages * replicas, CNN | MP | {"stages": stages}, train_mp, kill=kill)
    found = run(tmp_path / "killed", 4, CNN | MP | {"stages": 2}, train_mp)
    assert found[0] == unbroken[0]
    lines, whole = (set(metrics.splitlines()) for _, metrics in (found, unbroken))
    assert lines <= whole and {json.loads(line)["step"] for line in whole - lines} <= {8, 21}, (
        "those a rescue made are not logged"
    )


# ---- devices that each have a generator -----------------------------------------------------------
@pytest.mark.parametrize("recompute", [False, True])
def test_draws_go_on_where_the_stage_before_ended_even_if_its_device_has_another_generator(recompute):
    def gradient(world, devices):
        opts = options("unused", CNN | MP | {"recompute": recompute})
        pinned.pin(opts)
        data = pictures()
        net = build_model(opts, data)
        with fake_generators(*devices):
            model = split(net, opts, replace(world, devices=devices), data, find_task(opts))
            state = state_of(net, opts, 107)
            backward(model, batch_at(world, 0, 8), state, world)
        return [p.grad.tolist() for p in net.parameters()]

    one = torch.device("cpu", 0)
    two = torch.device("cpu", 1)
    same = fork_ranks(1, gradient, (one, one, one))
    assert fork_ranks(1, gradient, (one, two, one)) == same
    assert fork_ranks(1, gradient, (torch.device("cpu"),) * 3) == same


# ---- a step that overflows ------------------------------------------------------------------------
def test_a_step_that_overflows_on_one_rank_or_in_one_stage_is_skipped_by_all():
    def trained(world, stages):
        opts = options("unused", CNN | MP | {"stages": stages} if stages else CNN)
        pinned.pin(opts)
        data = pictures()
        net = build_model(opts, data)
        with torch.no_grad():
            net[0].weight.mul_(1e-4)  # before a BatchNorm: its gradient, in stage 0, is 1e4 times as long
        world = world.in_stages(stages or 1)
        model = split(net, opts, world, data, find_task(opts)) if stages else distribute(net, opts, world)
        state = state_of(net, opts, 107, stages=model if stages else None)
        state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
        scales = []
        for step in range(9):
            batch = batch_at(SimpleNamespace(rank=world.replica, size=world.replicas), step, 8)
            (backward if stages else whole_backward)(model, batch, state, world)
            state.update(24)
            scales.append(state.scaler.get_scale())
        return scales, {n: t.tolist() for n, t in state.tensors()["model"].items()}

    scales, weights = fork_ranks(1, trained, 0)[0]
    assert len(set(scales)) > 3, "some steps overflowed and were skipped"
    for size, stages in ((3, 0), (4, 2)):
        ranks = fork_ranks(size, trained, stages)
        assert [seen for seen, _ in ranks] == [scales] * size
        assert {n: t for _, mine in ranks for n, t in mine.items()} == weights


ASKS_AND_TOTALS = torch.int32, torch.float64


# ---- between the last gradient and the first update -----------------------------------------------
def cut_off(world, opts, step, passes):
    """Rank 3 dies when its gradient is complete; rank `passes`, if it is one, takes the step for agreed on by
    all.
    """
    original = train_mp.backward
    all_sum = World.all_sum
    armed = [False]

    def backward(model, batch, state, world):
        totals = original(model, batch, state, world)
        if state.progress.step + 1 == step and world.rank == 3:
            signal.raise_signal(signal.SIGKILL)
        armed.append(state.progress.step + 1 == step and world.rank == passes)
        return totals

    train_mp.backward = backward
    World.all_sum = lambda world, tensor, *group: (
        tensor if armed[-1] and tensor.dtype in ASKS_AND_TOTALS else all_sum(world, tensor, *group)
    )
    return life(world, train_mp, opts)


@pytest.mark.parametrize("passes", [None, 0, 1])
def test_a_death_before_the_update_costs_no_step_whether_or_not_a_stage_has_made_it(tmp_path, passes):
    given = CNN | MP | {"stages": 2, "epochs": 2, "save_every": 100}
    fork_ranks(4, cut_off, options(tmp_path / "run", given), 3, passes, may_die=range(4))
    assert steps_on_disk(tmp_path / "run")[-1] == 3
    assert (
        run(tmp_path / "run", 2, given | MP, train_mp)[0]
        == run(tmp_path / "unbroken", 1, CNN | {"epochs": 2})[0]
    )
