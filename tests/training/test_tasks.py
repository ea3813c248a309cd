"""Tasks: means over what counts, of one's own, too; what cannot be is refused in three lines."""

import pytest
import torch
from refusals import refusal
from samples import ALONE, Steps
from torch import nn

from common.extras.tasks import loss_of
from common.options import Options
from common.training import find_task

OWN = """
import torch
def loss(net, batch):
    x, y = batch
    out = net(x)
    error = (out.squeeze(1) - y).square()
    last = len(y) == 8
    {body}
{more}
"""
GOOD = "return {'loss': (error.sum(), len(y))}"


@pytest.mark.parametrize(
    "body, more, given, words",
    [
        # in the first step
        ("return error.mean()", "", {}, "wanted each time"),
        ("return {'loss': (error.sum(), len(y)), 'n': torch.ones(2)}", "", {}, "n: numbers without a count"),
        ("return {'loss': (out.summ(), len(y))}", "", {}, "own.py, line 8"),
        (GOOD, "", {"best": "f1"}, "the task has no 'f1'"),
        (GOOD, "def finish(m): return m['f1']", {}, "own.py, line 9"),
        # in a later step
        ("return {'loss': (error.sum(), len(y))} | ({} if last else {'more': (1, 1)})", "", {}, "KeyError"),
        (
            "return {'loss': (error.sum(), len(y)), 'n': torch.ones(2 if last else 1).int()}",
            "",
            {},
            "one shape",
        ),
        ("return {'loss': (error.sum().item(), len(y))}", "", {}, "loss has no gradient, but counts 11"),
        ("return {'loss': (error.sum(), float('nan') if last else 1.0)}", "", {}, "the loss is nan"),
    ],
)
def test_a_task_that_cannot_work_ends_the_run_in_three_lines(tmp_path, body, more, given, words):
    (tmp_path / "own.py").write_text(OWN.format(body=body, more=more))
    opts = Options(task=f"{tmp_path}/own.py:loss", **given)
    steps = Steps(nn.Linear(6, 1), opts, ALONE, task=find_task(opts))
    with refusal(words, code=5 if "nan" in words else 2):
        for size in (11, 8):
            batch = steps.batch(torch.ones(size, 6), torch.zeros(size))
            steps.state.note(steps.step(batch))
    assert "nan" not in words or steps.state.invalid, "nothing is kept"


def test_a_mean_with_a_count_and_a_sum_without_one_are_refused():
    x = torch.ones(3, requires_grad=True)
    with refusal("the loss is a mean"):
        find_task(Options()).minimised({"loss": (x.square().mean(), 3)})
    with refusal("the loss is a sum, of how many things"):
        loss_of(x.square().sum(), None, 3)


def test_a_count_of_zero_everywhere_moves_nothing_and_is_left_out():
    opts = Options(task="tokens")
    net = nn.Embedding(7, 7)
    before = net.weight.clone()
    steps = Steps(net, opts, ALONE)
    x = torch.randint(7, (2, 4))
    record = steps.state.note(steps.step(steps.batch(x, torch.full_like(x, -100))))
    assert not {"loss", "acc"} & {*record} and record["step"] == 1
    assert torch.equal(before, net.weight)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["classify", "tokens"])
def test_sequences_have_the_mean_over_their_targets_or_over_those_that_count(name, training):
    task = find_task(Options(task=name))
    net = nn.Embedding(7, 7).double()
    x, y = torch.randint(7, (2, 4, 9))
    if name == "tokens":
        y[:, ::2] = -100
    counts = y != -100
    out = net(x)[counts]
    loss = nn.functional.cross_entropy(out, y[counts]).item()
    wanted = {"loss": loss, "acc": (out.argmax(1) == y[counts]).double().mean().item()}
    for batch in ((x, y), {"input": x, "labels": y}):
        with torch.set_grad_enabled(training):
            values = task(net, batch)
        assert task.metrics(task.counted(values)) == pytest.approx(wanted, rel=1e-9)
