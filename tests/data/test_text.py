"""The language model: a file of bytes in, one prediction a byte, and the exact-mean law for samples of many
tokens.
"""
import pytest
import torch
import torch.nn.functional as F
from ranks import fork_ranks

from common.data import batches, load_data
from common.models import build_model
from common.options import Options
from common.sampler import ElasticSampler
from common.training import TrainState, backward, build_optimizer, distribute, evaluate

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
    text = TEXT[:len(TEXT) - len(TEXT) // 10]
    assert bytes(x.flatten().tolist())[:len(text)] == text and x.numel() - len(text) < 16
    assert bytes(y.flatten().tolist()).startswith(text[1:] + text[:1])
    assert data.classes == data.vocab == 256 and data.sample_shape == (16,)


def gradient(world, path, dtype=torch.float64):
    """Of one ragged batch, by name, and the loss of a whole evaluation."""
    opts = options(path, micro_batch_size=3, task="classify")
    data = load_data(opts)
    net = build_model(opts, data).to(dtype)
    state = TrainState(net, build_optimizer(net, opts), opts, len(data.train))
    order = ElasticSampler(data.train, 10, world.rank, world.size)
    order.set_epoch(0, len(data.train) - 7)
    for batch in batches(data.train, order, opts):
        totals = world.all_sum(backward(distribute(net, opts, world), batch, state, world))
    return {n: p.grad for n, p in net.named_parameters()}, totals.tolist(), evaluate(net, data.test, state,
                                                                                     world)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gradient_is_the_mean_over_samples_of_the_mean_over_tokens(path, size):
    grads, totals, metrics = fork_ranks(size, gradient, path)[0]
    opts = options(path)
    data = load_data(opts)
    net, order = build_model(opts, data).double(), ElasticSampler(data.train, 10)
    order.set_epoch(0, len(data.train) - 7)
    x, y = data.train.fetch(next(iter(order)))
    loss = F.cross_entropy(net(x).transpose(1, 2), y)
    loss.backward()
    assert abs(totals[0] / 7 - loss.item()) < 1e-10
    assert all((p.grad - grads[n]).abs().max() < 1e-10 for n, p in net.named_parameters())
    x, y = data.test.fetch(range(len(data.test)))
    out = net(x).detach()
    assert metrics["val_loss"] == pytest.approx(F.cross_entropy(out.transpose(1, 2), y).item(), abs=1e-6)
    assert metrics["val_acc"] == pytest.approx((out.argmax(-1) == y).double().mean().item(), abs=1e-12)
