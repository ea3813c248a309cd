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
from samples import Samples, share_of, state_of
from test_readme import COMMON, fenced, section
from torch import nn

from common.options import Options
from common.pipeline.stages import Pipeline, Stage
from common.training import backward, distribute, evaluate, optimizer
from common.training.tasks import task_of


def loss(net, batch, state=None):
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
        state = state_of(net, opts)
        if own:
            state.task = task_of(loss, "own")
            state.task.learn(loss(net, (x.cuda(), y.cuda())), world.device)
        totals = backward(distribute(net, opts, world), share_of(x, y, opts), state, world)
        state.update(8)
        state.note(totals)
        evaluate(net, Samples(x, y), state, world)
        assert net[0].weight.is_cuda and totals.is_cuda
        judge = task_of(lambda *given: {"loss": (1.0, 8), "hits": loss(*given)["acc"]}, "judge")
        evaluate(net, Samples(x, y), state, world, judge)


# ---- stages of one process ------------------------------------------------------------------------
class Generator:
    """It takes no state of one of another kind of device."""

    def __init__(self, stage):
        self.kind = stage.device.type

    def get_state(self):
        return self.kind

    def set_state(self, state):
        assert state == self.kind


@pytest.mark.parametrize("devices", ["cuda:0 cuda:1", "cpu cuda:0 cpu"])
@pytest.mark.parametrize(
    "flags", [{"virtual_ranks": 5, "clip_grad_norm": 1.0}, {"micro_batch_size": 2, "ema_decay": 0.9}]
)
def test_stages_of_one_process_pass_on_all_that_another_device_needs(devices, flags):
    fork_ranks(1, live_in_stages, [*map(torch.device, devices.split())], flags)


def live_in_stages(world, devices, flags):
    world = replace(world, devices=tuple(devices))
    opts = Options(script="mp", global_batch_size=8, **flags)
    gather_alone()
    Stage.generator = property(Generator)

    def staged():
        parts = []
        for device in devices:
            with device:
                parts.append(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Dropout()))
        return nn.Sequential(*parts)

    with fake_gpu() as made:
        net = made(staged)
        groups = [[(f"{i}",)] for i in range(len(devices))]
        model = Pipeline(net, groups, [], opts, world, None)
        model.tree = distribute(model, opts, world) if opts.virtual_ranks else None
        x, y = torch.randn(3, 6), torch.arange(3)  # a short last batch: slices without samples
        state = state_of(net, opts, stages=model)
        backward(model.tree or model, share_of(x, y, opts), state, world)
        state.update(3)
        evaluate(model, Samples(x, y), state, world)


def test_replicas_on_a_cpu_and_a_gpu_are_refused():
    devices = torch.device("cpu"), torch.device("cuda:0")
    with refusal("--devices cpu,cuda:0: nn.DataParallel drives devices of one kind"):
        distribute(nn.Linear(6, 3), Options(script="dp"), SimpleNamespace(devices=devices, device=devices[0]))


# ---- an optimizer that a script has made before its net moved -------------------------------------
def test_what_an_optimizer_has_already_moves_with_its_weight_and_no_zeros_take_its_place():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    adam = torch.optim.Adam(net.parameters())
    net[1](torch.ones(1, 3)).sum().backward()  # the layer before it has no state yet
    adam.step()
    before = {p: {name: t.clone() for name, t in own.items()} for p, own in adam.state.items()}
    optimizer.make_state(adam)
    for p, own in before.items():
        assert all(torch.equal(adam.state[p][name], own[name]) for name in own)
    fork_ranks(1, moved)


def moved(world):
    with fake_gpu() as made:
        net = made(nn.Linear, 3, 3)
        own = torch.optim.Adagrad(net.parameters())
        for state in own.state.values():
            state["sum"] = torch.zeros(state["sum"].shape)
        optimizer.make_state(own)
        assert all(state["sum"].is_cuda and not state["step"].is_cuda for state in own.state.values())


# ---- the loop of one's own in common/README.md ----------------------------------------------------
def test_the_test_of_the_readmes_loop_runs_on_a_gpu():
    fork_ranks(1, run_readmes)


def run_readmes(world):
    names = {"__name__": "my_loop"}
    exec(fenced(section(COMMON, "A loop of your own"), "python")[0], names)
    with fake_gpu() as made:
        net = made(nn.Linear, 8, 2)
        world = replace(world, devices=(torch.device("cuda:0"),))
        names["test"](SimpleNamespace(net=net, model=net, world=world), names["Points"]())
