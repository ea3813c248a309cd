import pytest
import torch
from ranks import fork_ranks
from torch import nn

from common.data import TensorSplit
from common.evaluate import BLOCK, evaluate
from common.options import Options
from common.state import TrainState, build_optimizer
from common.synthetic import Source


def split_of(n):
    torch.manual_seed(n)
    source = Source(train=None, test=None, classes=3)
    return TensorSplit(torch.randn(n, 5), torch.randint(0, 3, (n,)), source, 0)


def metrics_of(world, n, ema=0.0):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3))
    opts = Options(ema_decay=ema)
    state = TrainState(net, build_optimizer(net, opts), opts, n)
    if ema:
        for tensor in state.ema.values():
            tensor.zero_()
    return evaluate(net, split_of(n), state, world), net[0].weight.tolist()


@pytest.mark.parametrize("n", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_metrics_are_the_same_to_the_last_bit_at_every_world_and_count_each_sample_once(n):
    (alone, _), = fork_ranks(1, metrics_of, n)
    split = split_of(n)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Linear(7, 3)).eval()
    with torch.no_grad():
        out = net(split.x)
    assert alone["val_acc"] == (out.argmax(1) == split.y).sum().item() / n
    assert alone["val_loss"] == pytest.approx(nn.functional.cross_entropy(out, split.y).item(), abs=1e-5)
    keep = {"val_loss", "val_acc"}
    for world in (2, 3, 5):
        for found, _ in fork_ranks(world, metrics_of, n):
            assert {k: found[k] for k in keep} == {k: alone[k] for k in keep}


def test_averaged_weights_are_evaluated_and_the_net_keeps_its_own():
    (found, weight), = fork_ranks(1, metrics_of, 9, 0.9)
    assert found["val_loss"] == pytest.approx(1.0986, abs=1e-3)     # all zero: log 3
    assert found["predictions"] == [0] * 9
    assert any(weight[0])
