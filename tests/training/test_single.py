"""A net that cannot train on one sample is refused before the first step where some step would ask that of
it.
"""
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from ranks import fork_ranks
from test_bitwise import CNN, GPT, NETS, RESNET, life, options
from torch import nn

import train_ddp
import train_dp
import train_mp
from common.data import load_data
from common.models import build_model
from common.options import Options
from common.sampler import share
from common.training import find_task
from common.training.prepare import forwards, takes_one

# of 107 samples
FLAT = {"model": f"{NETS}:flat", "dataset": f"{NETS}:pictures", "virtual_ranks": 0, "epochs": 1}
TWO = ("cpu", "cpu")


def takes(net, data):
    return takes_one(net, data, find_task(Options()), Options())


def test_the_sizes_of_forwards_are_those_of_shares_cut_into_micro_batches_and_scattered():
    for batch, parts, micro, devices in product(range(1, 24), range(1, 9), (0, 1, 2, 3, 7), (1, 2, 3)):
        shares = [range(batch)[r.start:r.stop] for r in (share(batch, rank, parts) for rank in range(parts))]
        micros = [t for s in shares if s for t in torch.tensor(s).split(micro or len(s))]
        wanted = {len(t) for m in micros for t in m.chunk(devices)}
        world = SimpleNamespace(replicas=parts, devices=("cpu",) * devices)
        opts = Options(virtual_ranks=0, micro_batch_size=micro, script="dp")
        assert forwards(batch, opts, world) - {0} == wanted, (batch, parts, micro, devices)
        slices = Options(virtual_ranks=parts)
        assert forwards(batch, slices, SimpleNamespace(replicas=1)) == set(map(len, shares))


def test_with_sync_bn_a_forward_has_the_samples_of_all_ranks():
    for batch, parts, micro in product(range(0, 24), range(2, 9), (0, 1, 2, 3, 7)):
        shares = [torch.arange(batch)[r.start:r.stop]
                  for r in (share(batch, rank, parts) for rank in range(parts))]
        opts, world = Options(sync_bn=True, micro_batch_size=micro), SimpleNamespace(replicas=parts)
        count = max(len(s.split(micro or batch or 1)) for s in shares)
        wanted = {sum(map(len, together))
                  for together in zip(*(s.tensor_split(count) for s in shares), strict=True)}
        assert forwards(batch, opts, world) - {0} == wanted - {0}, (batch, parts, micro)


@pytest.mark.parametrize("script, world, given, said", [
    (train_ddp, 1, {"global_batch_size": 53},
     "the last batch of an epoch, 1 of 107 samples, in one process leaves one"),
    (train_ddp, 2, {"global_batch_size": 52},
     "the last batch of an epoch, 3 of 107 samples, in 2 shares leaves one"),
    (train_ddp, 1, {"global_batch_size": 27, "virtual_ranks": 16},
     "a global batch of 27 in 16 slices leaves one"),
    (train_dp, 1, {"global_batch_size": 52, "script": "dp", "devices": TWO}, "3 of 107 samples"),
    (train_mp, 1, {"global_batch_size": 52, "script": "mp", "devices": TWO, "micro_batch_size": 17},
     "a global batch of 52"),
])
def test_a_batch_norm_that_would_train_on_one_sample_is_refused_before_the_first_step(tmp_path, capfd, script,
                                                                                      world, given, said):
    opts = options(tmp_path / "run", FLAT | given)
    assert fork_ranks(world, life, script, opts, may_die=range(world)) == [2] * world
    found = capfd.readouterr().err
    assert said in found and "Traceback" not in found and not (tmp_path / "run").exists()


def test_what_takes_one_sample_or_never_meets_one_is_trained(tmp_path):
    # many values a channel
    for name, given in (("cnn", CNN | {"virtual_ranks": 0, "global_batch_size": 53, "epochs": 1}),
                        # the tail is never reached
                        ("short", FLAT | {"global_batch_size": 53, "max_steps": 2}),
                        ("even", FLAT | {"global_batch_size": 35})):
        assert fork_ranks(1, life, train_ddp, options(tmp_path / name, given)) == [None]


def test_trying_a_net_without_values_changes_nothing_of_it():
    for given, wanted in ((CNN, True), (GPT, True), (RESNET, False), (FLAT, False)):
        opts = Options(device="cpu", **{name: given[name] for name in ("model", "dataset")})
        data = load_data(opts, None)
        net = build_model(opts, data).eval()
        before, drawn = {n: t.clone() for n, t in net.state_dict().items()}, torch.get_rng_state()
        assert takes(net, data) == wanted
        assert not net.training and torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(t, before[n]) and t.device.type == "cpu" for n, t in net.state_dict().items())


def test_a_net_that_cannot_be_tried_is_believed():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x) if x.sum().item() > 0 else x

    sample = torch.ones(1, 4), torch.zeros(1, dtype=torch.int64)
    data = SimpleNamespace(train=SimpleNamespace(fetch=lambda ids: sample))
    counting = nn.BatchNorm1d(4, momentum=None)  # reads how many batches it has seen
    assert takes(Looks(), data) and not takes(nn.BatchNorm1d(4), data) and not takes(counting, data)
    assert counting.num_batches_tracked == 0
