"""The language model: a file of bytes in, one prediction a byte, and the exact-mean law for samples of many
tokens.
"""
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ranks import fork_ranks

from common.data import batches, load_data
from common.errors import UserError
from common.models import build_model
from common.options import Options
from common.sampler import ElasticSampler
from common.training import TrainState, backward, build_optimizer, distribute, evaluate
from common.world import World

TEXT = ("the quick brown fox jumps over the lazy dog; " * 60).encode()
ALONE = World(0, 1, 0, 1, 0, (torch.device("cpu"),), "life", 0)


def options(path, **more):
    return Options(dataset="text:16", data_dir=str(path), model="gpt:2x2x16", global_batch_size=10, **more)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(TEXT)
    return file


def test_every_byte_but_the_first_is_predicted_once_an_epoch(path):
    data = load_data(options(path), ALONE)
    x, y = data.train.fetch(range(len(data.train)))
    assert bytes(x.flatten().tolist()) == TEXT[:x.numel()] and bytes(y.flatten().tolist()) == TEXT[1:x.numel()
                                                                                                   + 1]
    assert (len(TEXT) * 0.9 - x.numel() <= 17 and data.classes == data.vocab == 256
            and data.sample_shape == (16,))
    assert data.train.fetch([])[0].shape == (0, 16)


def test_gpt_predicts_from_the_past_alone(path):
    opts = options(path)
    net = build_model(opts, load_data(opts, ALONE)).eval()
    x = torch.arange(16)[None]
    later = x.clone()
    later[0, 9:] = 7
    assert torch.allclose(net(x)[0, :9], net(later)[0, :9],
                          atol=1e-6) and not torch.allclose(net(x), net(later), atol=1e-3)


def gradient(world, path, dtype=torch.float64):
    """Of one ragged batch, by name, and the loss of a whole evaluation."""
    opts = options(path, micro_batch_size=3)
    data = load_data(opts, world)
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
    data = load_data(opts, ALONE)
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


def test_gpt_learns_a_sentence_by_heart(path):
    opts = options(path, lr=3e-3)
    data = load_data(opts, ALONE)
    net = build_model(opts, data)
    state = TrainState(net, build_optimizer(net, opts), opts, len(data.train))
    for epoch in range(6):
        order = ElasticSampler(data.train, 10)
        order.set_epoch(epoch)
        for batch in batches(data.train, order, opts):
            backward(net, batch, state, ALONE)
            state.update(batch.size)
    # the first bytes of a window cannot be known
    assert evaluate(net, data.test, state, ALONE)["val_acc"] > 0.6


@pytest.mark.parametrize("name, dataset, text, said", [
    ("gpt:5", "text:16", TEXT, "LxHxD"), ("gpt:1x3x16", "text:16", TEXT, "multiple"),
    ("gpt", "random", None, "--dataset text"),
    ("gpt", "text:0", TEXT, "1 to 999999"), ("gpt", "text", b"short", "bytes"),
    ("gpt", "text", None, "No such file"),
    ("net", "text:16", TEXT, "gpt"), ("resnet18", "text:16", TEXT, "gpt")])
def test_what_cannot_be_is_said_in_three_lines(tmp_path, name, dataset, text, said):
    if text:
        (tmp_path / "text").write_bytes(text)
    opts = Options(dataset=dataset, data_dir=str(tmp_path / "text"), model=name)
    with pytest.raises(UserError, match=said) as caught:
        build_model(opts, load_data(opts, ALONE))
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("kind", [torch.uint16, torch.int32])
def test_a_file_of_tokens_is_not_read_as_text_but_a_text_with_a_few_zeros_is(tmp_path, path, kind):
    ranks = torch.rand(4000, generator=torch.Generator().manual_seed(1))
    tokens = (50_257 ** ranks).to(kind)  # as words are: the n-th one with a probability of 1/n
    path.write_bytes(bytes(tokens.view(torch.uint8).tolist()))
    with pytest.raises(UserError, match="is no text: .* bytes are 0") as caught:
        load_data(options(path), ALONE)
    assert caught.value.code == 2 and len(str(caught.value).splitlines()) <= 3
    for text in (TEXT + b"\0\0", bytes(torch.randint(0, 256, (20_000,),
                                                     generator=torch.Generator().manual_seed(1)).tolist())):
        path.write_bytes(text)
        load_data(options(path), ALONE)


def test_a_folder_in_place_of_a_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="Is a directory"):
        load_data(options(tmp_path), ALONE)


def test_a_users_function_may_return_the_stages(tmp_path):
    (tmp_path / "mine.py").write_text("from torch import nn\ndef stages(): return [nn.Linear(4, 3), "
                                      "nn.ReLU(), nn.Linear(3, 2)]\n")
    net = build_model(Options(model=f"{tmp_path}/mine.py:stages", seed=0), SimpleNamespace())
    assert isinstance(net, torch.nn.Sequential) and len(net) == 3
