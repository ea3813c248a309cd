import sys
from types import SimpleNamespace

import pytest
import torch
from fakes import SyncedNorm, ThreadedReplicas
from ranks import fork_ranks
from samples import share_of
from torch import nn

from common.errors import UserError
from common.options import Options
from common.training import TrainState, backward, build_optimizer, distribute, find_task, prepare
from common.training.backward import forward
from common.training.loss import mix
from common.training.prepare import CpuReplicas


def make_state(net, n=64, **flags):
    opts = Options(**flags)
    return TrainState(net, build_optimizer(net, opts), opts, n)


def small_net(norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh()] + ([nn.BatchNorm1d(8)] if norm else []) + [nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batch_of(size, rank=0, world=1, opts=None):
    """The share of one rank of one and the same global batch."""
    torch.manual_seed(size)
    x, y = torch.randn(size, 6, dtype=torch.float64), torch.randint(0, 3, (size,))
    return share_of(x, y, opts or Options(), rank, world)


def gradient_of(world, size, flags):
    state = make_state(small_net(), log_every=1, **flags)
    model = distribute(state.net, state.opts, world)
    batch = batch_of(size, world.rank, world.size, state.opts)
    totals = world.all_sum(backward(model, batch, state, world))
    return [p.grad.clone().tolist() for p in state.net.parameters()], totals.tolist()


def full_batch_gradient(size, smoothing=0.0):
    net, batch = small_net(), batch_of(size)
    out = net(batch.x)
    loss = nn.functional.cross_entropy(out, batch.y, label_smoothing=smoothing)
    loss.backward()
    right = (out.argmax(1) == batch.y).sum().item()
    return [p.grad for p in net.parameters()], [loss.item() * size, size, right, size]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [16, 17, 4, 2, 1])                 # even, ragged, fewer samples than ranks
def test_the_gradient_is_the_full_batch_gradient_at_any_world_and_size(world, size):
    wanted, totals = full_batch_gradient(size)
    for grads, found in fork_ranks(world, gradient_of, size, {}):
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(a, dtype=torch.float64), b, rtol=0, atol=1e-12)
        assert found == pytest.approx(totals, abs=1e-12)


@pytest.mark.parametrize("micro", [1, 3, 8, 100])
def test_micro_batches_do_not_change_the_gradient(micro):
    wanted, _ = full_batch_gradient(17, smoothing=0.1)
    for grads, _ in fork_ranks(2, gradient_of, 17, {"micro_batch_size": micro, "label_smoothing": 0.1}):
        for a, b in zip(grads, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(a, dtype=torch.float64), b, rtol=0, atol=1e-12)


def step_with_batch_norm(world):
    state = make_state(small_net(norm=True))
    model = distribute(state.net, state.opts, world)
    for size in (9, 8, 2):  # the last one leaves ranks without a sample
        batch = batch_of(size, world.rank, world.size)
        backward(model.eval() if len(batch.ids) == 1 else model, batch, state, world)
        state.update(size)
    return {n: b.tolist() for n, b in state.net.named_buffers()}, {n: b.tolist() for n,
                                                                   b in state.buffers.committed.items()}


def test_batch_norm_statistics_are_equal_on_all_ranks_at_every_commit():
    views = fork_ranks(3, step_with_batch_norm)
    assert views[0] == views[1] == views[2]
    assert views[0][0] == views[0][1]
    assert views[0][0]["2.num_batches_tracked"] >= 2


@pytest.mark.parametrize(("size", "count", "sizes"),
                         [(30, 2, [15, 15]), (10, 2, [5, 5]), (10, 3, [4, 4, 2]), (1, 2, [1])])
def test_cpu_replicas_get_the_chunks_that_gpus_would_get(size, count, sizes):
    net, seen = small_net(), []
    net.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    model, batch = CpuReplicas(net, count), batch_of(size)
    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
    assert seen == sizes
    for p, wanted in zip(net.parameters(), full_batch_gradient(size)[0], strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=0, atol=1e-12)


def test_replicas_in_threads_compute_in_the_type_that_amp_names(monkeypatch):
    """A new thread's own type is bfloat16 on CPUs, so the other one is asked for; on GPUs it is float16."""
    monkeypatch.setattr(sys.modules["common.training.prepare"], "CpuReplicas", ThreadedReplicas)
    net, opts, seen = small_net().float(), Options(script="dp", amp="fp16"), []
    net[0].register_forward_hook(lambda _, inputs, output: seen.append((len(output), output.dtype)))
    state = SimpleNamespace(net=net, opts=opts, step=0)
    world = SimpleNamespace(devices=(torch.device("cpu"),) * 2, device=torch.device("cpu"))
    state.task, batch = find_task(opts), batch_of(7)
    forward(distribute(net, opts, world), (batch.x.float(), batch.y), state, state.task.zeros(world.device))
    assert sorted(seen, key=str) == [(3, torch.float16), (4, torch.float16)]


def test_compiled_code_is_not_copied_to_many_devices():
    net, opts, one = small_net(), Options(script="dp", compile=True), torch.device("cpu")
    with pytest.raises(UserError, match="--compile: train_dp.py copies the net to its 2 devices") as caught:
        prepare(net, opts, SimpleNamespace(devices=(one, one), device=one), None, None)
    assert caught.value.code == 2 and len(str(caught.value).splitlines()) <= 3


def synced(world, size, micro):
    """(gradient, samples of each forward) of a rank under --sync-bn."""
    net, seen = small_net(norm=True), []
    if world.size > 1:
        net[2] = SyncedNorm(8).double()
    state = make_state(net, sync_bn=True, micro_batch_size=micro)
    net[2].register_forward_hook(lambda _, inputs, output: seen.append(len(output)))
    batch = batch_of(size, world.rank, world.size, state.opts)
    backward(distribute(net, state.opts, world), batch, state, world)
    return [p.grad for p in net.parameters()], seen


@pytest.mark.parametrize(("world", "size", "micro"),
                         [(3, 16, 0), (3, 2, 0), (4, 3, 8), (2, 33, 16), (3, 16, 2), (2, 32, 16)])
def test_with_sync_bn_all_ranks_make_as_many_forwards_whatever_their_shares(world, size, micro):
    found = fork_ranks(world, synced, size, micro, deadline=30)
    forwards = [seen for _, seen in found]
    assert len({len(seen) for seen in forwards}) == 1 and sum(map(sum, forwards)) == size
    assert all(n <= (micro or size) for seen in forwards for n in seen)
    if len(forwards[0]) == 1:  # one BatchNorm over the global batch
        for ours, wanted in zip(found[0][0], fork_ranks(1, synced, size, 0)[0][0], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("flags", [{"mixup": 0.4}, {"cutmix": 0.4}, {"mixup": 0.4, "cutmix": 0.4}])
def test_mixing_keeps_the_targets_in_proportion_and_depends_on_the_step_alone(flags):
    state = SimpleNamespace(opts=Options(**flags), step=3)
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 12, 12).contiguous()
    y = torch.arange(4)
    mixed, targets = mix(x, y, state)
    again, _ = mix(x, y, state)
    assert torch.equal(mixed, again)
    assert sum(weight for weight, _ in targets) == pytest.approx(1)
    (keep, mine), (rest, other) = targets
    wanted = keep * mine + rest * other  # the pixels are the labels here
    torch.testing.assert_close(mixed.mean((1, 2, 3)), wanted.float(), atol=1e-4, rtol=0)


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.layer, self.error = nn.Linear(6, 3), error

    def forward(self, x):
        if self.error:
            raise self.error
        return self.layer(x.view(-1, 5))  # batches have six numbers in a row


def first_forward_of(net, step=0):
    state, batch = make_state(net, model=f"{__file__}:net"), batch_of(4)
    state.step = step
    forward(net, (batch.x.float(), batch.y), state, state.task.zeros(torch.device("cpu")))


def test_a_net_that_does_not_fit_its_first_batch_is_refused_with_the_file_and_the_line():
    with pytest.raises(UserError, match=r"first batch, torch.float32 of shape \(4, 6\), .*\n"
                       r"test_reduce.py, line \d+: RuntimeError: shape '\[-1, 5\]' is invalid"):
        first_forward_of(Fails(None))
    with pytest.raises(UserError, match="KeyError: 'mine'"):
        first_forward_of(Fails(KeyError("mine")))


@pytest.mark.parametrize("error, step", [
    (OSError("disk"), 0), (RuntimeError("gloo: closed by peer"), 0), (RuntimeError("CUDA error"), 0),
    (MemoryError(), 0), (ValueError("late"), 1)])
def test_a_forward_that_may_fare_better_in_another_life_keeps_its_error(error, step):
    with pytest.raises(type(error)) as raised:
        first_forward_of(Fails(error), step)
    assert raised.value is error
