"""What decides bits and speed on GPUs: set, recorded, refused where it cannot take effect."""
import contextlib
import importlib
from types import SimpleNamespace

import pytest
import torch
from samples import share_of
from torch import nn

from common.errors import UserError, explained
from common.options import Options
from common.pipeline import split
from common.training import TrainState, backward, build_optimizer, distribute, find_task, prepare
from common.world import World, bit_differences, bit_facts

pinned = importlib.import_module("common.world.determinism")


@pytest.fixture(autouse=True)
def as_it_was():
    was = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32, torch.get_num_threads()
    yield
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32, threads = was
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("flags, benchmark, tf32", [({}, True, False), ({"tf32": True}, True, True),
                                                    ({"virtual_ranks": 2}, False, False)])
def test_kernels_are_chosen_by_their_speed_unless_bits_are_promised(flags, benchmark, tf32):
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = False
    pinned.pin(Options(**flags))
    assert torch.backends.cudnn.benchmark is benchmark and torch.backends.cuda.matmul.allow_tf32 is tf32


def test_tf32_is_refused_without_a_gpu():
    world = SimpleNamespace(devices=(torch.device("cpu"),), device=torch.device("cpu"))
    with pytest.raises(UserError, match="--tf32 works on GPUs only"):
        prepare(torch.nn.Linear(2, 2), Options(tf32=True), world, None, None)


def test_what_must_be_equal_for_equal_bits_is_refused_and_the_rest_warned_of():
    was = {"threads": 1, "torch": "2.11"}
    firm, soft = bit_differences(was, {"threads": 2, "torch": "2.15", "cpu": "AVX2"})
    assert firm == ["CPU threads per process was 1, now 2"] and soft == ["build of torch was 2.11, now 2.15"]
    assert bit_differences(was, was) == ([], []) and bit_facts(Options(), None) == {}


class Pool(torch.autograd.Function):
    """A backward that torch refuses as it refuses adaptive_avg_pool2d's on a GPU: with its words."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError(
            "adaptive_avg_pool2d_backward_cuda does not have a deterministic implementation, but you set "
            "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this")


class Refused(nn.Linear):
    """`forward`: torch refuses this operation on CPUs, too."""

    def __init__(self, where):
        super().__init__(4, 2)
        self.where = where

    def forward(self, x):
        y = super().forward(x)
        if self.where == "backward":
            return Pool.apply(y)
        return y.put_(torch.tensor([0]), y.new_zeros(1)) if torch.is_grad_enabled() else y


def refused(where, script):
    opts = Options(script=script, virtual_ranks=2, global_batch_size=4)
    pinned.pin(opts)
    x, y, net = torch.randn(4, 4), torch.arange(4) % 2, nn.Sequential(nn.Linear(4, 4), Refused(where))
    samples = type("Split", (), {"fetch": lambda self, ids: (x[ids], y[ids]), "__len__": lambda self: 4})()
    world = World(0, 1, 0, 1, 0, (torch.device("cpu"),) * (1 + (script == "mp")), "life", 0)
    with pytest.raises((UserError, RuntimeError)) as caught:
        if script == "mp":  # measuring the pieces meets it
            split(net, opts, world, SimpleNamespace(train=samples), find_task(opts))
        state = TrainState(net, build_optimizer(net, opts), opts, 4)
        backward(distribute(net, opts, world), share_of(x, y, opts), state, world)
    return str(explained(caught.value))  # as the guard round a life does


@pytest.mark.parametrize(("where", "script", "name"), [
    ("forward", "ddp", "put_"), ("backward", "ddp", "adaptive_avg_pool2d_backward_cuda"),
    ("forward", "mp", "put_"), ("backward", "mp", "adaptive_avg_pool2d_backward_cuda")])
def test_an_operation_that_torch_refuses_is_named_with_a_way_out(where, script, name):
    text = refused(where, script)
    assert name in text and "--debug" in text and len(text.splitlines()) <= 3
    assert (script, where) == ("mp", "forward") or "--virtual-ranks" in text and "replace the layer" in text


def test_another_error_of_a_forward_is_told_as_it_is_with_its_line():
    class Wrong(nn.Linear):
        def forward(self, x):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    opts = Options(virtual_ranks=1, global_batch_size=4)
    net, world = Wrong(2, 2), World(0, 1, 0, 1, 0, (torch.device("cpu"),), "life", 0)
    state = TrainState(net, build_optimizer(net, opts), opts, 4)
    state.step = 1
    with pytest.raises(UserError, match=r"RuntimeError: mat1 and mat2(.|\n)*line \d+: raise"):
        backward(distribute(net, opts, world), share_of(torch.ones(4, 2), torch.ones(4), opts), state, world)


@pytest.mark.parametrize("flags, dropout, refused", [
    ({"virtual_ranks": 2}, 0.5, True), ({"script": "mp", "recompute": True}, 0.5, True),
    ({"virtual_ranks": 2}, 0.0, False), ({}, 0.5, False)])
def test_dropout_inside_an_rnn_is_refused_where_cudnn_would_draw_what_no_slice_seeds(flags, dropout, refused):
    """cuDNN has a state of its own, which moves on with each forward and is in no checkpoint."""
    gpu = SimpleNamespace(device=torch.device("cuda"), devices=(), stages=1)
    net = nn.LSTM(4, 4, num_layers=2, dropout=dropout)
    task = SimpleNamespace(try_out=lambda *_, **__: None)
    with pytest.raises(UserError, match="one layer") if refused else contextlib.nullcontext():
        prepare(net, Options(**flags), gpu, None, task, torch.device("cpu"))
