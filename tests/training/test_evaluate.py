import threading

import pytest
import torch
from ranks import fork_ranks
from refusals import refusal
from samples import ALONE, state_of
from stores import a_life, at_step, resumes_at
from torch import nn

from common.data.samples import TensorSamples
from common.extras.tasks import OwnTask
from common.options import Options
from common.training import evaluate
from common.training.evaluate import BLOCK, SHOWN_SAMPLES


def split_of(n):
    torch.manual_seed(n)
    x = torch.randn(n, 5)
    return TensorSamples((x, torch.randint(0, 3, (n,))), Options(), 3)


def made():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3))


def metrics_of(world, n, size=0):
    net = made()
    state = state_of(net, Options(micro_batch_size=size), n)
    return evaluate(net, split_of(n), state, world, state.task)


@pytest.mark.parametrize("n", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_metrics_are_the_same_to_the_last_bit_at_every_world_and_count_each_sample_once(n):
    (alone,) = fork_ranks(1, metrics_of, n)
    split = split_of(n)
    net = made().eval()
    with torch.no_grad():
        out = net(split.x)
    assert alone["val_acc"] == (out.argmax(1) == split.y).sum().item() / n
    assert alone["val_loss"] == pytest.approx(nn.functional.cross_entropy(out, split.y).item(), abs=1e-5)
    assert ("predictions" in alone) == (n <= SHOWN_SAMPLES)
    assert "predictions" not in fork_ranks(1, metrics_of, n + 1, 1)[0], "samples that may fit no one batch"
    for world in (2, 5):
        found = fork_ranks(world, metrics_of, n)
        assert found == [alone] * world, "with the predictions and labels of a small set, on every rank"


def test_a_judge_that_returns_nothing_for_one_block_is_told_so():
    task = OwnTask(lambda net, batch: {"acc": (1, 1)} if len(batch[0]) < BLOCK else None, "the judge")
    net = nn.Linear(5, 3)
    with refusal("what the judge returned"):
        evaluate(net, split_of(BLOCK + 1), state_of(net, Options()), ALONE, task)


def test_a_save_that_is_still_being_written_holds_the_weights_and_not_what_they_become(opts):
    """--save-every falls on the last step of an epoch: its evaluation puts averages into the net at once."""
    changed = threading.Event()
    with a_life(opts) as life:
        write = life.store.saver.write
        life.store.saver.write = lambda *args: (changed.wait(20), write(*args))[1]
        at_step(life.state, 1)
        life.store.save()
        at_step(life.state, 2)
        changed.set()
    assert resumes_at(opts, 1)
