import random

import pytest
import torch
import torch.nn.functional as F
from refusals import refusal
from samples import Facts
from torch import nn

from common.extras.own_data import check_net
from common.extras.rules import torchvision_models
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


def samples(data, n=3):
    x = torch.rand(n, *data.sample_shape, generator=torch.Generator().manual_seed(1))
    return (x * data.vocab).long() if data.vocab else x


def test_net_computes_what_the_tutorials_network_computes():
    net = build("net", IMAGES).eval()
    assert sum(p.numel() for p in net.parameters()) == 21840
    assert [name for name, _ in net.named_children()] == ["block1", "block2", "fc1", "fc2"]
    x = samples(IMAGES)
    w1, b1, w2, b2, w3, b3, w4, b4 = net.parameters()
    y = torch.relu(torch.max_pool2d(F.conv2d(x, w1, b1), 2))
    y = torch.relu(torch.max_pool2d(F.conv2d(y, w2, b2), 2)).view(-1, 320)
    y = F.linear(torch.relu(F.linear(y, w3, b3)), w4, b4)
    torch.testing.assert_close(net(x), torch.log_softmax(y, dim=1))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_pooling_and_its_gradient_have_the_bits_of_torchs_own_also_where_pixels_are_equal(kind):
    def both(x, pool):
        x = x.clone().requires_grad_()
        out = pool(x)
        out.backward(torch.arange(out.numel()).view_as(out).to(kind))
        return out.detach(), x.grad

    grid = torch.randn(3, 5, 9, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(kind)
    special = torch.tensor([[[[float("nan"), 1, -float("inf")], [float("inf"), float("nan"), 2]]]]).to(kind)
    last = grid.contiguous(memory_format=torch.channels_last)
    for x in (grid, grid.round(), torch.zeros_like(grid), last, grid[:0], special):
        mine = both(x, MaxPool())
        torchs = both(x, torch.nn.MaxPool2d(2))
        torch.testing.assert_close(mine, torchs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("side", [16, 33])
def test_net_fits_images_of_any_size_and_number_of_channels(side):
    data = Facts("other", 7, (3, side, side + 1))
    assert build("net", data)(samples(data)).shape == (3, 7)


@pytest.mark.parametrize("name", MODELS)
def test_every_net_may_be_cut_between_any_two_of_its_children(name):
    net = build(name, OWN[name]).eval()
    x = samples(OWN[name])
    assert isinstance(net, torch.nn.Sequential) and len(net) > 1
    for cut in range(len(net) + 1):
        assert torch.equal(net[cut:](net[:cut](x)), net(x))


@pytest.mark.parametrize("name", MODELS)
def test_weights_depend_on_the_seed_alone_and_no_generator_moves(name):
    before = torch.get_rng_state(), random.getstate()
    first = build(name, OWN[name], seed=3).state_dict()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    torch.rand(5)
    again = build(name, OWN[name], seed=3).state_dict()
    other = build(name, OWN[name], seed=4).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_torchvision_models_take_the_datas_channels_and_classes(name):
    data = Facts("grey", 7, (1, 64, 64))
    net = build(name, data)
    assert net.training and next(p for p in net.parameters()).shape[1] == 1
    assert net(samples(data)).shape == (3, 7)


def test_a_name_that_nothing_answers_to_is_refused():
    assert "Unknown model resnet19" in refused("resnet19")
    assert "fasterrcnn_resnet50_fpn" not in torchvision_models()  # a detector


@pytest.mark.parametrize("model, data", [("lstm", IMAGES), ("net", WORDS), ("net", ROWS), ("gpt", IMAGES)])
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


@pytest.mark.parametrize(
    "text, name, said",
    [
        ("def other(): pass\n", "build", "no attribute 'build'"),
        ("def build(): return 7\n", "build", "'int' object has no attribute"),
        ("\n\ndef build(:\n", "build", "line 3: def build("),
        ("def build():\n    return 1 / 0\n", "build", "line 2: return 1 / 0"),
        ("def build(a, b, c): pass\n", "build", "missing 1 required positional argument"),
    ],
)
def test_what_is_wrong_in_a_users_file_is_said_with_its_line(tmp_path, text, name, said):
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert said in refused(f"{path}:{name}") and str(path) in refused(f"{path}:{name}")


# ---- nets whose training, or checkpoints, would lack something --------------------------------------------
FLAWED = """
import torch
from torch import nn

class Extra(nn.Module):
    def get_extra_state(self):
        return {"count": 1}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 2)
        net = self
        CHANGE

def build(data):
    return Net()
"""


@pytest.mark.parametrize(
    "change, said",
    [
        ("net.more = nn.LazyLinear(3)", "Attempted to use an uninitialized parameter"),
        ("net.more = nn.Linear(3, 3, device='meta')", "Cannot copy out of meta tensor"),
        ("net.kept = Extra()", "its state_dict makes kept._extra_state anew"),
        ("net.requires_grad_(False)", "no weight of it trains"),
    ],
)
def test_a_net_that_could_not_train_or_resume_is_refused_before_the_first_step(tmp_path, change, said):
    (tmp_path / "mine.py").write_text(FLAWED.replace("CHANGE", change))
    assert said in refused(f"{tmp_path}/mine.py:build", ROWS)


def test_an_expanded_buffer_gets_memory_of_its_own_and_stays_tied(tmp_path):
    change = (
        "wide = torch.ones(1).expand(8); net.register_buffer('wide', wide); "
        "net.layer.same = nn.Module(); net.layer.same.register_buffer('too', net.wide)"
    )
    (tmp_path / "mine.py").write_text(FLAWED.replace("CHANGE", change))
    net = build(f"{tmp_path}/mine.py:build", ROWS)
    net.wide.copy_(torch.arange(8))
    assert net.layer.same.too.tolist() == [*range(8)]


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
