"""What decides bits and speed on GPUs: set, recorded, refused where it cannot take effect."""
import importlib
from types import SimpleNamespace

import pytest
import torch

from common.errors import UserError
from common.options import Options, parse_options
from common.training import prepare
from common.world import bit_facts

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
        prepare(torch.nn.Linear(2, 2), Options(tf32=True), world, None)


def test_variables_that_choose_a_gpus_kernels_are_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    gpu, cpu = (bit_facts(Options(virtual_ranks=2), SimpleNamespace(device=torch.device(kind)))
                for kind in ("cuda", "cpu"))
    assert "a GPU" in gpu["gpu"] and "NVIDIA_TF32_OVERRIDE=0" in gpu["gpu"] and "gpu" not in cpu


def test_a_gpu_without_a_number_is_the_first():
    assert parse_options("", ["--devices=cuda,cuda:1"], script="mp").devices == ("cuda:0", "cuda:1")
