"""All that a step and an evaluation compute on a GPU has its numbers there."""

import difflib
import importlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_gpu, fake_streams
from jobs import ROOT
from ranks import fork_ranks
from refusals import refusal
from samples import ALONE, Samples, Steps, share_of
from torch import nn

from common.checkpoint.tensors import Image
from common.extras.devices import replicate
from common.extras.stages import cut
from common.extras.tasks import OwnTask
from common.options import Options
from common.training import evaluate, on_device


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
    for module in ("training.evaluate", "extras.tasks"):  # the door has a function of the first name
        importlib.import_module(f"common.{module}").gather = lambda world, value: [value]


def live(world, norm, own, flags):
    world = replace(world, devices=(torch.device("cuda:0"),))
    gather_alone()
    opts = Options(global_batch_size=8, **flags)
    with fake_gpu() as made:
        net = made(lambda: net_of(norm()))
        x, y = torch.randn(8, 6), torch.arange(8) % 3
        task = OwnTask(loss, "--task own") if own else None
        steps = Steps(net, opts, world, task=task)
        state = steps.state
        totals = steps.step(share_of(x, y, opts))
        state.note(totals)
        evaluate(steps.model, Samples(x, y), state, world, state.task)
        assert net[0].weight.is_cuda and totals.is_cuda
        judge = OwnTask(lambda *given: {"loss": (1.0, 8), "hits": loss(*given)["acc"]}, "the judge")
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
        net = made(lambda: parted(["cpu"] * len(devices)))
        x, y = torch.randn(3, 6), torch.arange(3)  # a short last batch: slices without samples
        steps = Steps(net, opts, world, place=cut, split=Samples(x, y))
        totals = steps.step(share_of(x, y, opts))
        assert steps.state.devices == [*dict.fromkeys(devices)] and totals.device == devices[-1]
        steps.state.note(totals)
        evaluate(steps.model, Samples(x, y), steps.state, world, steps.state.task)


GPUS = torch.device("cuda:0"), torch.device("cuda:1")


class Placed(nn.Module):
    """Over two GPUs by its author, with functions between its layers."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        with GPUS[1]:
            self.two = nn.Linear(6, 3)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)).to(GPUS[1]))


@pytest.mark.parametrize("place", [on_device, replicate, cut])
@pytest.mark.parametrize("flags", [*FLAGS, {"clip_grad_norm": 1.0}])
def test_a_net_that_its_author_has_placed_trains_where_it_is_in_every_script(place, flags):
    fork_ranks(1, train_placed, place, flags)


def train_placed(world, place, flags):
    gather_alone()
    world = replace(world, devices=GPUS)
    opts = Options(global_batch_size=8, **flags)
    with fake_gpu(2) as made:
        net = made(Placed)
        x, y = torch.randn(7, 6), torch.arange(7) % 3
        steps = Steps(net, opts, world, place=place, split=Samples(x, y))
        totals = steps.step(share_of(x, y, opts))
        steps.state.note(totals)
        evaluate(steps.model, Samples(x, y), steps.state, world, steps.state.task)
        assert net.one.weight.device == GPUS[0] and net.two.weight.device == GPUS[1] == totals.device


def test_a_net_with_functions_between_its_layers_is_not_cut_without_them():
    class Between(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.two = nn.Linear(6, 3)

        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    hooked = net_of(nn.Identity())
    hooked.register_forward_hook(lambda *_: None)
    for net in (Between(), hooked):
        with refusal("train_mp.py cuts an nn.Sequential, .* is none"):
            cut(net, Options(script="mp"), replace(ALONE, devices=GPUS))


def test_a_net_is_cut_from_the_host_and_no_device_ever_has_all_of_it():
    def moves(world):
        with fake_gpu(2) as made, pytest.MonkeyPatch.context() as patch:
            net = made(lambda: parted(["cpu"] * 4))
            seen = []
            to = nn.Module.to
            patch.setattr(nn.Module, "to", lambda net, device: (seen.append(str(device)), to(net, device))[1])
            model = cut(net, Options(script="mp", balance="3,1"), replace(world, devices=GPUS))
            return seen, model.describe()

    found = (["cuda:0", "cuda:1"], ["cuda:0: 0, 1, 2", "cuda:1: 3"])
    assert fork_ranks(1, moves) == [found]


@pytest.mark.parametrize("flags, wanted", [({}, [8, 8, 4]), ({"in_flight": 3}, [3, 3, 3, 3, 3, 3, 2])])
def test_so_many_forwards_are_in_flight_before_their_common_backward(flags, wanted):
    fork_ranks(1, fly, flags, wanted)


def fly(world, flags, wanted):
    gather_alone()
    opts = Options(script="mp", global_batch_size=20, micro_batch_size=1, **flags)
    with fake_gpu(2) as made, pytest.MonkeyPatch.context() as patch:
        net = made(lambda: parted(["cpu"] * 2))
        backward = torch.autograd.backward
        flights = []
        patch.setattr(
            torch.autograd, "backward", lambda losses: (flights.append(len(losses)), backward(losses))
        )
        steps = Steps(net, opts, replace(world, devices=GPUS), place=cut)
        steps.step(share_of(torch.randn(20, 6), torch.arange(20) % 3, opts))
        assert flights == wanted


class Draws(nn.Module):
    """Notes the state of its device's generator, and draws."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        generator = torch.cuda.default_generators[x.device.index]
        self.seen.append(generator.state)
        generator.state += 1
        return x


def test_a_cut_net_draws_as_one_generator_would():
    def draws(world):
        seen = []
        with fake_gpu(2) as made:
            net = made(lambda: nn.Sequential(*[Draws(seen) for _ in range(3)]))
            model = cut(net, Options(script="mp", balance="2,1"), replace(world, devices=GPUS))
            for _ in range(2):
                model(torch.zeros(1, 6))
        return seen

    assert fork_ranks(1, draws) == [[0, 1, 2, 3, 4, 5]]


def test_the_copy_for_a_save_waits_for_each_gpu_that_it_copies_from():
    with fake_streams(count=2) as default:
        tensors = {"one": torch.ones(3), "two": torch.ones(3)}
        default.placed[tensors["two"].data_ptr()] = 1
        image = Image(tensors)
        image.devices = {*GPUS}
        image.copy(tensors)
        assert all(torch.equal(image.views[name], tensor) for name, tensor in tensors.items())


def test_the_loops_of_train_ddp_and_train_mp_differ_in_where_the_net_goes():
    texts = [
        (ROOT / name).read_text().split('"""')[2].splitlines() for name in ("train_ddp.py", "train_mp.py")
    ]
    changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-"]
    assert [
        line[2:].strip() for line in changed if "place=cut" not in line and "with Elastic" not in line
    ] == ["from common.extras.stages import cut"]
    assert len(changed) == 3, changed


def test_replicas_on_a_cpu_and_a_gpu_are_refused():
    devices = torch.device("cpu"), torch.device("cuda:0")
    with refusal("--devices cpu,cuda:0: nn.DataParallel drives devices of one kind"):
        replicate(nn.Linear(6, 3), Options(script="dp"), SimpleNamespace(devices=devices, device=devices[0]))
