"""All that a step and an evaluation compute on a GPU has its numbers there."""

import importlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_gpu
from ranks import fork_ranks
from refusals import refusal
from samples import Samples, Steps, share_of
from torch import nn

from common.extras.stages import Stages
from common.options import Options
from common.training import Task, evaluate, replicate


def loss(net, batch):
    """A task of a user's own."""
    x, y = batch
    out = net(x)
    losses = nn.functional.cross_entropy(out, y, reduction="sum")
    return {"loss": (losses, len(y)), "acc": ((out.argmax(1) == y).sum(), len(y)), "table": out.long().sum(0)}


def net_of(norm):
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Dropout(), nn.Linear(8, 3))


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)], ids=["no buffers", "buffers"])
@pytest.mark.parametrize("own", [False, True], ids=["classify", "own"])
@pytest.mark.parametrize(
    "flags",
    [{}, {"virtual_ranks": 4}, {"ema_decay": 0.9, "clip_grad_norm": 1.0, "micro_batch_size": 3}],
    ids=["plain", "slices", "more"],
)
def test_no_operation_of_a_step_or_an_evaluation_mixes_a_gpu_with_a_cpu(norm, own, flags):
    fork_ranks(1, live, norm, own, flags)  # tensors of a GPU start threads of autograd


def gather_alone():
    for module in ("evaluate", "tasks"):  # the door has a function of the first name
        importlib.import_module(f"common.training.{module}").gather = lambda world, value: [value]


def live(world, norm, own, flags):
    world = replace(world, devices=(torch.device("cuda:0"),))
    gather_alone()
    opts = Options(global_batch_size=8, **flags)
    with fake_gpu() as made:
        net = made(lambda: net_of(norm()))
        x, y = torch.randn(8, 6), torch.arange(8) % 3
        task = Task(loss, [], spec="own") if own else None
        steps = Steps(net, opts, world, task=task)
        state = steps.state
        totals = steps.step(share_of(x, y, opts))
        state.note(totals)
        evaluate(steps.model, Samples(x, y), state, world, state.task)
        assert net[0].weight.is_cuda and totals.is_cuda
        judge = Task(lambda *given: {"loss": (1.0, 8), "hits": loss(*given)["acc"]}, [], spec="judge")
        evaluate(steps.model, Samples(x, y), state, world, judge)


# ---- several devices in one process ---------------------------------------------------------------
def parted(devices):
    parts = []
    for device in devices:
        with torch.device(device):
            parts.append(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Dropout()))
    return nn.Sequential(*parts)


FLAGS = [{"virtual_ranks": 5, "clip_grad_norm": 1.0}, {"micro_batch_size": 2, "ema_decay": 0.9}]


@pytest.mark.parametrize("devices", ["cuda:0 cuda:1", "cpu cuda:0 cpu"])
@pytest.mark.parametrize("flags", FLAGS)
def test_a_cut_net_passes_on_all_that_another_device_needs(devices, flags):
    fork_ranks(1, live_on_devices, devices.split(), flags)


def live_on_devices(world, devices, flags):
    devices = [*map(torch.device, devices)]
    world = replace(world, devices=tuple(devices))
    opts = Options(script="mp", global_batch_size=8, **flags)
    gather_alone()
    with fake_gpu(2) as made:
        net = made(lambda: parted(devices))
        x, y = torch.randn(3, 6), torch.arange(3)  # a short last batch: slices without samples
        steps = Steps(net, opts, world, place=Stages, split=Samples(x, y))
        totals = steps.step(share_of(x, y, opts))
        assert steps.state.devices == [*dict.fromkeys(devices)] and totals.device == devices[-1]
        steps.state.note(totals)
        evaluate(steps.model, Samples(x, y), steps.state, world, steps.state.task)


def test_replicas_on_a_cpu_and_a_gpu_are_refused():
    devices = torch.device("cpu"), torch.device("cuda:0")
    with refusal("--devices cpu,cuda:0: nn.DataParallel drives devices of one kind"):
        replicate(nn.Linear(6, 3), Options(script="dp"), SimpleNamespace(devices=devices, device=devices[0]))
