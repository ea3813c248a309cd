"""What a net begins with: weights from elsewhere, whole or in part, and layers that stand still."""

import os
from pathlib import Path

import pytest
import torch
from poisoned import Bomb
from refusals import refusal
from samples import Facts, state_of

from common.models import build_model
from common.options import Options

FACTS = Facts("rows", 4, (3, 8, 8))
OWN = """
from torch import nn

def net(data, classes=4):
    first = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    return nn.Sequential(*first, nn.Dropout(), nn.Flatten(), nn.Linear(144, classes))

class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 2)

def named(data):
    return Named()

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight

def tied(data):
    return Tied()
"""


@pytest.fixture
def build(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name="net", **flags: build_model(Options(model=f"own.py:{name}", **flags), FACTS)


def same(net, weights):
    return all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize(
    "form",
    [
        lambda w: w,
        lambda w: {"state_dict": w, "epoch": 3},
        lambda w: {"model": w},
        lambda w: {"module._orig_mod." + n: t for n, t in w.items()},
        lambda w: {n.replace("0.", "0._orig_mod."): t for n, t in w.items()},
    ],
)
def test_foreign_weights_come_in_bare_or_wrapped(build, form):
    foreign = build(seed=7).state_dict()
    torch.save(form(foreign), "w.pt")
    assert not same(build(), foreign) and same(build(init_from="w.pt"), foreign)


def test_a_net_that_has_a_child_called_module_keeps_its_names(build):
    torch.save(build("named", seed=7).state_dict(), "w.pt")
    assert same(build("named", init_from="w.pt"), build("named", seed=7).state_dict())


def test_tied_weights_may_be_in_the_file_under_one_of_their_names(build):
    foreign = build("tied", seed=7).state_dict()
    for dropped in ("words.weight", "head.weight"):
        torch.save({n: t for n, t in foreign.items() if n != dropped}, "w.pt")
        assert same(build("tied", init_from="w.pt"), foreign), dropped


def test_a_head_of_another_size_begins_afresh_and_the_rest_does_not(build):
    other = {"4.weight": torch.ones(9, 144), "4.bias": torch.ones(9), "4.more": torch.ones(1)}
    torch.save(build(seed=7).state_dict() | other, "w.pt")
    with refusal(
        r"3 tensors do not fit this model, the first: 4.bias \(in the file \(9,\) of real "
        r"numbers, in the model \(4,\)(.|\n)*--init-skip 4\."
    ):
        build(init_from="w.pt")
    net = build(init_from="w.pt", init_skip=("4.",))
    assert same(net[:4], build(seed=7)[:4].state_dict()) and same(net[4], build()[4].state_dict())
    with refusal("no weight's name begins with 'fc.'\nthere are 0, 1, 4"):
        build(init_from="w.pt", init_skip=("4.", "fc."))


@pytest.mark.parametrize(
    "content, said",
    [
        (lambda w: Bomb(), "not a file of weights"),
        (lambda w: w | {"module.0.weight": torch.zeros(2, 3)}, "twice"),
        (lambda w: w | {"more": torch.zeros(1)}, r"in the model absent"),
        (lambda w: w | {"0.weight": w["0.weight"].char()}, "in the file .* of whole numbers"),
    ],
)
def test_foreign_files_that_would_load_as_other_numbers_are_refused_and_run_nothing(build, content, said):
    torch.save(content(build(seed=7).state_dict()), "w.pt")
    with refusal(said):
        build(init_from="w.pt")
    assert not os.path.exists("canary")


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_what_is_no_file_of_weights_is_refused(build, name):
    Path(name).write_bytes(b"no file of weights")
    with refusal("not a file of weights"):
        build(init_from=name)


def test_a_frozen_layer_has_no_state_and_stays_in_evaluation_mode(build):
    net = build(freeze=("0.", "1."))
    state = state_of(net, Options(optimizer="adamw", ema_decay=0.9))
    net(torch.zeros(2, 3, 8, 8)).sum().backward()
    state.update(2)
    of = {name.partition("/")[0] for name in state.tensors()["optimizer"] if not name.endswith("ema")}
    assert of == {"4.weight", "4.bias"}
    net.eval()
    state.modes.restore()  # as at the begin of each epoch
    assert not net[1].training and net[2].training


def test_freezing_what_is_not_there_is_refused(build):
    with refusal("--freeze: no weight's name begins with 'conv'\nthere are 0, 1, 4"):
        build(freeze=("0.", "conv"))
