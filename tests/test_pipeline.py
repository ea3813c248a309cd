import pytest
import torch
from torch import nn

from common import UserError
from common.pipeline import balance, describe, split

CPU = torch.device("cpu")
META = torch.device("meta")


@pytest.mark.parametrize(("weights", "count", "placement"), [
    ([1, 1, 1, 1], 2, [0, 0, 1, 1]), ([5, 1, 1, 1], 2, [0, 1, 1, 1]), ([1, 1, 1, 5], 2, [0, 0, 0, 1]),
    ([1, 2, 3, 4, 5, 6], 3, [0, 0, 0, 1, 1, 2]), ([1, 1], 2, [0, 1]), ([1, 100, 1], 3, [0, 1, 2])])
def test_a_cut_is_contiguous_and_its_heaviest_stage_as_light_as_possible(weights, count, placement):
    assert balance(weights, count) == placement


def test_the_tutorials_net_has_block1_and_fc1_on_the_first_device_block2_and_fc2_on_the_second():
    from common.models import build_net
    net = build_net(type("D", (), dict(name="mnist", sample_shape=(1, 28, 28), classes=10, vocab=None)))
    stages = split(net, (CPU, META))
    places = {name.split(".")[0]: p.device.type for name, p in net.named_parameters()}
    assert places == {"block1": "cpu", "block2": "meta", "fc1": "cpu", "fc2": "meta"}
    assert describe(stages) == "stages: block1 on cpu  block2 on meta  fc1 on cpu  fc2 on meta"


def test_a_split_net_computes_what_the_whole_one_does_and_keeps_its_names():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh())
    names, x = list(net.state_dict()), torch.randn(6, 4)
    wanted = net(x)
    for devices in ((CPU, CPU), (CPU, CPU, CPU), (CPU,) * 4):
        stages = split(net, devices)
        assert torch.equal(stages(x), wanted)
        assert list(stages.net.state_dict()) == names


@pytest.mark.parametrize(("net", "devices"), [(nn.Sequential(nn.Linear(2, 2)), (CPU, CPU)), (nn.Linear(2, 2), (CPU, CPU)),
                                              (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (CPU,))])
def test_what_cannot_be_cut_is_refused_with_a_way_out(net, devices):
    with pytest.raises(UserError, match="--devices|--model"):
        split(net, devices)
