"""What a survivor saves, and that it never saves anything else."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from fakes import fake_streams, on_a_gpu
from jobs import CLEAN, PACED, audit, command, events, until
from ranks import fork_ranks
from safetensors.torch import load_file
from samples import state_of
from stores import full

import common.checkpoint.fence
import common.rescue.watch
import common.store.saver
from common import errors
from common.checkpoint.folder import checkpoints
from common.errors import UserError
from common.options import parse_options
from common.rescue import Rescue
from common.store import CheckpointStore

SAMPLES = 64


def a_run(world, run, *flags):
    """(state, store) of a small net at step 0, owned as train_ddp.py would own it."""
    opts = parse_options(
        "", [f"--run-dir={run}", "--global-batch-size=8", "--optimizer=adam", *flags], script="ddp"
    )
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    state = state_of(net, opts, SAMPLES)
    store = CheckpointStore(opts, world)
    store.restore(state)
    return state, store


def step(state):
    state.net(torch.ones(8, 4)).sum().backward()
    state.update(8)


@contextlib.contextmanager
def a_life(world, run, steps, default=None, hang_timeout=0):
    """(state, store, rescue) of a run that has made so many steps; a GPU has this default stream."""
    state, store = a_run(world, run, f"--hang-timeout={hang_timeout}")
    if default:
        on_a_gpu(store, default)
    with Rescue(store) as rescue:
        for _ in range(steps):
            step(state)
        yield state, store, rescue


def end_soon():
    """A signal comes, and a step that stands still is waited for no longer than that takes."""
    common.rescue.watch.STEP_SECONDS = 0.2
    common.store.saver.STEP_SECONDS = 0.2
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()


def saved(run):
    """Of its checkpoints, the newest first; a step that is there twice is there twice."""
    return [number for number, _ in checkpoints(run)]


# ---- the watcher: a main thread that does not come back -------------------------------------------
def in_a_lock(world):
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # no signal ends this


def in_a_lock_of_its_own(world):
    """A process for loading; if the test itself is killed, it ends some time."""
    os.setsid()
    signal.alarm(600)
    in_a_lock(world)


def in_a_store(world):
    world.store.wait(["never"])


@pytest.mark.parametrize("size, stuck", [(1, in_a_lock), (2, in_a_store)])
def test_a_main_thread_stuck_in_c_is_left_behind_with_its_last_whole_step_saved(run, size, stuck):
    def live(world):
        with a_life(world, run, 2):
            world.barrier()
            get_context("fork").Process(target=in_a_lock_of_its_own, args=(world,)).start()
            end_soon()
            stuck(world)

    assert fork_ranks(size, live, may_die=range(size)) == [143] * size
    assert saved(run) == [2]


def assert_same_as_undisturbed(run, live, steps=(2,)):
    """A life that ends with 143 has saved these steps, the last one as two undisturbed steps make it."""
    assert fork_ranks(1, live, may_die=[0]) == [143]
    assert saved(run) == [*steps]

    def two_steps(world):
        state, _ = a_run(world, run.with_name("other"))
        step(state)
        step(state)
        return state.tensors()["model"]

    (expected,) = fork_ranks(1, two_steps)
    found = load_file(checkpoints(run)[0][1] / "model.safetensors")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_rescue_does_not_queue_behind_a_dead_collective(run):
    """The GPU's stream hangs, with updates behind it, for which the main thread waits."""

    def live(world):
        with fake_streams() as default, a_life(world, run, 2, default) as (state, _, _):
            state.scaler = SimpleNamespace(  # reads the GPU in the stream of the thread that asks
                step=lambda optimizer: optimizer.step(),
                update=lambda: None,
                is_enabled=lambda: False,
                state_dict=lambda: torch.cuda.current_stream().synchronize() or {"scale": 1.0},
            )
            default.hang()
            end_soon()
            for _ in range(4):
                step(state)

    assert_same_as_undisturbed(run, live)


def test_each_thread_that_asks_a_gpu_is_on_the_gpu_of_its_rank(run):
    """A new thread begins on GPU 0; here that one is full. A rescue waits for the last update."""

    def live(world):
        second = replace(world, devices=(torch.device("cuda:1"),))
        with fake_streams(gpu=1) as default, a_life(second, run, 1, default) as (state, store, _):
            store.save()
            store.saver.wait()
            step(state)
            end_soon()
            in_a_lock(world)

    assert_same_as_undisturbed(run, live, [2, 1])


def test_after_an_error_that_stays_on_the_gpu_a_life_ends_with_its_words_and_saves_nothing(run):
    words = "CUDA error: device-side assert triggered"

    def live(world):
        with fake_streams() as default, contextlib.suppress(RuntimeError):
            with a_life(world, run, 2, default) as (state, _, _):
                default.broken = RuntimeError(words)
                step(state)

    fork_ranks(1, live)
    assert [event["why"] for event in events(run, "error")] == [f"RuntimeError: {words}"]
    assert saved(run) == []


def test_weights_that_a_forward_has_changed_are_not_saved(run):
    def live(world):
        with pytest.raises(UserError, match="changed by a forward"), a_life(world, run, 1) as (state, _, _):
            torch.nn.init.ones_(state.net[0].weight)
            step(state)

    fork_ranks(1, live)
    assert saved(run) == []


def test_the_end_of_a_rank_is_heard_by_all_although_their_collectives_hang(run):
    """As with NCCL: no collective fails. Rank 1 is no neighbour of rank 3."""

    def live(world):
        with a_life(world, run, 2):
            world.barrier()
            if world.rank == 3:
                signal.raise_signal(signal.SIGKILL)
            in_a_lock(world)

    assert fork_ranks(4, live, may_die=range(4)) == [1, 1, 1, -signal.SIGKILL]
    assert saved(run) == [2] and len(events(run, "left")) == 3
    assert [event["rank"] for event in events(run, "death")] == [3]


def test_a_peers_end_with_a_signal_of_the_agent_after_it_ends_with_143(run, monkeypatch):
    """The agent then begins another life, or changes the world as planned."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")

    def live(world):
        with a_life(world, run, 1) as (_, store, _):
            rescue = store.rescue
            store.rescue = lambda why: (rescue(why), os.kill(os.getpid(), signal.SIGTERM))[0]
            world.barrier()
            if world.rank == 1:
                signal.raise_signal(signal.SIGKILL)
            world.barrier()

    assert fork_ranks(2, live, may_die=range(2)) == [143, -signal.SIGKILL]
    assert [len(events(run, name)) for name in ("peer", "death", "stop")] == [1, 1, 0]


def test_an_error_that_all_ranks_have_found_keeps_its_code_on_those_that_leave_last(run):
    met = run.with_name("met")

    def live(world):
        try:
            with a_life(world, run, 1) as (state, _, rescue):
                world.barrier()
                if world.rank == 1:
                    met.touch()
                    until(rescue.watch.lifelines.lost.is_set, "the end of rank 0")
                until(met.exists, "rank 1 to need no store any more")
                state.invalid = UserError("wrong numbers", code=7)
                raise state.invalid
        except UserError as error:
            os._exit(error.code)

    assert fork_ranks(2, live, may_die=range(2)) == [7, 7]


# ---- a slow disk is no hang -----------------------------------------------------------------------
def stops(world, state, store, rescue):
    signal.raise_signal(signal.SIGTERM)
    until(lambda: rescue.asked, "the signal")
    rescue.leave()


def hangs(world, state, store, rescue):
    threading.Event().wait()


def saves_again(world, state, store, rescue):
    """The second save waits for the first, and the others wait for this rank, here and at the end."""
    store.save()
    step(state)
    store.save()
    world.all_sum(torch.ones(1))
    store.close()


@pytest.mark.parametrize(
    "case, codes, steps", [(stops, [143], [1]), (hangs, [1], [1]), (saves_again, [None] * 2, [2, 1])]
)
def test_a_disk_that_takes_three_times_the_hang_limit_costs_nothing(run, case, codes, steps):
    def live(world):
        with contextlib.suppress(RuntimeError), a_life(world, run, 1, hang_timeout=1) as life:
            _, store, _ = life
            commit = store.writer.commit
            store.writer.commit = lambda *args: (time.sleep(3), commit(*args))[1]
            case(world, *life)

    may_die = [0] if len(codes) == 1 else ()
    assert fork_ranks(len(codes), live, may_die=may_die) == codes
    assert saved(run) == steps


def test_while_the_watchdog_watches_no_collective_gives_up_before_it(run):
    """Twenty median steps may be longer than any time-out of the process group."""

    def live(world):
        with a_life(world, run, 0):
            if world.rank == 0:
                time.sleep(2.5)  # of a time-out of one second
            return world.all_sum(torch.ones(1)).item()

    assert fork_ranks(2, live, hang_timeout=1) == [2, 2]


def test_a_save_that_writes_no_byte_any_more_keeps_no_rescue_waiting(run):
    def live(world):
        common.checkpoint.fence.HUNG_SECONDS = 0.3
        with a_life(world, run, 1) as life:
            _, store, _ = life
            commit = store.writer.commit
            began = threading.Event()
            store.writer.commit = lambda *args: (began.set(), threading.Event().wait())
            store.save()
            began.wait()
            store.writer.commit = commit
            stops(world, *life)

    assert fork_ranks(1, live, may_die=[0]) == [143]
    assert saved(run) == [1]


def test_a_death_while_all_wait_for_the_end_is_no_good_end(run):
    def live(world):
        with pytest.raises(RuntimeError), a_life(world, run, 0):
            world.barrier()
            if world.rank == 0:
                signal.raise_signal(signal.SIGKILL)

    assert fork_ranks(2, live, may_die=[0]) == [-signal.SIGKILL, None]


def test_a_thread_may_dismiss_the_agent(monkeypatch):
    """Else the thread of a rescue would never come to its end."""
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)", "torchrun"])
    until(lambda: command(agent.pid), "its command line, which it has a moment later than its program")
    monkeypatch.setenv("LAUNCHER_PID", str(agent.pid))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "9")
    threading.Thread(target=errors.dismiss_agent).start()
    assert agent.wait(300) == -signal.SIGTERM


# ---- what the exit code says ----------------------------------------------------------------------
@pytest.mark.parametrize("what, code", [("a full disk", 4), ("a NaN", 5)])
def test_143_is_not_left_with_where_the_state_was_not_saved(run, what, code):
    def live(world):
        with a_life(world, run, 1) as life:
            state, store, _ = life
            if what == "a NaN":
                state.net[0].weight.data.fill_(float("nan"))
            else:
                store.writer.commit = full
            stops(world, *life)

    assert fork_ranks(1, live, may_die=[0]) == [code]
    assert saved(run) == []


# ---- all or nothing -------------------------------------------------------------------------------
def test_a_signal_inside_the_optimizer_finishes_the_step_first(run):
    """The watcher's patience ends within the step, so only the lock holds it back."""

    def live(world):
        common.rescue.watch.STEP_SECONDS = 1.0
        with a_life(world, run, 1) as (state, _, _):
            real = state.optimizer.step
            weight = state.net[0].weight

            def slow_step():
                whole = weight.detach().clone()
                signal.raise_signal(signal.SIGTERM)
                weight.data.add_(1)  # half a step: nobody may see this
                time.sleep(1.3)
                weight.data.copy_(whole)
                real()

            state.optimizer.step = slow_step
            step(state)
            threading.Event().wait()  # the watcher is the one that leaves

    assert_same_as_undisturbed(run, live)


@pytest.mark.parametrize("code, kept", [(1, [1]), (2, [1]), *((code, []) for code in (4, 5, 6, 7))])
def test_an_error_is_raised_on_and_costs_no_step_unless_the_state_must_not_be_saved(run, code, kept):
    """A bad sample or a full /dev/shm says nothing against the steps made so far."""

    def live(world):
        with pytest.raises(UserError, match="mine"), a_life(world, run, 1):
            raise UserError("mine", code)

    fork_ranks(1, live)
    assert saved(run) == kept


# ---- many at once ---------------------------------------------------------------------------------
def test_of_eight_ranks_on_two_nodes_one_owns_and_one_rescues_and_the_newest_step_wins(run):
    """A thousand that save in turn over a network come to their end too late."""

    def live(world):
        state, store = a_run(world, run)
        for _ in range(4 if world.rank == 5 else 3):  # one rank had finished one step more
            step(state)
        world.barrier()
        store.rescue("death")
        world.barrier()
        return store.owns

    assert fork_ranks(8, live, node_size=4) == [True, *[False] * 7]
    assert saved(run)[0] == 4
    assert sorted(event["step"] for event in events(run, "rescue")) in ([4], [3, 4])


def test_ranks_that_die_while_saving_leave_it_to_the_next(run):
    """Rank 0, which holds the meeting place, is the one that lives."""

    def live(world):
        state, store = a_run(world, run)
        step(state)
        world.barrier()
        if world.rank:
            store.saver.write = lambda *args: signal.raise_signal(signal.SIGKILL)
        else:
            time.sleep(0.1)  # so that the others come first
        return store.rescue("death")

    assert fork_ranks(3, live, may_die=[1, 2])[0] == "step 1 saved by rank 0"
    assert saved(run) == [1]


DEAF = """
import pathlib
from common.rescue.watch import Watch
from paced import net
struck = pathlib.Path(__file__).with_name("struck")
def is_late(self, ending):
    if struck.exists():
        return real(self, ending)
    while self.hang.state.progress.step < 3:
        self.selector.select(0.01)
    struck.touch()
    raise OSError(5, "of any kind")
real, Watch.is_late = Watch.is_late, is_late
"""


def test_a_life_whose_watch_ends_by_an_error_ends_saved(jobs, run, tmp_path):
    """Else nobody hears of a signal, a death or a hang any more, and it trains on."""
    (tmp_path / "deaf.py").write_text(DEAF)
    flags = [f"--model={tmp_path}/deaf.py:net", *PACED[1:], f"--run-dir={run}"]
    said = jobs.python("train_ddp.py", *flags).ends_with(1)
    assert re.search(r"rank 0: OSError: \[Errno 5\] of any kind; step \d+ saved", said), said
    jobs.python("train_ddp.py", *flags, PACE="0").ends_with(0)
    assert audit(run) == CLEAN
