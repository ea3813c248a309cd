"""What decides bits and speed on GPUs: set, recorded, refused where it cannot take effect."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from ranks import fork_ranks
from refusals import refusal
from torch import nn

from common.errors import blamed
from common.options import Options
from common.training import gradients_of, prepare
from common.world import world as pinned


def kernels(_, flags):
    """(whether they are chosen by their speed, whether TF32 is allowed)."""
    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = False
    pinned.pin(Options(**flags))
    return torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    "flags, chosen",
    [({}, (True, False)), ({"tf32": True}, (True, True)), ({"virtual_ranks": 2}, (False, False))],
)
def test_kernels_are_chosen_by_their_speed_unless_bits_are_promised(flags, chosen):
    assert fork_ranks(1, kernels, flags) == [chosen]


def test_an_operation_that_torch_refuses_is_named_with_a_way_out():
    def live(_):
        pinned.pin(Options(virtual_ranks=2))
        said = "put_(.|\n)*replace the layer .*--debug .*--virtual-ranks"
        with refusal(said), blamed():  # as round a life
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))

    fork_ranks(1, live)


CUDNN = "one layer"  # it has a state of its own, which moves on with each forward and is in no checkpoint


@pytest.mark.parametrize(
    "device, flags, dropout, refused",
    [
        ("cpu", {"tf32": True}, 0.0, "--tf32 works on GPUs only"),
        ("cuda", {"virtual_ranks": 2}, 0.5, CUDNN),
        ("cuda", {"virtual_ranks": 2}, 0.0, ""),
        ("cuda", {}, 0.5, ""),
    ],
)
def test_what_a_device_cannot_do_or_cannot_do_again_is_refused(device, flags, dropout, refused):
    device = torch.device(device)
    world = SimpleNamespace(device=device, devices=(device,), rank=0, size=1)
    opts = Options(**flags)
    net = nn.LSTM(4, 4, num_layers=2, dropout=dropout)
    with refusal(refused) if refused else contextlib.nullcontext():
        prepare(net, opts, world)
        gradients_of(net, None, opts, world)


def test_a_layer_that_refuses_the_one_sample_of_a_process_says_how_to_resume():
    with refusal("a process had one sample: resume with fewer processes"), blamed():
        torch.nn.BatchNorm1d(2)(torch.ones(1, 2))
