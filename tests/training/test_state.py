import contextlib
import itertools
import json
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from fakes import OverDevices, fake_streams, late_updates
from torch import nn

from common.checkpoint.writer import facts_to_json
from common.errors import UserError
from common.options import Options
from common.training import TrainState, build_optimizer
from common.training.optimizer import learning_rate


def make(samples=100, **flags):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    opts = Options(**flags)
    return TrainState(net, build_optimizer(net, opts), opts, samples)


def train(state, steps):
    for _ in range(steps):
        torch.manual_seed(state.step)
        nn.functional.cross_entropy(state.net(torch.randn(8, 3)), torch.randint(0, 2, (8,))).backward()
        state.update(8)
    return state


def held(state):
    """A copy of all that a checkpoint would hold."""
    return {name: t.clone() for part in state.tensors().values() for name, t in part.items()}


def test_a_buffer_under_two_names_stays_one_and_no_name_of_it_shows_what_a_step_has_begun():
    norm = nn.BatchNorm1d(3)
    net = nn.Sequential(norm, nn.Linear(3, 3), norm)
    state = TrainState(net, build_optimizer(net, Options()), Options(), 9)
    net(torch.randn(8, 3))
    saved = state.tensors()["model"]
    assert not any(saved[f"{i}.running_mean"].any() for i in (0, 2))
    state.buffers.renew()
    assert net[0].running_mean is net[2].running_mean and not norm.running_mean.any()


@pytest.mark.parametrize("overflows", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize(
    "flags", [{"optimizer": "adam"}, {"optimizer": "sgd"}, {"optimizer": "adamw", "clip_grad_norm": 1.0}]
)
def test_a_step_that_overflows_on_any_of_its_devices_is_skipped_on_all(flags, overflows):
    state = make(**flags)
    parts = [list(module.parameters()) for module in state.net]
    state.scaler = OverDevices("cpu", init_scale=2.0, growth_interval=100, parts=parts)
    state.stages = SimpleNamespace(
        world=SimpleNamespace(all_sum=lambda total: total), norm=nn.utils.get_total_norm
    )
    before = held(state)
    loss = nn.functional.cross_entropy(state.net(torch.randn(8, 3)), torch.randint(0, 2, (8,)))
    state.scaler.scale(loss).backward()
    for index in overflows:
        parts[index][0].grad.view(-1)[0] = float("inf")
    state.update(8)
    moved = [
        name
        for name, tensor in held(state).items()
        if name not in state.buffers.committed and not torch.equal(tensor, before[name])
    ]
    assert state.scaler.get_scale() == (1.0 if overflows else 2.0) and bool(moved) != bool(overflows), moved


def test_a_checkpoint_made_during_an_evaluation_has_the_nets_own_weights_and_their_averages():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    opts = Options(ema_decay=0.5)
    net[2].weight = weight = net[0].weight
    state = train(TrainState(net, build_optimizer(net, opts), opts, 100), 1)
    before = held(state)
    assert set(state.tensors()["model"]) == set(state.net.state_dict())
    with state.averaged():
        assert torch.equal(weight, before["0.weight/ema"]) and not torch.equal(weight, before["0.weight"])
        during = held(state)
    for after in (during, held(state)):
        assert all(torch.equal(t, after[name]) for name, t in before.items())


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_an_evaluation_that_runs_out_of_memory_leaves_the_checkpoint_its_own_weights(fails_at, monkeypatch):
    state = train(make(ema_decay=0.5), 2)
    before = held(state)
    real = nn.Parameter.copy_
    copies = iter(range(100))

    def copy_(p, *args):
        if next(copies) >= fails_at:
            raise MemoryError
        return real(p, *args)

    monkeypatch.setattr(nn.Parameter, "copy_", copy_, raising=False)
    with pytest.raises(MemoryError), state.averaged():
        raise AssertionError("it has failed before")
    after = held(state)
    assert all(torch.equal(t, after[name]) for name, t in before.items())


def test_an_update_that_is_cut_in_two_leaves_a_state_that_says_so():
    state = train(make(), 1)
    state.optimizer.step = lambda: (_ for _ in ()).throw(MemoryError())
    with pytest.raises(MemoryError):
        train(state, 1)
    assert state.verdict
    with pytest.raises(UserError, match="not those of one step"):
        train(state, 1)


@contextlib.contextmanager
def hung(steps):
    """(state, stream, gate) after so many steps on a GPU whose stream then hangs until the gate is set."""
    with fake_streams() as default:
        state = make()
        late_updates(state, default)
        train(state, steps)
        yield state, default, default.hang()


@pytest.mark.parametrize("step", [3, 4])
def test_a_rescue_has_the_newest_step_that_the_gpu_has_made_also_if_one_begins_while_it_copies(step):
    """The update of step 4 stands behind a collective that hangs; or that was slow, and ends meanwhile."""
    wanted = train(make(), step).tensors()["model"]
    with hung(3) as (state, default, gate):
        train(state, 1)
        live = state.tensors
        copies = itertools.count()
        found = []

        class Remote:
            def __init__(self, tensor):
                self.tensor = tensor

            def cpu(self):
                if next(copies) == 3 and step == 4:
                    gate.set()
                    default.synchronize()
                return self.tensor.clone()

        def rescue():
            with state.updates.aside(), state.lock:
                found.extend(state.snapshot())

        state.tensors = lambda: {"model": {name: Remote(tensor) for name, tensor in live()["model"].items()}}
        thread = threading.Thread(target=rescue, daemon=True)
        thread.start()
        thread.join(20)
        assert state.step == 4 and state.whole == step
        gate.set()
    held, facts = found
    assert facts["step"] == step and all(torch.equal(t, held["model"][n]) for n, t in wanted.items())


def test_the_program_runs_ahead_of_the_gpu_by_an_update_and_waits_without_the_lock():
    with hung(0) as (state, _, gate):
        train(state, 1)
        late = threading.Thread(target=train, args=(state, 1), daemon=True)
        late.start()
        late.join(0.2)
        assert late.is_alive() and state.step == 1 and state.whole == 0
        assert state.lock.acquire(timeout=60)
        state.lock.release()
        gate.set()
        late.join(20)
        assert state.step == state.whole == 2


def test_the_learning_rate_is_a_function_of_the_step():
    def rates(*steps, **flags):
        return pytest.approx([learning_rate(step, Options(lr=1.0, **flags), 10) for step in steps])

    cosine = {"lr_schedule": "cosine", "warmup_epochs": 1.0, "epochs": 4}
    assert rates(0, 4, 9, 10, 25, 40, **cosine) == [1 / 11, 5 / 11, 10 / 11, 1, 0.5, 0]
    thirds = {"lr_schedule": "step", "epochs": 3}
    assert rates(0, 9, 10, 20, 35, **thirds) == [1, 1, 0.1, 0.01, 0.01]
    assert rates(30, **thirds, min_lr=0.25) == [0.25]


def test_an_epoch_ends_only_when_its_samples_are_all_trained_on():
    state = make(samples=20, max_steps=2, epochs=5, global_batch_size=8)
    train(state, 2)
    assert state.finished and not state.epoch_over and state.evaluation_due
    state.end_epoch()
    assert (state.epoch, state.position) == (0, 16)


def test_patience_ends_a_run_at_the_evaluation_that_is_one_too_many_and_a_restart_knows_it():
    state = make(samples=16, global_batch_size=8, epochs=9, patience=2, eval_every=1)
    for epoch, accuracy in enumerate([0.5, 0.7, 0.6, 0.7]):
        assert not state.finished
        train(state, 2)
        assert state.evaluation_due and not state.finished
        state.record_evaluation({"val_acc": accuracy, "val_loss": 1.0})
        assert state.finished == (epoch == 3)
        state.end_epoch()
    assert state.best["step"] == 4 and state.finished and not state.evaluation_due
    for patience, ended in ((2, True), (3, False), (0, False)):
        again = make(samples=16, global_batch_size=8, epochs=9, patience=patience)
        again.load(state.facts())
        assert again.finished == ended


def kept(best, *evaluations):
    state = make(best=best)
    for state.step, (accuracy, loss) in enumerate(evaluations, 1):
        state.record_evaluation({"val_acc": accuracy, "val_loss": loss})
        state.best = json.loads(facts_to_json(state.best))  # a restart
    return state.best["step"]


def test_the_loss_is_kept_at_its_lowest_and_of_equals_the_last_with_the_lower_loss():
    for best in ("loss", "-loss"):
        assert kept(best, (0.1, 2.0), (0.2, 1.0), (0.3, 3.0)) == 2
    assert kept("", (0.5, 2.0), (0.7, 3.0), (0.7, 2.5), (0.7, 2.6), (0.6, 1.0)) == 3
    assert kept("", (0.5, math.inf), (0.7, math.inf), (0.6, 1.0)) == 2
    assert kept("-acc", (0.5, 2.0), (0.4, 3.0), (0.6, 1.0)) == 2


def test_a_state_is_no_notice_board():
    state = train(make(ema_decay=0.5), 1)
    assert len(vars(state)) <= 22, sorted(vars(state))
