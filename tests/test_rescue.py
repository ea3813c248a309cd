"""What a survivor saves, and that it never saves anything else."""
import atexit
import ctypes
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jobs import events
from ranks import fork_ranks
from torch.distributed.elastic.multiprocessing.errors import record

import common.rescue
from common import UserError
from common.checkpoint import CheckpointStore
from common.ledger import Ledger
from common.manifest import checkpoints
from common.opening import speaking_errors
from common.options import parse_options
from common.processes import allow_open_files
from common.rescue import Rescue
from common.state import TrainState, build_optimizer

SAMPLES = 64


def a_run(world, run, *flags):
    """(state, store, ledger) of a small net at step 0, owned as train_ddp.py would own it."""
    opts = parse_options("", [f"--run-dir={run}", "--global-batch-size=8", "--optimizer=adam", *flags], script="ddp")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    state = TrainState(net, build_optimizer(net, opts), opts, SAMPLES)
    store = CheckpointStore(opts, world)
    store.restore(state)
    return state, store, Ledger(opts.run_dir)


def step(state):
    state.net(torch.ones(8, 4)).sum().backward()
    state.update(8)


def saved(run):
    return [number for number, _ in checkpoints(Path(run) / "checkpoints")]


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


# ---- the watcher: a main thread that does not come back -----------------------------------------------------------------
def in_a_lock(world):
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)                                              # no signal ends this


def in_a_store(world):
    world.store.wait(["never"])


@pytest.mark.parametrize("size, stuck", [(1, in_a_lock), (2, in_a_store)])
def test_a_main_thread_stuck_in_c_is_left_behind_with_its_last_whole_step_saved(run, size, stuck):
    def live(world):
        common.rescue.PATIENCE = 0.2
        state, store, ledger = a_run(world, run)
        with Rescue(store, state, world, ledger):
            step(state), step(state)
            world.meet("two steps")
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            stuck(world)

    assert fork_ranks(size, live, may_die=range(size)) == [143] * size
    assert saved(run) == [2]
    assert [event["step"] for event in events(run, "rescue")] == [2]


def test_a_lock_held_in_c_with_pythons_own_ends_the_process_from_its_first_moment_on(run):
    """No Python thread can run any more, neither the watcher nor a signal handler; faulthandler's own thread can."""
    def live(world):
        state, store, ledger = a_run(world, run, "--hang-timeout=1")
        with Rescue(store, state, world, ledger):
            python, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
            python.pthread_mutex_lock(mutex)
            python.pthread_mutex_lock(mutex)

    assert fork_ranks(1, live, may_die=[0], deadline=20) == [1]


# ---- all or nothing ------------------------------------------------------------------------------------------------------
def test_a_rank_of_a_large_world_with_a_thousand_open_files_hears_signals(run):
    def live(world):
        allow_open_files(1100, "350 processes")
        held = [os.dup(0) for _ in range(1100)]
        state, store, ledger = a_run(world, run)
        with Rescue(store, state, world, ledger) as rescue:
            assert rescue.pipe[0] > max(held) > 1024
            step(state)
            os.kill(os.getpid(), signal.SIGTERM)
            while not rescue.asked:
                assert rescue.watcher.is_alive()
            rescue.leave()

    assert fork_ranks(1, live, may_die=[0], deadline=30) == [143]


def test_a_signal_inside_the_optimizer_finishes_the_step_first(run):
    """The watcher's patience ends within the step, so only the lock holds it back."""
    def live(world):
        common.rescue.PATIENCE = 1.0
        state, store, ledger = a_run(world, run)
        real, weight = state.optimizer.step, state.net[0].weight

        def slow_step():
            whole, end = weight.detach().clone(), time.monotonic() + 1.3
            os.kill(os.getpid(), signal.SIGTERM)
            weight.data.add_(1)                                                 # half a step: nobody may see this
            while time.monotonic() < end:
                time.sleep(0.01)
            weight.data.copy_(whole)
            real()

        with Rescue(store, state, world, ledger):
            step(state)
            state.optimizer.step = slow_step
            step(state)
            threading.Event().wait()                                            # the watcher is the one that leaves

    assert fork_ranks(1, live, may_die=[0]) == [143]
    assert saved(run) == [2]
    assert_equals_undisturbed(run, 2)


def assert_equals_undisturbed(run, steps):
    def compare(world):
        there, _, _ = a_run(world, run)
        fresh, _, _ = a_run(world, Path(f"{run}-fresh"))
        for _ in range(steps):
            step(fresh)
        for part, tensors in fresh.tensors().items():
            for name, tensor in tensors.items():
                assert torch.equal(tensor, there.tensors()[part][name]), name
        return there.step

    assert fork_ranks(1, compare) == [steps]


def test_a_step_cut_in_two_is_never_saved(run):
    def live(world):
        state, store, ledger = a_run(world, run)

        def torn():
            state.net[0].weight.data.add_(1)
            raise RuntimeError("Connection reset by peer")

        with pytest.raises(RuntimeError), Rescue(store, state, world, ledger):
            step(state)
            state.optimizer.step = torn
            step(state)
        return state.step, state.torn

    assert fork_ranks(1, live) == [(1, True)]
    assert saved(run) == []


def test_an_error_of_ones_own_saves_the_step_before_and_is_raised_on(run):
    def live(world):
        state, store, ledger = a_run(world, run)
        with pytest.raises(ZeroDivisionError), Rescue(store, state, world, ledger):
            step(state)
            raise ZeroDivisionError("mine")

    fork_ranks(1, live)
    assert saved(run) == [1]


def test_what_a_person_must_mend_is_not_a_reason_to_save(run):
    def live(world):
        state, store, ledger = a_run(world, run)
        with pytest.raises(UserError), Rescue(store, state, world, ledger):
            step(state)
            raise UserError("--lr is too high")

    fork_ranks(1, live)
    assert saved(run) == []


def test_a_survivor_that_comes_late_to_the_end_finds_its_step_saved_and_nobody_has_taken_over(run):
    """Rank 0 lets go of the run when all have met, and whoever is told to stop after that has nothing to save."""
    def live(world):
        state, store, ledger = a_run(world, run)
        with Rescue(store, state, world, ledger) as rescue:
            step(state)
            store.save(state)
            store.close()
            if world.rank == 0:
                world.store.set("closed", "1")
            world.store.wait(["closed"])
            before = rescue._save_noting("SIGTERM")
        return before, rescue._save_noting("SIGTERM")

    assert fork_ranks(2, live) == [(("step 1 was saved already", False),) * 2] * 2
    assert saved(run) == [1]
    assert not list((run / "checkpoints").glob(".life-*"))


@pytest.mark.parametrize("dies", [False, True])
def test_torchrun_finds_a_whole_account_of_an_error_or_none(tmp_path, monkeypatch, dies):
    """Its agent ends of half a file, whatever restarts were left; and it sends its SIGTERM when another rank fails first."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def live(world):
        @record
        @speaking_errors
        def main(opts):
            raise ZeroDivisionError("mine")

        def half(data, file):
            file.write('{"mess')
            file.flush()
            os.kill(os.getpid(), signal.SIGTERM)

        if dies:
            json.dump = half
        atexit._clear()
        with pytest.raises(ZeroDivisionError):
            main(SimpleNamespace(debug=True))
        atexit._run_exitfuncs()

    fork_ranks(1, live, may_die=[0])
    found = tmp_path / "error.json"
    assert not found.exists() if dies else "mine" in json.loads(found.read_text())["message"]["message"]


# ---- many at once ----------------------------------------------------------------------------------------------------------
def test_eight_ranks_of_a_node_write_once_and_the_newest_step_wins(run):
    def live(world):
        state, store, _ = a_run(world, run)
        writes = []
        real, store._write = store._write, lambda facts: (writes.append(facts["step"]), real(facts))
        for _ in range(4 if world.rank == 5 else 3):                            # one rank had finished one step more
            step(state)
        world.meet("steps")
        store.rescue(state)
        world.meet("rescued")
        return writes

    writes = sorted(sum(fork_ranks(8, live), []))
    assert writes in ([4], [3, 4])
    assert saved(run)[0] == 4


def test_ranks_that_die_while_saving_leave_it_to_the_next(run):
    """Rank 0, which holds the meeting place, is the one that lives."""
    def live(world):
        state, store, _ = a_run(world, run)
        step(state)
        world.meet("step")
        if world.rank:
            store._write = lambda facts: os.kill(os.getpid(), signal.SIGKILL)
        else:
            time.sleep(0.1)                                                     # so that the others come first
        return store.rescue(state)

    assert fork_ranks(3, live, may_die=[1, 2])[0] is True
    assert saved(run) == [1]
