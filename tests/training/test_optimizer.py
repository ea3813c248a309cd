"""Optimizers: every one of torch.optim takes the steps of torch's own loop, in any world.

torch's own list of optimizers, with their settings, says what there is.
"""

import copy
import inspect
import sys
import unittest
from types import ModuleType

import pytest
import torch
from ranks import fork_ranks
from refusals import refusal
from samples import held, same, state_of
from torch import nn

from common.errors import UserError
from common.options import parse_options
from common.options.registry import RATE, RATES
from common.training.optimizer import named_state, take_state

CANNOT = {  # what torch lists and we refuse, and why
    "LBFGS": "needs the loss several times in one step",
    "SparseAdam": "needs sparse gradients",
}


def torchs_list(world):
    """[(optimizer, settings)]; in a process of its own, as importing it sets switches."""
    stub = ModuleType("expecttest")  # torch's list uses nothing of it but the name
    stub.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_optimizers import optim_db

    return [
        (info.optim_cls.__name__, each.kwargs)
        for info in optim_db
        for each in info.optim_inputs_func(device="cpu")
    ]


@pytest.fixture(scope="module")
def listed():
    return fork_ranks(1, torchs_list)[0]


def full(name, settings):
    """The settings, with those that have other defaults here."""
    own = {"lr": 0.01} | ({} if name in ("Rprop", "LBFGS", "SparseAdam") else {"weight_decay": 0.0})
    own |= {"momentum": 0.0} if name == "SGD" else {}
    own |= {"fused": True} if name in ("SGD", "Adam", "AdamW") else {}
    return own | settings | {"lr": float(settings.get("lr", 0.01))}


def flags_of(name, settings):
    """What a person writes for torch.optim's NAME(..., **settings)."""
    given = full(name, settings)
    rest = {key: value for key, value in given.items() if key not in ("lr", "weight_decay", "fused")}
    flags = [f"--optimizer={name}", f"--lr={given['lr']}"]
    flags += [f"--weight-decay={settings.get('weight_decay', 0.0)}"]
    return flags + [f"--optimizer-args={','.join(f'{k}={v!r}' for k, v in rest.items())}"] * bool(rest)


def able(optimizers):
    return [(name, settings) for name, settings in optimizers if not CANNOT.keys() & {name, *settings}]


def net_for(name):
    torch.manual_seed(0)
    bias = name != "Muon"  # which takes matrices alone
    return nn.Sequential(nn.Linear(6, 6, bias), nn.Tanh(), nn.Linear(6, 4, bias))


def train(step, net):
    torch.manual_seed(step)
    net(torch.randn(8, 6)).exp().mean().backward()


def made(name, settings):
    return state_of(net_for(name), parse_options("", flags_of(name, settings), "ddp"), 1000)


@torch.no_grad()
def resume(state, other):
    """As a restart does: the net's tensors are copied in their places, the others given back by name."""
    saved = copy.deepcopy(other.tensors())
    for name, tensor in state.tensors()["model"].items():
        tensor.copy_(saved["model"][name])
    state.load(other.facts(), saved["optimizer"])


def test_every_optimizer_of_torch_takes_the_steps_of_torchs_own_loop_from_any_checkpoint(listed):
    wrong = []
    for name, settings in able(listed):
        state = made(name, settings)
        net = net_for(name)
        plain = getattr(torch.optim, name)(net.parameters(), **full(name, settings))
        for step in range(4):
            resumed = made(name, settings)
            resume(resumed, state)
            for one in (state, resumed):
                train(step, one.net)
                one.update(8)
            train(step, net)
            plain.step()
            plain.zero_grad()
            equal = all(map(torch.equal, net.parameters(), state.net.parameters()))
            if not equal or not same(held(state), held(resumed)):
                wrong.append((name, settings, step))
    assert not wrong


def test_what_torch_lists_and_we_refuse_is_listed_with_its_reason(listed):
    refused = set()
    for name, settings in listed:
        if (name, settings) not in able(listed):
            with pytest.raises((SystemExit, UserError)):
                state = made(name, settings)
                train(0, state.net)
                state.update(8)
            refused.add(name)
    assert refused == set(CANNOT)


def test_rates_left_open_are_torchs_own(listed):
    for name in {name for name, _ in listed} - {"LBFGS", "SGD"}:
        rate = inspect.signature(getattr(torch.optim, name)).parameters["lr"].default
        assert rate == RATES.get(name.lower(), RATE), name


# ---- a user's own optimizer and schedule, and the flags ----
OWN = """
import torch

def scaled(net, opts):
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "scale": 0.1}]
    return torch.optim.NAdam(groups)

def half(net):
    return torch.optim.SGD(net[0].parameters(), lr=1e-3)

def faster(net, opts):
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters()}]
    return torch.optim.SGD(groups, lr=opts.lr)

def slower(net, opts):
    groups = [{"params": net[0].parameters(), "lr": 1e-3}, {"params": net[2].parameters()}]
    return torch.optim.SGD(groups, lr=opts.lr)

def nothing(net, opts):
    return 3

def lbfgs(net, opts):
    return torch.optim.LBFGS(net.parameters(), lr=opts.lr)

def falls(step, total, opts):
    return min(1, (step + 1) / 4) * (1 - step / total)

def wrong(step, total):
    return -1.0
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)

    def build(*flags):
        return state_of(net_for(""), parse_options("", list(flags), "ddp"), 640)

    return build


def test_a_users_groups_learn_at_the_scheduled_rate_times_their_scale(own):
    state = own("--optimizer=own.py:scaled", "--lr-schedule=own.py:falls", "--lr=0.5")
    rates = []
    for step in range(3):
        train(step, state.net)
        state.update(64)
        rates.append([group["lr"] for group in state.optimizer.param_groups])
    factors = [min(1, (step + 1) / 4) * (1 - step / 30) for step in range(3)]  # 10 steps an epoch, 3 epochs
    assert rates == [[0.5 * f, 0.5 * f * 0.1] for f in factors]


@pytest.mark.parametrize(
    "flag, words",
    [
        ("--optimizer=own.py:half", "2.weight trains, but is in no group"),
        ("--optimizer=own.py:faster", "its lr=0.5 cannot take effect, --lr is 0.001"),
        ("--lr=0.5 --optimizer=own.py:slower", "its lr=0.001 cannot take effect, --lr is 0.5"),
        ("--optimizer=own.py:nothing", "return a torch.optim.Optimizer"),
        ("--optimizer-args=foreach=True,fused=True", "cannot be `True` together"),
        ("--optimizer-args=lr=1", "lr is a flag, too"),
        ("--lr-schedule=own.py:wrong", "returned -1.0 for step 0"),
        ("--optimizer=muon", "Muon only supports 2D"),
        # in the first step
        ("--optimizer=own.py:lbfgs", "closure"),
        ("--optimizer-args=amsgrad='x'", "optimizer adam: TypeError"),
    ],
)
def test_an_optimizer_or_a_schedule_that_cannot_be_right_is_refused(own, flag, words):
    with refusal(words):
        state = own(*flag.split())
        train(0, state.net)
        state.update(8)


def test_moments_of_a_weight_stay_if_it_is_frozen_and_are_not_dropped_if_its_group_lacks_it():
    net = nn.Linear(2, 2)
    names = {p: name for name, p in net.named_parameters()}
    before = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    before.step()
    saved = named_state(before, names)
    net.bias.requires_grad_(False)
    again = torch.optim.Adam(net.parameters())
    take_state(again, names, saved)
    assert torch.equal(again.state[net.bias]["exp_avg"], before.state[net.bias]["exp_avg"])
    with refusal("bias/.*is in the checkpoint, but bias is in no group.*\n.*frozen may stay there"):
        take_state(torch.optim.Adam([net.weight]), names, saved)
    before.state[net.weight][0] = torch.ones(1)
    with refusal("has a key 0"):
        named_state(before, names)


def test_flags_of_the_update_rule_reach_it(own):
    for flags, name, wanted in [
        (["--optimizer=AdamW", "--optimizer-args=betas=(0.8,0.95)"], "betas", (0.8, 0.95)),
        (["--optimizer=adamw"], "fused", True),
        (["--optimizer=rmsprop", "--momentum=0.5"], "momentum", 0.5),
        (["--optimizer=adadelta"], "lr", 1.0),
    ]:
        assert own(*flags).optimizer.defaults[name] == wanted
    groups = own("--weight-decay=0.1", "--no-decay-1d").optimizer.param_groups
    assert [(group["weight_decay"], [p.dim() for p in group["params"]]) for group in groups] == [
        (0.1, [2] * 2),
        (0.0, [1] * 2),
    ]
