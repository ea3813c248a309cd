"""common/models/checks.py: nets that cannot be trained, or whose checkpoints would not hold all of them."""
import sys

import pytest
import torch
from test_models import ROWS, build, refusal
from torch import nn


class Flawed(nn.Module):
    """Trains as it is; `give` puts something into it."""

    def __init__(self, give):
        super().__init__()
        self.layer = nn.Linear(10, 2)
        give(self)

    def forward(self, x):
        return self.layer(x)


class Extra(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def get_extra_state(self):
        return self.answer()


@pytest.fixture
def given(tmp_path, monkeypatch):
    """--model of a net that got something."""
    def make(give):
        text = "def net(data):\n    import test_checks\n    return test_checks.NET()\n"
        (tmp_path / "mine.py").write_text(text)
        monkeypatch.setattr(sys.modules[__name__], "NET", lambda: Flawed(give), raising=False)
        monkeypatch.setitem(sys.modules, "test_checks", sys.modules[__name__])
        return f"{tmp_path}/mine.py:net"
    return make


def frozen(net):
    net.requires_grad_(False)


@pytest.mark.parametrize("give, said", [
    (lambda net: net.add_module("lazy", nn.LazyLinear(3)), "lazy.weight has no size yet"),
    (lambda net: net.add_module("far", nn.Linear(3, 3, device="meta")), "far.weight has no values"),
    (lambda net: net.add_module("table", nn.Embedding(4, 3, sparse=True)), "table makes sparse gradients"),
    (lambda net: net.register_buffer("few", torch.eye(3).to_sparse()), "few is sparse (torch.sparse_coo)"),
    (lambda net: net.add_module("kept", Extra(lambda: {"count": 1})), "kept._extra_state (dict)"),
    (lambda net: net.add_module("kept", Extra(lambda: torch.ones(3))), "kept._extra_state (Tensor)"),
    (frozen, "no weight of it trains"),
], ids=["lazy", "meta", "sparse", "layout", "extra", "fresh", "frozen"])
def test_a_net_that_could_not_train_or_resume_is_refused_before_the_first_step(given, give, said):
    assert said in refusal(given(give), ROWS)


def test_a_net_without_weights_is_refused_too(tmp_path):
    (tmp_path / "mine.py").write_text("import torch\n\ndef net(data):\n    return torch.nn.Flatten()\n")
    assert "no weight of it trains" in refusal(f"{tmp_path}/mine.py:net", ROWS)


def test_what_a_net_freezes_as_it_is_set_to_training_is_frozen_before_the_optimizer_is_built(given):
    def give(net):
        net.kept, net.train = nn.Linear(3, 3), lambda mode=True: net.kept.requires_grad_(False)
    assert not build(given(give), ROWS).kept.weight.requires_grad


def test_extra_state_in_the_nets_own_memory_is_fine(given):
    own = torch.ones(3)
    build(given(lambda net: net.add_module("kept", Extra(lambda: own))), ROWS)


def test_an_expanded_buffer_gets_memory_of_its_own_and_stays_tied(given):
    def give(net):
        net.register_buffer("wide", torch.ones(1).expand(8))
        net.layer.register_buffer("same", net.wide)
    net = build(given(give), ROWS)
    net.wide.copy_(torch.arange(8))
    assert net.layer.same.tolist() == [*range(8)]
