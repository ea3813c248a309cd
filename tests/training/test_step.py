from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from program import Part
from ranks import fork_ranks
from refusals import refusal
from samples import ALONE, CPU, Samples, Steps
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.data import Batch
from common.errors import blamed
from common.extras.devices import CpuReplicas, replicate
from common.extras.fp16 import Scaler
from common.options import Options
from common.training.replicas import Called

EXAMPLES = Samples(torch.zeros(1, 6, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))


def steps_of(net, world=ALONE, **flags):
    return Steps(net, Options(**flags), world, split=EXAMPLES, samples=64)


def small_net(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh()] + ([nn.BatchNorm1d(8)] if norm else []) + [nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def drawn(size):
    """One and the same global batch of this size."""
    torch.manual_seed(size)
    return torch.randn(size, 6, dtype=torch.float64), torch.randint(0, 3, (size,))


def full_batch_gradient(size, smoothing=0.0):
    net = small_net()
    x, y = drawn(size)
    out = net(x)
    loss = nn.functional.cross_entropy(out, y, label_smoothing=smoothing)
    loss.backward()
    right = (out.argmax(1) == y).sum().item()
    return [p.grad for p in net.parameters()], [loss.item() * size, size, right, size]


def assert_near(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(a, dtype=torch.float64), b, rtol=0, atol=1e-12)


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
    def gradient(world):
        net = small_net()
        steps = steps_of(net, world, **flags)
        totals = world.all_sum(steps.backward(steps.batch(*drawn(size))))
        return [p.grad.tolist() for p in net.parameters()], totals.tolist()

    wanted, totals = full_batch_gradient(size, flags.get("label_smoothing", 0.0))
    for grads, found in fork_ranks(world, gradient):
        assert_near(grads, wanted)
        far = 1e-6 if "virtual_ranks" in flags else 0  # slices are summed in float32
        assert found == pytest.approx(totals, rel=far, abs=1e-12)


@pytest.mark.parametrize("world, size, slices", [(1, 17, 0), (2, 17, 0), (3, 1, 3)])
def test_with_fp16_a_gradient_loses_its_scale_and_gets_its_count(world, size, slices):
    def moved(world):
        net = small_net()
        steps = steps_of(net, world, optimizer="sgd", momentum=0.0, lr=1.0, virtual_ranks=slices)
        steps.state.scaler = Scaler("cpu", init_scale=1024.0)
        steps.step(steps.batch(*drawn(size)))
        pairs = zip(small_net().parameters(), net.parameters(), strict=True)
        return [(before - after).tolist() for before, after in pairs]

    for found in fork_ranks(world, moved):
        assert_near(found, full_batch_gradient(size)[0])


def test_batch_norm_statistics_are_equal_on_all_ranks_at_every_commit():
    def step(world):
        net = small_net(norm=True)
        steps = steps_of(net, world)
        for size in (9, 8, 2):  # the last one leaves ranks without a sample
            batch = steps.batch(*drawn(size))
            net.train(len(batch.ids) != 1)
            steps.step(batch)
        committed = steps.state.statistics.committed
        return [{name: b.tolist() for name, b in view} for view in (net.named_buffers(), committed.items())]

    first, *others = fork_ranks(3, step)
    assert others == [first] * 2 and first[0] == first[1]
    assert first[0]["2.num_batches_tracked"] >= 2


@pytest.mark.parametrize("slices", [0, 4])
def test_a_batch_of_which_no_sample_can_be_read_moves_no_statistics(slices):
    steps = steps_of(small_net(norm=True), virtual_ranks=slices)
    unread = [(ids, None) for ids, _ in steps.batch(*drawn(16)).parts]
    steps.step(Batch(unread, 16))
    committed = steps.state.statistics.committed
    assert not committed["2.running_mean"].any() and not committed["2.num_batches_tracked"]


@pytest.mark.parametrize("size, count, sizes", [(30, 2, [15, 15]), (10, 3, [4, 4, 2]), (1, 2, [1])])
def test_cpu_replicas_get_the_chunks_that_gpus_would_get(size, count, sizes):
    net = small_net()
    seen = []
    net.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    x, _ = drawn(size)
    torch.testing.assert_close(CpuReplicas(net, count)(x), net(x))
    assert seen[:-1] == sizes


class InAThread(CpuReplicas):
    """As nn.DataParallel runs a replica: with autocast on, but of a new thread's default type."""

    def forward(self, x):
        def work():
            with torch.amp.autocast("cpu"):
                return self.module(x)

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()


def test_replicas_in_threads_compute_in_the_type_that_amp_names(monkeypatch):
    """A new thread's own type is bfloat16 on CPUs, so the other one is asked for; on GPUs it is float16."""
    monkeypatch.setattr("common.extras.devices.CpuReplicas", InAThread)
    net = small_net().float()
    opts = Options(script="dp", amp="fp16")
    seen = []
    net[0].register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    state = SimpleNamespace(net=net, opts=opts, heartbeat=0, device=CPU, progress=None)
    two = SimpleNamespace(devices=(CPU, CPU), device=CPU)
    Called(replicate(net, opts, two), state)(drawn(7)[0].float())
    assert seen == [torch.float16]


class Fails(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(-1, 5))  # batches have six numbers in a row


def test_a_net_that_fails_on_a_batch_is_refused_at_any_step_with_its_file_and_line():
    steps = steps_of(Fails(5, 3), model=f"{__file__}:net")
    steps.state.progress.step = 400
    x, y = drawn(4)
    said = r"RuntimeError: shape '\[-1, 5\]'.*\n.*test_step.py, line \d+"
    with refusal(said), blamed():  # as round a life
        steps.backward(steps.batch(x.float(), y))


@pytest.mark.parametrize("world, size, micro", [(3, 16, 0), (3, 2, 0), (4, 3, 8), (2, 33, 16), (3, 16, 2)])
def test_with_sync_bn_all_ranks_make_as_many_forwards_whatever_their_shares(world, size, micro):
    def forwards(world):
        """The samples of each; in each, SyncBatchNorm would wait for all ranks."""
        net = small_net()
        seen = []
        steps = steps_of(net, world, sync_bn=True, micro_batch_size=micro)
        net.register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
        steps.backward(steps.batch(*drawn(size)))
        return seen

    found = fork_ranks(world, forwards)
    assert len({len(seen) for seen in found}) == 1 and sum(map(sum, found)) == size
    assert all(n <= (micro or size) for seen in found for n in seen)


def turned(net, x):
    """Rotated by a complex buffer, as language models do; and counted."""
    net.seen += 1
    return torch.view_as_real(net.layer(x.float()) * net.turn).sum(-1)


@pytest.mark.parametrize("slices", [0, 4])
def test_a_complex_and_an_infinite_buffer_stay_what_they_are_and_a_large_counter_counts(slices):
    def step(world):
        turn = torch.polar(torch.ones(3), torch.arange(3.0)).to(torch.complex128)
        buffers = {"turn": turn.clone(), "seen": torch.tensor(2**24), "mask": torch.tensor([-torch.inf, 1])}
        net = Part(turned, layer=nn.Linear(6, 3), **buffers)
        steps = steps_of(net, world, virtual_ranks=slices)
        for size in (16, 1):  # then the first rank has no sample
            steps.step(steps.batch(*drawn(size)))
        return torch.equal(net.turn, turn), net.mask.tolist(), int(net.seen)

    assert fork_ranks(2, step) == [(True, [-torch.inf, 1], 2**24 + 2)] * 2


class Recomputed(nn.Linear):
    """A weight with three parts in the loss, each in a backward of its own."""

    def forward(self, x):
        for _ in range(3):
            x = checkpoint(super().forward, x, use_reentrant=True)
        return x


def test_slices_refuse_a_gradient_that_comes_in_more_than_one_backward():
    steps = steps_of(nn.Sequential(nn.Linear(6, 3), Recomputed(3, 3)).double(), virtual_ranks=4)
    with refusal("use_reentrant=False"):
        steps.backward(steps.batch(*drawn(16)))
