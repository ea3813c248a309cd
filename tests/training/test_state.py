import contextlib
import math
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fakes import OverDevices, fake_streams, on_a_gpu
from samples import ALONE, held, same, state_of
from torch import nn

from common.errors import UserError
from common.extras.bits import Bucket
from common.extras.buffers import MeanOfBuffers
from common.extras.schedules import learning_rate
from common.options import Options
from common.sealed import finite
from common.training.statistics import Statistics


def make(samples=100, **flags):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    opts = Options(**flags)
    return state_of(net, opts, samples)


def train(state, steps):
    for _ in range(steps):
        torch.manual_seed(state.progress.step)
        nn.functional.cross_entropy(state.net(torch.randn(8, 3)), torch.randint(0, 2, (8,))).backward()
        state.update(8)
    return state


def test_a_buffer_under_two_names_stays_one_and_no_name_of_it_shows_what_a_step_has_begun():
    norm = nn.BatchNorm1d(3)
    net = nn.Sequential(norm, nn.Linear(3, 3), norm)
    state = state_of(net, Options(), 9)
    net(torch.randn(8, 3))
    saved = state.tensors()["model"]
    assert not any(saved[f"{i}.running_mean"].any() for i in (0, 2))
    state.statistics.reset()
    assert net[0].running_mean is net[2].running_mean and not norm.running_mean.any()


@pytest.mark.parametrize("overflows", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("flags", [{"optimizer": "sgd"}, {"optimizer": "adamw", "clip_grad_norm": 1.0}])
def test_a_step_that_overflows_on_any_of_its_devices_is_skipped_on_all(flags, overflows):
    state = make(**flags)
    parts = [list(module.parameters()) for module in state.net]
    state.scaler = OverDevices("cpu", init_scale=2.0, growth_interval=100, parts=parts)
    state.devices = [torch.device("cpu"), torch.device("cpu", 1), torch.device("cpu", 2)]
    state.net.eval()  # or statistics move
    for overflowing in ((), overflows):
        before = held(state)
        state.scaler.scale(state.net(torch.randn(8, 3)).square().sum()).backward()
        for index in overflowing:
            parts[index][0].grad.view(-1)[0] = torch.inf
        state.update(8)
    assert state.scaler.get_scale() == (1.0 if overflows else 2.0)
    assert same(before, held(state)) == bool(overflows)


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3, 99])
def test_a_checkpoint_of_an_evaluation_also_of_one_without_memory_has_the_nets_own_weights_and_averages(
    fails_at, monkeypatch
):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    net[2].weight = weight = net[0].weight
    state = train(state_of(net, Options(ema_decay=0.5)), 2)
    before = held(state)
    copies = iter(range(100))
    real = torch.Tensor.copy_

    def copy_(p, *args):
        if next(copies) == fails_at:
            raise MemoryError
        return real(p, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with contextlib.suppress(MemoryError), state.evaluating():
        assert torch.equal(weight, before["0.weight/ema"]) and not torch.equal(weight, before["0.weight"])
        assert same(before, held(state))
    monkeypatch.undo()
    assert same(before, held(state))


def test_an_update_that_is_cut_in_two_leaves_a_state_that_says_so():
    state = train(make(), 1)
    state.optimizer.step = lambda: (_ for _ in ()).throw(MemoryError())
    with pytest.raises(MemoryError):
        train(state, 1)
    assert state.invalid
    with pytest.raises(UserError, match="not those of one step"):
        train(state, 1)


def on_gpus(default):
    state = make()
    on_a_gpu(SimpleNamespace(state=state, saver=SimpleNamespace()), default)
    return state


@pytest.mark.parametrize("gpu", [0, 1])
def test_an_update_waits_for_its_gradient_without_the_lock_and_is_not_begun_behind_a_collective_that_hangs(
    gpu,
):
    with fake_streams(count=2) as default:
        state = train(on_gpus(default), 1)
        stream = [default, *default.others][gpu]
        gate = stream.hang()
        late = threading.Thread(target=train, args=(state, 1), daemon=True)
        late.start()
        late.join(0.2)
        assert late.is_alive() and state.progress.step == 1
        assert state.lock.acquire(timeout=60)
        state.lock.release()
        assert stream.done == len(stream.work) - 1, "only the collective is left"
        gate.set()
        late.join(20)
        assert state.progress.step == 2


def test_a_rescue_waits_for_what_each_gpu_has_changed_of_the_last_step():
    with fake_streams(count=2) as default:
        state = on_gpus(default)
        before = held(state)["2.weight"]
        train(state, 1)
        state.end_step(ALONE, 1.0)
        default.submit(lambda: None, late=True)  # the forward of the next step: not waited for
        assert torch.equal(held(state)["2.weight"], before), "the update is late"
        state.wait_for_update()
        assert not torch.equal(held(state)["2.weight"], before)
        assert default.done < len(default.work)


def test_a_process_that_is_alone_waits_for_no_gpu(monkeypatch):
    with fake_streams() as default:
        state = on_gpus(default)
        monkeypatch.setattr("common.training.state.has_peers", lambda: False)
        state.finish_gradient()
        default.submit(lambda: None, late=True)
        state.wait_for_gpu()
        assert default.done < len(default.work)


def test_what_comes_from_a_peer_is_asked_for_before_anything_is_launched_behind_it(monkeypatch):
    said = []
    monkeypatch.setattr("common.extras.bits.mark", lambda device: "the event")
    monkeypatch.setattr("common.extras.bits.wait_by_polling", said.append)
    Bucket.wait(Mock(works=[Mock(wait=lambda: said.append("NCCL"))]))
    assert said == ["NCCL", "the event"]


def test_statistics_are_copied_by_type_and_a_net_without_any_is_on_no_device(monkeypatch):
    """A GPU has one call for many tensors of one type, and torch before 2.11 wrote wrong bits into others."""
    statistics = Statistics(torch.nn.BatchNorm1d(2))
    types = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *given: types.append({t.dtype for t in given[0]}))
    statistics.commit()
    assert types == [{torch.float32}, {torch.int64}]
    of_a_gpu = Mock(["to"], to=lambda here: here.clone())  # it is of no use beside a CPU's tensors
    MeanOfBuffers(Statistics(torch.nn.Linear(1, 1))).apply(of_a_gpu)


def test_averages_of_weights_in_16_bits_move_in_steps_of_less_than_half_a_unit():
    state = state_of(nn.Linear(3, 2).bfloat16(), Options(ema_decay=0.999))
    state.net(torch.ones(8, 3).bfloat16()).sum().backward()
    before = held(state)["bias/ema"]
    state.update(8)
    assert not torch.equal(held(state)["bias/ema"], before)


def test_the_learning_rate_is_a_function_of_the_step():
    def rates(*steps, **flags):
        return pytest.approx([learning_rate(step, Options(lr=1.0, **flags), 10) for step in steps])

    cosine = {"lr_schedule": "cosine", "warmup_epochs": 1.0, "epochs": 4}
    assert rates(0, 9, 10, 25, 40, **cosine) == [1 / 11, 10 / 11, 1, 0.5, 0]
    thirds = {"lr_schedule": "step", "epochs": 3}
    assert rates(9, 10, 20, 35, **thirds) == [1, 0.1, 0.01, 0.01]
    assert rates(30, **thirds, min_lr=0.25) == [0.25]


RISING = [(0.1, 2.0), (0.2, 1.0), (0.3, 3.0)]  # accuracies, losses


@pytest.mark.parametrize(
    "best, evaluations, wanted",
    [
        ("loss", RISING, 2),
        ("-loss", RISING, 2),  # it is never kept at its highest
        ("", RISING, 3),
        ("-acc", RISING, 1),
        # of equals the last one with the lower loss
        ("acc", [(0.5, 2.0), (0.7, 3.0), (0.7, 2.5), (0.7, 2.6), (0.6, 1.0)], 3),
        ("acc", [(0.5, math.inf), (0.7, math.inf), (0.6, 1.0)], 2),
        ("acc", [(0.5, 2.0), (math.nan, 1.0)], 1),
    ],
)
def test_the_best_evaluation_is_kept(best, evaluations, wanted):
    state = make(best=best)
    progress = state.progress
    for progress.step, (accuracy, loss) in enumerate(evaluations, 1):
        state.record_evaluation({"val_acc": accuracy, "val_loss": loss})
        progress.best = finite(progress.best)  # a restart
    assert progress.best["step"] == wanted
