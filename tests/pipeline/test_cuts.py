"""Where a net may be cut: the pieces are the net, the cut is even, and what cannot be cut is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from refusals import refusal
from samples import Facts, Samples
from torch import nn

from common.models import build_model
from common.options import Options
from common.pipeline import describe, split
from common.pipeline.split import balance, copies_in_words, pieces
from common.pipeline.stages import module
from common.pipeline.transfer import timetable
from common.training import find_task
from common.world import World


@pytest.mark.parametrize(
    "weights, counts",
    [
        ([1, 1, 1, 1], [2, 2]),
        ([5, 1, 1, 1], [1, 3]),
        ([1, 1, 1, 5], [3, 1]),
        ([1, 2, 3, 4, 5, 6], [3, 2, 1]),
        ([1, 100, 1], [1, 1, 1]),
    ],
)
def test_a_cut_is_contiguous_and_its_heaviest_stage_as_light_as_possible(weights, counts):
    assert balance(weights, len(counts)) == counts


def linears(count):
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


class Doubled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    net = linears(2)
    net.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,))
    return net


def twice():
    part = nn.Linear(4, 4)
    return nn.Sequential(part, nn.Tanh(), part, nn.Linear(4, 4))


@pytest.mark.parametrize(
    "make", [lambda: Doubled(*linears(2)), lambda: torch.jit.script(linears(2)), hooked, twice]
)
def test_the_pieces_of_an_unusual_net_are_the_net(make):
    net = make()
    x = torch.rand(3, 4)
    y = x
    for piece in pieces(net):
        y = module(net, piece)(y)
    assert torch.equal(net(x), y)


def over(devices, net, shape=(4,), size=1, **flags):
    """The net in stages over these devices of one process."""
    opts = Options(script="mp", **flags)
    data = SimpleNamespace(train=Samples(torch.rand(2, *shape), torch.zeros(2, dtype=torch.int64)))
    world = World(0, size, 0, size, tuple(map(torch.device, devices.split())), "life")
    return split(net, opts, world, data, find_task(opts))


def test_counts_go_round_the_devices_of_one_process_alone():
    """Two replicas of a net that is not cut would have stages that no rank runs."""
    assert len(over("cpu", linears(3), stages=1, balance="1,2").stages) == 2
    with refusal("--balance 1,2 for 1 stages"):
        over("cpu", linears(3), size=2, stages=1, balance="1,2")


def tied():
    net = linears(3)
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    "make, devices, balance, words",
    [
        (lambda: linears(1), "cpu cpu", "parameters", "has 1 pieces"),
        (lambda: nn.Linear(4, 4), "cpu cpu", "parameters", "has 1 pieces"),
        (hooked, "cpu cpu", "parameters", "has 1 pieces"),
        (lambda: linears(2), "cpu", "parameters", "two devices"),
        *(
            (lambda: linears(2), "cpu cpu", balance, f"--balance {balance}")
            for balance in ("2,1", "2,x", "size")
        ),
        (lambda: linears(3), "cpu cpu", "1,1,1", "--balance 1,1,1"),
        (tied, "cpu cpu", "parameters", "0.weight and 2.weight are one tensor.*stages 0 and 1"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_way_out(make, devices, balance, words):
    with refusal(words):
        over(devices, make(), balance=balance)


def test_the_cut_is_as_asked_for_and_may_alternate_between_devices_as_in_the_tutorial():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), *linears(2), nn.ReLU(), nn.Dropout())
    assert over("cpu cpu", net, balance="2,1").groups == [[("0", "1", "2"), ("3",)], [("4", "5", "6")]], (
        "what has no weights goes with its neighbour"
    )
    facts = Facts("images", 5, (1, 28, 28))
    net = build_model(Options(model="net", seed=0), facts)
    model = over("cpu cpu:0", net, (1, 28, 28), balance="1,1,1,1")
    assert [line.split()[1:3] for line in describe(model)[1:]] == [
        ["cpu", "block1"],
        ["cpu:0", "block2"],
        ["cpu", "fc1"],
        ["cpu:0", "fc2"],
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_every_micro_batch_goes_forward_and_back_once_and_needs_only_what_earlier_ticks_made(stages):
    """So no rank waits for ever: all that a tick's transfers need is work of that tick or an earlier one."""
    for count in range(16):
        done = set()
        flying = [0] * stages
        for tick in timetable(count, stages):
            arriving = [stage + 1 if forward else stage - 1 for stage, _, forward in tick]
            assert len({stage for stage, _, _ in tick}) == len(set(arriving)) == len(tick), "one of each"
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


@pytest.mark.parametrize(
    "size, local_size, stages, shards, line",
    [
        (8, 4, 1, 4, "2 copies of 4 shards: any machine may die"),
        (8, 8, 1, 4, "2 copies of 4 shards: any process may die"),
        (12, 4, 1, 6, "2 copies of 6 shards: any machine may die"),  # one machine has ranks of both
        (12, 6, 1, 4, "3 copies of 4 shards: any machine may die"),
        (6, 5, 1, 2, "3 copies of 2 shards: any process may die"),
        (6, 1, 1, 6, "1 copy of 6 shards: a death costs up to a save interval"),
        (2, 1, 2, 1, "1 copy of 2 stages: a death costs up to a save interval"),
        (8, 4, 2, 2, "2 copies of 2 stages x 2 shards: any machine may die"),
    ],
)
def test_shard_and_stages_say_what_may_die(size, local_size, stages, shards, line):
    world = World(0, size, 0, local_size, (), "life", stages=stages, shards=shards)
    assert copies_in_words(world) == line
    machines = [set(range(i, i + local_size)) for i in range(0, size, local_size)]
    parts = [{replace(world, rank=rank).part for rank in set(range(size)) - machine} for machine in machines]
    assert all(len(left) == world.parts for left in parts) == ("machine" in line)
