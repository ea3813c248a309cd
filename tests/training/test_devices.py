"""All that a step and an evaluation compute on a GPU has its numbers there."""

import importlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from fakes import fake_gpu
from ranks import fork_ranks
from samples import Samples, share_of, state_of
from torch import nn

from common.options import Options
from common.training import backward, distribute, evaluate
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


def live(world, norm, own, flags):
    world = replace(world, devices=(torch.device("cuda:0"),))
    for module in ("evaluate", "tasks"):  # the door has a function of the first name
        importlib.import_module(f"common.training.{module}").gather = lambda world, value: [value]
    opts = Options(global_batch_size=8, **flags)
    with fake_gpu() as made:
        net = made(lambda: net_of(norm()))
        x, y = torch.randn(8, 6), torch.arange(8) % 3
        state = state_of(net, opts)
        if own:
            state.task = task_of(loss, "own")
            state.task.learn(loss(net, (x.cuda(), y.cuda())))
        totals = backward(distribute(net, opts, world), share_of(x, y, opts), state, world)
        state.update(8)
        state.note(totals)
        evaluate(net, Samples(x, y), state, world)
        assert net[0].weight.is_cuda and totals.is_cuda
