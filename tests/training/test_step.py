import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from ranks import fork_ranks
from refusals import refusal
from samples import ALONE, Samples, Steps, share_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.errors import blamed
from common.extras.devices import CpuReplicas, replicate
from common.options import Options
from common.training.replicas import Called
from common.training.step import nothing

EXAMPLES = Samples(torch.zeros(1, 6, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))


def steps_of(net, world=ALONE, **flags):
    return Steps(net, Options(**flags), world, split=EXAMPLES, samples=64)


def small_net(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh()] + ([nn.BatchNorm1d(8)] if norm else []) + [nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batch_of(size, rank=0, world=1, opts=None):
    """The share of one rank of one and the same global batch."""
    torch.manual_seed(size)
    x = torch.randn(size, 6, dtype=torch.float64)
    y = torch.randint(0, 3, (size,))
    return share_of(x, y, opts or Options(), rank, world)


def gradient_of(world, size, flags):
    net = small_net()
    steps = steps_of(net, world, **flags)
    totals = world.all_sum(steps.backward(batch_of(size, world.rank, world.size, steps.state.opts)))
    return [p.grad.clone().tolist() for p in net.parameters()], totals.tolist()


def full_batch_gradient(size, smoothing=0.0):
    net = small_net()
    batch = batch_of(size)
    out = net(batch.x)
    loss = nn.functional.cross_entropy(out, batch.y, label_smoothing=smoothing)
    loss.backward()
    right = (out.argmax(1) == batch.y).sum().item()
    return [p.grad for p in net.parameters()], [loss.item() * size, size, right, size]


@pytest.mark.parametrize(
    "world, size, flags",
    [
        # ragged batches, and fewer samples than ranks
        *((world, size, {}) for world in (1, 2, 3, 5) for size in (16, 17, 4, 2, 1)),
        *((2, 17, {"micro_batch_size": micro, "label_smoothing": 0.1}) for micro in (1, 3, 8, 100)),
        *((2, 17, {"micro_batch_size": 2, "in_flight": many}) for many in (1, 2, 4, 9)),
        *((3, size, {"virtual_ranks": 8}) for size in (3, 11, 24)),
    ],
)
def test_the_gradient_is_the_full_batch_gradient_at_any_world_size_and_micro_batch(world, size, flags):
    wanted, totals = full_batch_gradient(size, flags.get("label_smoothing", 0.0))
    for grads, found in fork_ranks(world, gradient_of, size, flags):
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(a, dtype=torch.float64), b, rtol=0, atol=1e-12)
        far = 1e-6 if "virtual_ranks" in flags else 0  # slices are summed in float32
        assert found == pytest.approx(totals, rel=far, abs=1e-12)


def step_with_batch_norm(world):
    net = small_net(norm=True)
    steps = steps_of(net, world)
    for size in (9, 8, 2):  # the last one leaves ranks without a sample
        batch = batch_of(size, world.rank, world.size)
        net.train(len(batch.ids) != 1)
        steps.step(batch)
    views = net.named_buffers(), steps.state.statistics.committed.items()
    return [{n: b.tolist() for n, b in view} for view in views]


def test_batch_norm_statistics_are_equal_on_all_ranks_at_every_commit():
    views = fork_ranks(3, step_with_batch_norm)
    assert views[0] == views[1] == views[2]
    assert views[0][0] == views[0][1]
    assert views[0][0]["2.num_batches_tracked"] >= 2


@pytest.mark.parametrize(
    "size, count, sizes", [(30, 2, [15, 15]), (10, 2, [5, 5]), (10, 3, [4, 4, 2]), (1, 2, [1])]
)
def test_cpu_replicas_get_the_chunks_that_gpus_would_get(size, count, sizes):
    net = small_net()
    seen = []
    net.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    model = CpuReplicas(net, count)
    batch = batch_of(size)
    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
    assert seen == sizes
    for p, wanted in zip(net.parameters(), full_batch_gradient(size)[0], strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=0, atol=1e-12)


class InAThread(nn.Module):
    """As nn.DataParallel runs a replica: with autocast on, but of a new thread's default type."""

    def __init__(self, net, count):
        super().__init__()
        self.module = net

    def forward(self, x):
        def work():
            with torch.amp.autocast("cpu"):
                return self.module(x)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()


def test_replicas_in_threads_compute_in_the_type_that_amp_names(monkeypatch):
    """A new thread's own type is bfloat16 on CPUs, so the other one is asked for; on GPUs it is float16."""
    monkeypatch.setattr(sys.modules["common.extras.devices"], "CpuReplicas", InAThread)
    net = small_net().float()
    opts = Options(script="dp", amp="fp16")
    seen = []
    net[0].register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    world = SimpleNamespace(devices=(torch.device("cpu"),) * 2, device=torch.device("cpu"))
    state = SimpleNamespace(net=net, opts=opts, heartbeat=0, device=world.device)
    Called(replicate(net, opts, world), state)(batch_of(7).x.float())
    assert seen == [torch.float16]


class Fails(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(-1, 5))  # batches have six numbers in a row


def test_a_net_that_fails_on_a_batch_is_refused_at_any_step_with_its_file_and_line():
    steps = steps_of(Fails(5, 3), model=f"{__file__}:net")
    steps.state.progress.step = 400
    batch = batch_of(4)
    said = r"RuntimeError: shape '\[-1, 5\]'.*\n.*test_step.py, line \d+"
    with refusal(said), blamed():  # as round a life
        steps.backward(share_of(batch.x.float(), batch.y, steps.state.opts))


def test_compiled_code_is_not_copied_to_many_devices():
    net = small_net()
    opts = Options(script="dp", compile=True)
    one = torch.device("cpu")
    with refusal("--compile: train_dp.py copies the net to its devices"):
        replicate(net, opts, SimpleNamespace(devices=(one, one), device=one))


def synced(world, size, micro):
    """Samples of each forward of a rank under --sync-bn; in each, SyncBatchNorm would wait for all ranks."""
    net = small_net()
    seen = []
    steps = steps_of(net, world, sync_bn=True, micro_batch_size=micro)
    net.register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
    steps.backward(batch_of(size, world.rank, world.size, steps.state.opts))
    return seen


@pytest.mark.parametrize("world, size, micro", [(3, 16, 0), (3, 2, 0), (4, 3, 8), (2, 33, 16), (3, 16, 2)])
def test_with_sync_bn_all_ranks_make_as_many_forwards_whatever_their_shares(world, size, micro):
    forwards = fork_ranks(world, synced, size, micro)
    assert len({len(seen) for seen in forwards}) == 1 and sum(map(sum, forwards)) == size
    assert all(n <= (micro or size) for seen in forwards for n in seen)


class Turning(nn.Module):
    """Rotates by a complex buffer, as language models do, and counts."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)).to(torch.complex128))
        self.register_buffer("seen", torch.tensor(2**24))

    def forward(self, x):
        self.seen += 1
        return torch.view_as_real(self.layer(x.float()) * self.turn).sum(-1)


@pytest.mark.parametrize("slices", [0, 4])
def test_a_complex_buffer_stays_what_it_is_and_a_large_counter_counts(slices):
    def step(world):
        net = Turning()
        before = net.turn.clone()
        steps = steps_of(net, world, virtual_ranks=slices)
        for size in (16, 1):  # then the first rank has no sample
            steps.step(batch_of(size, world.rank, world.size, steps.state.opts))
        return torch.equal(net.turn, before), int(net.seen)

    assert fork_ranks(2, step) == [(True, 2**24 + 2)] * 2


class Flawed(nn.Module):
    """A weight without a part in the loss; or one with three, each in a backward of its own."""

    def __init__(self, slices):
        super().__init__()
        self.first = nn.Linear(6, 3).double()
        self.inner = nn.Linear(3, 3).double()
        self.slices = slices

    def forward(self, x):
        x = self.first(x)
        for _ in range(3 * bool(self.slices)):
            x = checkpoint(self.inner, x, use_reentrant=True)
        return x


@pytest.mark.parametrize("slices, words", [(0, "finished reduction"), (4, "use_reentrant=False")])
def test_a_gradient_that_ranks_would_not_average_whole_is_refused_before_the_update(slices, words):
    def live(world):
        steps = steps_of(Flawed(slices), world, virtual_ranks=slices)
        with refusal(words):
            steps.backward(batch_of(16, world.rank, world.size, steps.state.opts))

    fork_ranks(2, live)


def test_a_rank_without_samples_has_a_gradient_of_complex_weights_too():
    weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    nothing([weight]).backward()
    assert not weight.grad.any()
