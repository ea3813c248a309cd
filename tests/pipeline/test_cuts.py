"""Where a net may be cut: the pieces are the net, the cut is as even as can be, and what cannot be is said.
"""
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.errors import UserError
from common.models import build_model
from common.options import Options
from common.pipeline import describe, split
from common.pipeline.cut import balance, cut, measure, pieces, place, prune
from common.pipeline.schedule import timetable
from common.training import build_optimizer, find_task
from common.training.loss import autocast
from common.world import World

CPU = torch.device("cpu")
IMAGES = SimpleNamespace(name="images", classes=5, sample_shape=(3, 32, 32), vocab=None)


def world(*devices):
    return World(0, 1, 0, 1, 0, tuple(map(torch.device, devices)), "life", 0)


def data(*shape):
    two = torch.rand(2, *shape), torch.zeros(2, dtype=torch.int64)
    return SimpleNamespace(train=type("T", (), dict(fetch=lambda self, ids: two, __len__=lambda self: 2))())


@pytest.mark.parametrize(("weights", "count", "placement"), [
    ([1, 1, 1, 1], 2, [0, 0, 1, 1]), ([5, 1, 1, 1], 2, [0, 1, 1, 1]), ([1, 1, 1, 5], 2, [0, 0, 0, 1]),
    ([1, 2, 3, 4, 5, 6], 3, [0, 0, 0, 1, 1, 2]), ([1, 1], 2, [0, 1]), ([1, 100, 1], 3, [0, 1, 2])])
def test_a_cut_is_contiguous_and_its_heaviest_stage_as_light_as_possible(weights, count, placement):
    assert balance(weights, count) == [placement.count(stage) for stage in range(count)]


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b_32", "alexnet", "mobilenet_v3_small",
                                  "efficientnet_b0",
                                  "convnext_tiny"])
def test_the_pieces_of_a_torchvision_net_are_the_net(name):
    pytest.importorskip("torchvision")
    side = 64 if name in ("alexnet", "vit_b_32") else 32
    facts = SimpleNamespace(**(vars(IMAGES) | {"sample_shape": (3, side, side)}))
    net = build_model(Options(model=name, seed=0), facts).eval()
    names, x, found = list(net.state_dict()), torch.rand(2, 3, side, side), pieces(net)
    with torch.no_grad():
        whole, y = net(x), x
        for piece in found:
            y = piece.call(y)
        torch.testing.assert_close(y, whole)
        kept = []
        for half in (found[:len(found) // 2], found[len(found) // 2:]):
            part = build_model(Options(model=name, seed=0), facts)
            prune(part, [prefix for piece in half for prefix in piece.owns])
            kept += list(part.state_dict())
    assert sorted(kept) == sorted(names) and len(found) > 5


def test_what_has_no_weights_goes_with_its_neighbour():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Dropout())
    assert [piece.name for piece in pieces(net)] == ["0+1+2", "3+4+5"]


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


class ResNet(nn.Module):
    """Of that name, and not torchvision's."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Linear(4, 4)

    def forward(self, x):
        return self.conv1(x)


def twice():
    part = nn.Linear(4, 4)
    return nn.Sequential(part, nn.Tanh(), part, nn.Linear(4, 4))


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def hooked():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    return net


@pytest.mark.parametrize("make", [lambda: Doubled(nn.Linear(4, 4), nn.Linear(4, 4)), ResNet, twice, scripted,
                                  hooked])
def test_the_pieces_of_an_unusual_net_are_the_net(make):
    net, x = make(), torch.rand(3, 4)
    y = x
    for piece in pieces(net):
        y = piece.call(y)
    assert torch.equal(net(x), y)


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


def stages_of(net, world, data, **flags):
    opts = Options(script="mp", **flags)
    return split(net, opts, world, data, find_task(opts))


def test_weights_that_are_one_may_be_in_one_stage_and_not_in_two():
    with pytest.raises(UserError, match=r"0.weight and 2.weight are one tensor.*stages 0 and 1"):
        stages_of(tied(), world("cpu", "cpu"), data(4))
    first, last = twice(), nn.Linear(4, 4)
    net = nn.Sequential(*first, last)
    assert len(stages_of(net, world("cpu", "cpu"), data(4)).groups) == 2


def test_measuring_leaves_weights_buffers_and_generators_alone():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
                        nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
    before, x = {n: t.clone() for n, t in net.state_dict().items()}, torch.rand(3, 4)
    state = torch.get_rng_state()
    found = measure(net, pieces(net), x, CPU, lambda: autocast(Options(), CPU))
    assert all(torch.equal(t, before[n]) for n,
               t in net.state_dict().items()) and torch.equal(state, torch.get_rng_state())
    assert found[0].shape == (4,) and all(m.kept > 0 and m.seconds > 0 for m in found)


def test_an_rnns_weights_are_laid_side_by_side_after_they_were_moved_and_go_with_their_stage(monkeypatch):
    seen = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: seen.append(len(self._flat_weights)))
    net, there = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), torch.device("cpu:0")
    first, last = pieces(net)
    seen.clear()
    place(net, first, there)
    assert not seen
    place(net, last, there)
    assert seen == [4] * 4, "after each weight; torch does nothing before the last one is there"
    lstm = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    prune(lstm, ["0"])
    assert lstm[1]._flat_weights == [None] * 4, "a stage keeps no memory of what another one has"


def test_the_tutorials_net_has_block1_and_fc1_on_the_first_device_block2_and_fc2_on_the_second():
    net = build_model(Options(model="net", seed=0),
                      SimpleNamespace(**(vars(IMAGES) | {"sample_shape": (1, 28, 28)})))
    model = stages_of(net, world("cpu", "cpu:0"), data(1, 28, 28))
    places = {piece.name: str(device) for group,
              device in zip(model.groups, model.devices, strict=True) for piece in group}
    assert places == {"block1": "cpu", "block2": "cpu:0", "fc1": "cpu", "fc2": "cpu:0"}
    assert len(describe(model, 8, build_optimizer(net, Options()))) > 5


class Total(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        return super().forward(x).sum()


@pytest.mark.parametrize(("net", "devices", "opts", "said"), [
    (nn.Sequential(nn.Linear(2, 2)), ("cpu", "cpu"), {}, "cut into 1 at most"),
    (nn.Linear(2, 2), ("cpu", "cpu"), {}, "cut into 1 at most"),
    (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ("cpu",), {}, "two devices"),
    (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ("cpu", "cpu"), {"schedule": "interleaved"},
     "4 stages"),
    (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ("cpu", "cpu"), {"balance": "2,1"}, "--balance 2,1"),
    (nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2), nn.Linear(2, 2)), ("cpu", "cpu"), {}, "one tensor"),
    (nn.Sequential(nn.Linear(2, 2), Total()), ("cpu", "cpu"), {}, "piece 1 .* shape \\(\\)"),
    (nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2)), ("cpu", "cpu"), {}, "piece 1 .*shape \\(2, 2\\)")])
def test_what_cannot_be_cut_is_refused_with_a_way_out(net, devices, opts, said):
    with pytest.raises(UserError, match=said) as caught:
        stages_of(net, world(*devices), data(2), **opts)
    assert len(str(caught.value).splitlines()) <= 3


def test_cuts_by_hand_and_by_time_are_as_asked_for():
    found = pieces(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))))
    assert [len(group) for group in cut(found, [], 2, "3,1")] == [3, 1]
    assert [len(group) for group in cut(found, [9.0, 1.0, 1.0, 1.0], 2, "time")] == [1, 3]


@pytest.mark.parametrize(("schedule", "loops"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2),
                                                 ("interleaved", 3)])
@pytest.mark.parametrize("places", [1, 2, 3, 4, 7])
def test_every_micro_batch_goes_forward_and_back_once_and_needs_only_what_earlier_ticks_made(
        schedule, loops, places):
    """So no rank waits for ever: all that a tick's transfers need is work of that tick or an earlier one."""
    stages = loops * places
    for count in range(16):
        done, flying = set(), [0] * stages
        assert timetable(schedule, count, stages, places) is timetable(schedule, count, stages, places), \
            "computed once, not in each step"
        for tick in timetable(schedule, count, stages, places):
            assert len({stage % places for stage, _, _ in tick}) == len(tick), "one work at a place"
            for stage, k, forward in tick:
                before = stage - 1 if forward else stage + 1
                assert before in (-1, stages) or (before, k, forward) in done
                assert forward or (stage, k, True) in done
                assert k == 0 or (stage, k - 1, forward) in done, "sums keep their order"
                flying[stage] += 1 if forward else -1
            assert schedule != "1f1b" or all(n <= stages - i for i, n in enumerate(flying)), "bounds memory"
            done |= set(tick)
        assert len(done) == 2 * stages * count
    ticks = list(timetable(schedule, 4 * places, stages, places))
    assert len(ticks) <= 2 * (loops * 4 * places + places - 1), "idle is the bubble alone"
