import random

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal
from samples import Facts
from torch import nn

from common.extras.own_data import check_net
from common.models import build_model
from common.models.nets import MaxPool
from common.options import MODELS, Options

IMAGES = Facts("images", 10, (1, 28, 28))
ROWS = Facts("rows", 2, (10,))
WORDS = Facts("words", 2, (4,), 8)
TOKENS = Facts("tokens", 8, (4,), 8)
OWN = {"net": IMAGES, "mlp": ROWS, "lstm": WORDS, "gpt": TOKENS}


def build(model, data, **flags):
    return build_model(Options(model=model, **flags), data)


def refused(model, data=IMAGES):
    with refusal() as told:
        build(model, data)
    return str(told.value)


def images(data):
    return torch.rand(3, *data.sample_shape, generator=torch.Generator().manual_seed(1))


def test_net_computes_what_the_tutorials_network_computes():
    net = build("net", IMAGES).eval()
    x = images(IMAGES)
    w1, b1, w2, b2, w3, b3, w4, b4 = net.parameters()
    y = torch.relu(torch.max_pool2d(F.conv2d(x, w1, b1), 2))
    y = torch.relu(torch.max_pool2d(F.conv2d(y, w2, b2), 2)).view(-1, 320)
    y = F.linear(torch.relu(F.linear(y, w3, b3)), w4, b4)
    torch.testing.assert_close(net(x), torch.log_softmax(y, dim=1))


def test_pooling_and_its_gradient_have_the_bits_of_torchs_own_also_where_pixels_are_equal():
    def both(x, pool):
        x = x.clone().requires_grad_()
        out = pool(x)
        out.backward(torch.arange(out.numel()).view_as(out).to(x))
        return out.detach(), x.grad

    grid = torch.randn(3, 5, 9, 8, generator=torch.Generator().manual_seed(0))
    special = torch.tensor([[[[torch.nan, 1, -torch.inf], [torch.inf, torch.nan, 2]]]])
    last = grid.contiguous(memory_format=torch.channels_last)
    for x in (grid, grid.double(), grid.bfloat16(), grid.round(), last, grid[:0], special):
        torch.testing.assert_close(
            both(x, MaxPool()), both(x, nn.MaxPool2d(2)), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("name", MODELS)
def test_every_net_may_be_cut_between_any_two_of_its_children(name):
    net = build(name, OWN[name])
    assert type(net) is nn.Sequential and len(net) > 1


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_the_seed_alone_and_no_generator_moves(name):
    before = torch.get_rng_state(), random.getstate()
    first, other = (weights_of(name, seed) for seed in (3, 4))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    torch.rand(5)
    assert torch.equal(first, weights_of(name, 3)) and not torch.equal(first, other)


def weights_of(name, seed):
    return nn.utils.parameters_to_vector(build(name, OWN[name], seed=seed).parameters())


@pytest.mark.parametrize(
    "model, shape", [("net", (3, 33, 34)), ("resnet18", (1, 64, 64)), ("densenet121", (1, 64, 64))]
)
def test_a_net_takes_the_datas_channels_sizes_and_classes(model, shape):
    data = Facts("other", 7, shape)
    assert build(model, data)(images(data)).shape == (3, 7)


@pytest.mark.parametrize(
    "model, data", [("lstm", IMAGES), ("net", WORDS), ("net", ROWS), ("gpt", IMAGES), ("resnet19", IMAGES)]
)
def test_a_model_that_cannot_be_built_for_the_data_is_refused(model, data):
    said = refused(model, data)
    assert f"model {model}" in said and data.name in said and "choose another" in said


def test_a_users_function_gets_as_many_facts_as_it_requires(tmp_path):
    (tmp_path / "sizes.py").write_text("hidden = 3\n")
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\nfrom sizes import hidden\n"
        "def none(width=10): return nn.Linear(width, hidden)\n"
        "def one(data, width=hidden): return nn.Linear(data.sample_shape[0], width)\n"
        "def two(opts, data): assert opts.seed == 5; return nn.Linear(data.sample_shape[0], 3)\n"
    )
    weights = [build(f"{path}:{name}", ROWS, seed=5).weight for name in ("none", "one", "two")]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


BUILDS = """
from torch import nn

class Extra(nn.Module):
    def get_extra_state(self):
        return {"count": 1}

def build():
    net = nn.Sequential(nn.Linear(10, 2))
"""


@pytest.mark.parametrize(
    "text, said",
    [
        ("def other(): pass\n", "no attribute 'build'"),
        ("def build(): return 7\n", "'int' object has no attribute"),
        ("\n\ndef build(:\n", "line 3: def build("),
        ("def build():\n    return 1 / 0\n", "line 2: return 1 / 0"),
        ("def build(a, b, c): pass\n", "missing 1 required positional argument"),
        # its training, or its checkpoints, would lack something
        (BUILDS + "    return net.append(Extra())\n", "its state_dict makes 1._extra_state anew"),
        (BUILDS + "    return net.requires_grad_(False)\n", "no weight of it trains"),
    ],
)
def test_what_is_wrong_in_a_users_file_is_said_before_the_first_step_with_its_line(tmp_path, text, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    told = refused(f"{path}:build", ROWS)
    assert said in told and str(path) in told


def test_a_weight_with_holes_gets_memory_of_its_own_because_fused_optimizers_write_beside_it():
    large = torch.zeros(4, 6)
    net = nn.Linear(3, 4, bias=False)
    net.weight = nn.Parameter(large[:, ::2])
    check_net(net, "mine")
    net(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(net.parameters(), 1.0, fused=True).step()
    assert (net.weight == -1).all() and not large.any()


def test_a_frozen_batch_norm_stays_so_under_sync_bn(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef f(data): return nn.Sequential(nn.Linear(10, 2), nn.BatchNorm1d(2))\n"
    )
    net = build(f"{tmp_path}/mine.py:f", ROWS, sync_bn=True, freeze=("1.",))
    assert isinstance(net[1], nn.SyncBatchNorm) and not net[1].training
