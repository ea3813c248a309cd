"""The language model: a file of bytes in, one prediction a byte."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from common.data import load_data
from common.models import build_model
from common.options import Options
from common.training import find_task

TEXT = ("the quick brown fox jumps over the lazy dog; " * 60).encode()


def options(path, **more):
    return Options(dataset="text:16", data_dir=str(path), model="gpt:2x2x16", global_batch_size=10, **more)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(TEXT)
    return file


def test_an_epoch_predicts_every_byte(path):
    data = load_data(options(path))
    x, y = data.train.fetch(range(len(data.train)))
    text = TEXT[: len(TEXT) - len(TEXT) // 10]
    assert bytes(x.flatten().tolist())[: len(text)] == text and x.numel() - len(text) < 16
    assert bytes(y.flatten().tolist()).startswith(text[1:] + text[:1])
    assert data.classes == data.vocab == 256 and data.sample_shape == (16,)


LOGGED = SimpleNamespace(next_is_logged=True)


def test_the_loss_and_the_accuracy_of_a_sample_are_means_over_its_tokens(path):
    opts = options(path, task="classify")
    data = load_data(opts)
    task = find_task(opts)
    net = build_model(opts, data).double()
    x, y = data.train.fetch(range(7))
    values = task(net, (x, y), SimpleNamespace(net=net, opts=opts, task=task, progress=LOGGED))
    out = net(x)
    assert task.metrics(task.add(task.zeros(torch.device("cpu")), values)) == pytest.approx(
        {
            "loss": F.cross_entropy(out.transpose(1, 2), y).item(),
            "acc": (out.argmax(-1) == y).double().mean().item(),
        },
        abs=1e-10,
    )
