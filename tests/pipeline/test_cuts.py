"""Where a net may be cut: the pieces are the net, the cut is even, and what cannot be cut is refused."""
from types import SimpleNamespace

import pytest
import torch
from samples import Samples
from torch import nn

from common.errors import UserError
from common.models import build_model
from common.options import Options
from common.pipeline import describe, split
from common.pipeline.split import balance, cut, pieces
from common.pipeline.stages import module
from common.pipeline.transfer import timetable
from common.training import find_task
from common.world import World


def world(*devices):
    return World(0, 1, 0, 1, 0, tuple(map(torch.device, devices)), "life", 0)


def linears(count):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


@pytest.mark.parametrize(("weights", "counts"), [
    ([1, 1, 1, 1], [2, 2]), ([5, 1, 1, 1], [1, 3]), ([1, 1, 1, 5], [3, 1]), ([1, 2, 3, 4, 5, 6], [3, 2, 1]),
    ([1, 1], [1, 1]), ([1, 100, 1], [1, 1, 1])])
def test_a_cut_is_contiguous_and_its_heaviest_stage_as_light_as_possible(weights, counts):
    assert balance(weights, len(counts)) == counts


def test_what_has_no_weights_goes_with_its_neighbour():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout())
    assert pieces(net) == [("0", "1", "2"), ("3", "4", "5")]


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def twice():
    part = nn.Linear(4, 4)
    return nn.Sequential(part, nn.Tanh(), part, nn.Linear(4, 4))


def scripted():
    return torch.jit.script(linears(2))


def hooked():
    net = linears(2)
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    return net


@pytest.mark.parametrize("make", [lambda: Doubled(nn.Linear(4, 4), nn.Linear(4, 4)), twice, scripted, hooked])
def test_the_pieces_of_an_unusual_net_are_the_net(make):
    net = make()
    x = torch.rand(3, 4)
    y = x
    for piece in pieces(net):
        y = module(net, piece)(y)
    assert torch.equal(net(x), y)


def stages_of(net, world, width=4, **flags):
    opts = Options(script="mp", **flags)
    data = SimpleNamespace(train=Samples(torch.rand(2, *width) if isinstance(width, tuple)
                                         else torch.rand(2, width), torch.zeros(2, dtype=torch.int64)))
    return split(net, opts, world, data, find_task(opts))


def tied():
    net = linears(3)
    net[2].weight = net[0].weight
    return net


def test_weights_that_are_one_may_be_in_one_stage_and_not_in_two():
    with pytest.raises(UserError, match=r"0.weight and 2.weight are one tensor.*stages 0 and 1"):
        stages_of(tied(), world("cpu", "cpu"))
    assert len(stages_of(nn.Sequential(*twice(), nn.Linear(4, 4)), world("cpu", "cpu")).groups) == 2


def test_the_tutorials_net_has_block1_and_fc1_on_the_first_device_block2_and_fc2_on_the_second():
    facts = SimpleNamespace(name="images", classes=5, sample_shape=(1, 28, 28), vocab=None)
    model = stages_of(build_model(Options(model="net", seed=0), facts), world("cpu", "cpu:0"), (1, 28, 28),
                      balance="1,1,1,1")
    places = {stage[0][0]: str(device) for stage, device in zip(model.groups, model.devices, strict=False)}
    assert places == {"block1": "cpu", "block2": "cpu:0", "fc1": "cpu", "fc2": "cpu:0"}
    assert len(describe(model)) == 5


@pytest.mark.parametrize(("net", "devices", "flags", "said"), [
    (nn.Sequential(nn.Linear(4, 4)), ("cpu", "cpu"), {}, "has 1 pieces"),
    (nn.Linear(4, 4), ("cpu", "cpu"), {}, "has 1 pieces"),
    (linears(2), ("cpu",), {}, "two devices"),
    (linears(2), ("cpu", "cpu"), {"balance": "2,1"}, "--balance 2,1")])
def test_what_cannot_be_cut_is_refused_with_a_way_out(net, devices, flags, said):
    with pytest.raises(UserError, match=said) as caught:
        stages_of(net, world(*devices), **flags)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_cut_by_hand_is_as_asked_for():
    assert [len(group) for group in cut(linears(4), 2, "3,1")] == [3, 1]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_every_micro_batch_goes_forward_and_back_once_and_needs_only_what_earlier_ticks_made(stages):
    """So no rank waits for ever: all that a tick's transfers need is work of that tick or an earlier one."""
    for count in range(16):
        done = set()
        flying = [0] * stages
        for tick in timetable(count, stages):
            assert len({stage for stage, _, _ in tick}) == len(tick), "one work at a place"
            for stage, k, forward in tick:
                before = stage - 1 if forward else stage + 1
                assert before in (-1, stages) or (before, k, forward) in done
                assert forward or (stage, k, True) in done
                assert k == 0 or (stage, k - 1, forward) in done, "sums keep their order"
                flying[stage] += 1 if forward else -1
            assert all(n <= stages - i for i, n in enumerate(flying)), "bounds memory"
            done |= set(tick)
        assert len(done) == 2 * stages * count
    assert len(timetable(4 * stages, stages)) <= 2 * (5 * stages - 1), "idle is the bubble alone"
