"""All that a step and an evaluation compute on a GPU has its numbers there."""

import difflib
import importlib
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fakes import fake_gpus, fake_streams
from jobs import ROOT
from program import Part
from ranks import fork_ranks
from refusals import refusal
from samples import ALONE, CPU, Samples, Steps
from torch import nn

from common.checkpoint.tensors import Image
from common.extras.devices import replicate
from common.extras.stages import cut
from common.extras.tasks import OwnTask
from common.options import Options
from common.training import evaluate, on_device

GPUS = torch.device("cuda:0"), torch.device("cuda:1")


def lives(made_net, *given, **named):
    """A step and an evaluation in a process of its own: tensors of a GPU start threads of autograd."""
    fork_ranks(1, live, made_net, *given, named)


def live(world, made_net, devices, size, flags, given):
    """`size` samples: with fewer than eight, slices are without any."""
    for module in ("training.evaluate", "extras.tasks"):  # the door has a function of the first name
        importlib.import_module(f"common.{module}").gather = lambda world, value: [value]
    world = replace(world, devices=devices)
    opts = Options(global_batch_size=8, **flags)
    with fake_gpus() as made:
        net = made(made_net)
        x, y = torch.randn(size, 6), torch.arange(size) % 3
        samples = Samples(x, y)
        steps = Steps(net, opts, world, split=samples, **given)
        state = steps.state
        totals = steps.step(steps.batch(x, y))
        state.note(totals)
        evaluate(steps.model, samples, state, world, state.task)
        judge = OwnTask(lambda *given: {"loss": (1.0, 8), "hits": loss(*given)["acc"]}, "the judge")
        evaluate(steps.model, samples, state, world, judge)
        assert totals.device == [*net.parameters()][-1].device == devices[-1]
        assert state.devices == [*dict.fromkeys(p.device for p in net.parameters())]


def loss(net, batch):
    """A task of a user's own."""
    x, y = batch
    out = net(x)
    y = y.to(out.device)  # a net over devices ends on the last one
    losses = nn.functional.cross_entropy(out, y, reduction="sum")
    return {"loss": (losses, len(y)), "acc": ((out.argmax(1) == y).sum(), len(y)), "table": out.long().sum(0)}


def net_of(norm):
    return nn.Sequential(nn.Linear(6, 8), norm(), nn.Dropout(), nn.Linear(8, 3))


@pytest.mark.parametrize("norm", [nn.Identity, partial(nn.BatchNorm1d, 8)], ids=["no buffers", "buffers"])
@pytest.mark.parametrize("own", [False, True], ids=["classify", "own"])
@pytest.mark.parametrize(
    "flags",
    [{}, {"virtual_ranks": 4}, {"ema_decay": 0.9, "clip_grad_norm": 1.0, "micro_batch_size": 3}],
    ids=["plain", "slices", "more"],
)
def test_no_operation_of_a_step_or_an_evaluation_mixes_a_gpu_with_a_cpu(norm, own, flags):
    task = OwnTask(loss, "--task own") if own else None
    lives(partial(net_of, norm), GPUS[:1], 8, flags, task=task)


# ---- several devices in one process ---------------------------------------------------------------
def parted(count):
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6).eval(), nn.Dropout()) for _ in range(count)]
    )


FLAGS = [{"virtual_ranks": 5, "clip_grad_norm": 1.0}, {"micro_batch_size": 2, "ema_decay": 0.9}]


@pytest.mark.parametrize("devices", [GPUS, (CPU, GPUS[0], CPU)], ids=["two GPUs", "a CPU twice"])
@pytest.mark.parametrize("flags", FLAGS)
def test_a_cut_net_passes_on_all_that_another_device_needs(devices, flags):
    lives(partial(parted, len(devices)), devices, 3, flags | {"script": "mp"}, place=cut)


def placed(second=GPUS[1]):
    """A net over two devices by its author, with functions between its layers."""

    def forward(net, x):
        return net.two(torch.relu(net.one(x)).to(second))

    return Part(forward, one=nn.Linear(6, 6), two=nn.Linear(6, 3, device=second))


@pytest.mark.parametrize("place", [on_device, replicate, cut])
@pytest.mark.parametrize("flags", [*FLAGS, {"clip_grad_norm": 1.0}])
def test_a_net_that_its_author_has_placed_trains_where_it_is_in_every_script(place, flags):
    lives(placed, GPUS, 7, flags, place=place)


def test_a_net_with_functions_between_its_layers_is_not_cut_without_them():
    hooked = net_of(nn.Identity)
    hooked.register_forward_hook(lambda *_: None)
    for net in (placed(CPU), hooked):
        with refusal("train_mp.py cuts an nn.Sequential, .* is none"):
            cut(net, Options(script="mp"), replace(ALONE, devices=GPUS))


def test_a_net_is_cut_from_the_host_and_no_device_ever_has_all_of_it():
    def moves(world):
        seen = []

        def noted(net, device):
            seen.append(str(device))
            return to(net, device)

        with fake_gpus() as made:
            net = made(parted, 4)
            to = nn.Module.to
            nn.Module.to = noted
            model = cut(net, Options(script="mp", balance="3,1"), replace(world, devices=GPUS))
            return seen, model.describe()

    found = (["cuda:0", "cuda:1"], ["cuda:0: 0, 1, 2", "cuda:1: 3"])
    assert fork_ranks(1, moves) == [found]


@pytest.mark.parametrize("flags, wanted", [({}, [8, 8, 4]), ({"in_flight": 3}, [3, 3, 3, 3, 3, 3, 2])])
def test_so_many_forwards_are_in_flight_before_their_common_backward(flags, wanted):
    def flights(world):
        opts = Options(script="mp", global_batch_size=20, micro_batch_size=1, **flags)
        with fake_gpus() as made:
            steps = Steps(made(parted, 2), opts, replace(world, devices=GPUS), place=cut)
            torch.autograd.backward = backward = Mock(wraps=torch.autograd.backward)
            steps.step(steps.batch(torch.randn(20, 6), torch.arange(20) % 3))
            return [len(call.args[0]) for call in backward.call_args_list]

    assert fork_ranks(1, flights) == [wanted]


def test_a_cut_net_draws_as_one_generator_would():
    def draws(world):
        seen = []

        def draw(net, x):
            generator = torch.cuda.default_generators[x.device.index]
            seen.append(generator.state)
            generator.state += 1
            return x

        with fake_gpus() as made:
            net = made(lambda: nn.Sequential(*[Part(draw) for _ in range(3)]))
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
    one, other = ((ROOT / f"train_{name}.py").read_text().split('"""')[2] for name in ("ddp", "mp"))
    changed = [line[2:] for line in difflib.ndiff(one.splitlines(), other.splitlines()) if line[0] in "+-"]
    assert changed.pop(0) == "from common.extras.stages import cut"
    assert len(changed) == 2 and all("with Elastic" in line for line in changed), changed


@pytest.mark.parametrize(
    "other, flags, words",
    [
        (GPUS[0], {}, "--devices cpu,cuda:0: nn.DataParallel drives devices of one kind"),
        (CPU, {"compile": True}, "--compile: train_dp.py copies the net to its devices"),
    ],
)
def test_what_cannot_be_replicated_is_refused(other, flags, words):
    with refusal(words):
        where = SimpleNamespace(devices=(CPU, other), device=CPU)
        replicate(nn.Linear(6, 3), Options(script="dp", **flags), where)
