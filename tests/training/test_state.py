import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fakes import OverDevices, fake_streams, on_a_gpu
from samples import ALONE, state_of
from torch import nn

from common.errors import UserError
from common.extras.bits import Bucket
from common.extras.schedules import learning_rate
from common.options import Options
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


def held(state):
    """A copy of all that a checkpoint would hold."""
    return {name: t.clone() for part in state.tensors().values() for name, t in part.items()}


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
@pytest.mark.parametrize(
    "flags", [{"optimizer": "adam"}, {"optimizer": "sgd"}, {"optimizer": "adamw", "clip_grad_norm": 1.0}]
)
@pytest.mark.parametrize("earlier", [0, 1])  # steps, which have made the optimizer's state
def test_a_step_that_overflows_on_any_of_its_devices_is_skipped_on_all(flags, overflows, earlier):
    state = make(**flags)
    parts = [list(module.parameters()) for module in state.net]
    state.scaler = OverDevices("cpu", init_scale=2.0, growth_interval=100, parts=parts)
    state.devices = [torch.device("cpu"), torch.device("cpu", 1), torch.device("cpu", 2)]
    for step in range(earlier + 1):
        before = held(state)
        loss = nn.functional.cross_entropy(state.net(torch.randn(8, 3)), torch.randint(0, 2, (8,)))
        state.scaler.scale(loss).backward()
        if step < earlier:
            state.update(8)
    for index in overflows:
        parts[index][0].grad.view(-1)[0] = float("inf")
    state.update(8)
    moved = [
        name
        for name, tensor in held(state).items()
        if name not in state.statistics.committed
        and not torch.equal(tensor, before.get(name, torch.zeros_like(tensor)))
    ]
    assert state.scaler.get_scale() == (1.0 if overflows else 2.0) and bool(moved) != bool(overflows), moved


def test_a_checkpoint_made_during_an_evaluation_has_the_nets_own_weights_and_their_averages():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    opts = Options(ema_decay=0.5)
    net[2].weight = weight = net[0].weight
    state = train(state_of(net, opts, 100), 1)
    before = held(state)
    assert set(state.tensors()["model"]) == set(state.net.state_dict())
    with state.evaluating():
        assert torch.equal(weight, before["0.weight/ema"]) and not torch.equal(weight, before["0.weight"])
        during = held(state)
    for after in (during, held(state)):
        assert all(torch.equal(t, after[name]) for name, t in before.items())


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_an_evaluation_that_runs_out_of_memory_leaves_the_checkpoint_its_own_weights(fails_at, monkeypatch):
    state = train(make(ema_decay=0.5), 2)
    before = held(state)
    real = torch.Tensor.copy_
    copies = iter(range(100))

    def copy_(p, *args):
        if next(copies) >= fails_at:
            raise MemoryError
        return real(p, *args)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    with pytest.raises(MemoryError), state.evaluating():
        raise AssertionError("it has failed before")
    after = held(state)
    assert all(torch.equal(t, after[name]) for name, t in before.items())


def test_an_update_that_is_cut_in_two_leaves_a_state_that_says_so():
    state = train(make(), 1)
    state.optimizer.step = lambda: (_ for _ in ()).throw(MemoryError())
    with pytest.raises(MemoryError):
        train(state, 1)
    assert state.invalid
    with pytest.raises(UserError, match="not those of one step"):
        train(state, 1)


@pytest.mark.parametrize("gpu", [0, 1])
def test_an_update_waits_for_its_gradient_without_the_lock_and_is_not_begun_behind_a_collective_that_hangs(
    gpu,
):
    with fake_streams(count=2) as default:
        state = make()
        on_a_gpu(SimpleNamespace(state=state, saver=SimpleNamespace()), default)
        train(state, 1)
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
        state = make()
        on_a_gpu(SimpleNamespace(state=state, saver=SimpleNamespace()), default)
        before = held(state)
        train(state, 1)
        state.end_step(ALONE, 1.0)
        default.submit(lambda: None, late=True)  # the forward of the next step: not waited for
        assert torch.equal(held(state)["2.weight"], before["2.weight"]), "the update is late"
        state.wait_for_update()
        assert not torch.equal(held(state)["2.weight"], before["2.weight"])
        assert default.done < len(default.work)


def test_a_process_that_is_alone_waits_for_no_gpu(monkeypatch):
    with fake_streams() as default:
        state = make()
        on_a_gpu(SimpleNamespace(state=state, saver=SimpleNamespace()), default)
        monkeypatch.setattr("common.training.state.has_peers", lambda: False)
        state.finish_gradient()
        default.submit(lambda: None, late=True)
        state.wait_for_gpu()
        assert default.done < len(default.work)


def test_what_comes_from_a_peer_is_asked_for_before_anything_is_launched_behind_it(monkeypatch):
    said = []
    monkeypatch.setattr("common.extras.bits.mark", lambda device: "the event")
    monkeypatch.setattr("common.extras.bits.wait_by_polling", said.append)
    Bucket._taken(Mock(works=[Mock(wait=lambda: said.append("NCCL"))], under_way=("given", "taken")))
    assert said == ["NCCL", "the event"]


def test_statistics_are_copied_by_type_and_a_net_without_any_is_on_no_device(monkeypatch):
    """A GPU has one call for many tensors of one type, and torch before 2.11 wrote wrong bits into others."""
    statistics = Statistics(torch.nn.BatchNorm1d(2))
    types = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *given: types.append({t.dtype for t in given[0]}))
    statistics.commit()
    assert types == [{torch.float32}, {torch.int64}]
    of_a_gpu = Mock(["to"], to=lambda here: here.clone())  # it is of no use beside a CPU's tensors
    Statistics(torch.nn.Linear(1, 1)).apply(of_a_gpu)


def test_the_learning_rate_is_a_function_of_the_step():
    def rates(*steps, **flags):
        return pytest.approx([learning_rate(step, Options(lr=1.0, **flags), 10) for step in steps])

    cosine = {"lr_schedule": "cosine", "warmup_epochs": 1.0, "epochs": 4}
    assert rates(0, 4, 9, 10, 25, 40, **cosine) == [1 / 11, 5 / 11, 10 / 11, 1, 0.5, 0]
    thirds = {"lr_schedule": "step", "epochs": 3}
    assert rates(0, 9, 10, 20, 35, **thirds) == [1, 1, 0.1, 0.01, 0.01]
    assert rates(30, **thirds, min_lr=0.25) == [0.25]


def test_a_state_is_no_notice_board():
    state = train(make(ema_decay=0.5), 1)
    assert len(vars(state)) <= 22, sorted(vars(state))


def test_best_loss_is_the_lowest_one_also_with_a_minus():
    for best, wanted in (("loss", 2), ("-loss", 2), ("", 3), ("-acc", 1)):
        state = make(best=best)
        for state.progress.step, (accuracy, loss) in enumerate([(0.1, 2.0), (0.2, 1.0), (0.3, 3.0)], 1):
            state.record_evaluation({"val_acc": accuracy, "val_loss": loss})
        assert state.progress.best["step"] == wanted
