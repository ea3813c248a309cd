"""One job writes into a run folder, and of that job only the newest life: whoever was declared dead commits
nothing.
"""

import json
import os
import shutil
import signal
import threading
import time
import uuid
from unittest import mock

import pytest
from jobs import rows, state, until
from ranks import fork_ranks
from stores import (
    a_life,
    announced_rescue,
    at_step,
    child,
    is_at,
    lives,
    refused,
    resumes_at,
    save,
    started,
    steps_of,
    two_checkpoints,
    write,
)

from common.checkpoint import fence, writer
from common.checkpoint.fence import Fenced
from common.extras import owner
from common.extras.differ import roll_back
from common.ledger.log import Metrics
from common.place import this_process
from common.store import saver


def rank_0_dies(life):
    """This process goes on as another rank of its node."""
    mine = life.store.fence.lock
    mine.stop.set()
    mine.thread.join()
    mine.record["process"] = [1073741824, 1]
    mine.write()


def elsewhere(patch):
    """Each process is from now on on a machine of its own."""
    real = fence.this_process
    for module in (fence, owner):
        patch.setattr(module, "this_process", lambda: real() | {"machine": f"machine of {os.getpid()}"})
        patch.setattr(module, "has_ended", lambda holder, name: False)


# ---- who owns the run ---------------------------------------------------------------------------------
def test_a_second_job_is_refused_without_a_lease_and_takes_over_at_once_after_a_kill(opts):
    with lives(opts, lambda life: (save(life, 3), signal.pause())) as pid:
        until(lambda: steps_of(opts) == [3], "the first job has saved")
        refused(opts, f"in use by another job: host {os.uname().nodename}, pid {pid}", code=6)
        os.kill(pid, signal.SIGKILL)  # until then it is unaffected
        os.waitpid(pid, 0)
        began = time.monotonic()
        with a_life(opts) as life:
            assert time.monotonic() - began < fence.STALE_SECONDS and is_at(life.state, 3)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_stopped_owner_is_taken_over_and_what_it_saves_or_logs_when_it_wakes_up_is_not_there(
    tmp_path, opts, monkeypatch, leaves
):
    told = tmp_path / "told"
    lines = [{"step": 1, "epoch": 1}, {"step": 2, "epoch": 1}]
    monkeypatch.setattr(fence, "STALE_SECONDS", 1.0)

    def live(life):
        metrics = Metrics(opts.run_dir, 0)
        metrics.write(lines[0])
        save(life, 1)
        if leaves:  # a rescue tells so before its process ends
            life.store.fence.leave()
        signal.raise_signal(signal.SIGSTOP)
        metrics.write(lines[1] | {"late": True})
        for late in (write, announced_rescue):
            with pytest.raises(Fenced, match="was taken over by another life"):
                late(life.store, 9)
                life.store.check()
        told.touch()

    with lives(opts, live) as pid:
        until(lambda: state(pid) == "T", "the first job stands still")
        with a_life(opts) as life:
            assert is_at(life.state, 1)
            metrics = Metrics(opts.run_dir, 1)
            os.kill(pid, signal.SIGCONT)
            until(lambda: state(pid) == "Z", "the first job has ended")
            assert told.exists()
            metrics.write(lines[1])
            metrics.close()
    assert steps_of(opts) == [1] and rows(opts.run_dir) == lines


@mock.patch.multiple(fence, STALE_SECONDS=0.3, BEAT_SECONDS=1.0)
@mock.patch.multiple(owner, LEASE_SECONDS=4.0, MOVING_SECONDS=2.5)
def test_another_machine_takes_over_after_a_lease_and_not_while_the_owners_moves_show_late(opts, monkeypatch):
    """A second for what takes half a minute: a network tells other machines of a write once in a while."""
    elsewhere(monkeypatch)
    with lives(opts) as pid:
        refused(opts, "in use by another job", code=6)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with a_life(opts):
            assert time.monotonic() - began > owner.LEASE_SECONDS - fence.BEAT_SECONDS


def test_each_move_of_a_counter_is_synced_for_other_machines(tmp_path, monkeypatch):
    synced = []
    lock = tmp_path / "lock"
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(json.loads(lock.read_bytes())))
    held = fence.Lock(lock, 1000)
    held.record["beat"] += 1
    held.write()
    held.close()
    assert [record["beat"] for record in synced] == [0, 1, 1] and synced[2]["left"]


@pytest.mark.parametrize("stands_still", [True, False])
@mock.patch.multiple(fence, STALE_SECONDS=2.5)
@mock.patch.multiple(owner, SAME_JOB_SECONDS=3.0, LEASE_SECONDS=60.0)
def test_a_newer_life_of_the_same_job_has_the_run_in_the_end(opts, monkeypatch, stands_still):
    """Its agents have given up a machine that they cannot reach: whether that one trains on or not."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    elsewhere(monkeypatch)
    with lives(opts) as pid:
        if stands_still:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with a_life(opts) as life:
            assert stands_still or time.monotonic() - began > 2.9
            save(life, 1)


@mock.patch.multiple(fence, STALE_SECONDS=0.1)
@mock.patch.multiple(owner, LEASE_SECONDS=0.1)
def test_the_lock_file_may_hold_anything(tmp_path):
    opts, _ = two_checkpoints(tmp_path)
    for content in (b"", b"[" * 5000, os.urandom(3000), b'{"machine": 7, "process": [], "beat": {}}'):
        (opts.run_dir / "lock").write_bytes(content)
        assert resumes_at(opts, 2)


def test_time_in_which_nobody_could_look_is_not_time_in_which_the_owner_stood_still(now):
    """The file server was away, or this process was stopped: the owner's counter could not move either."""
    still = fence.IdleTimer()
    still(7)
    for seconds, expected in ((0.5, 0.5), (60.0, 1.5), (0.5, 2.0)):
        now.seconds += seconds
        assert still(7) == expected
    assert still(8) == 0


def intruding(patch, names, thread, k, intrude):
    """Before the k-th call of os.NAMES by a thread of such a name: `intrude()`; the calls up to there."""
    calls = []

    def before(real):
        def call(*args, **kwargs):
            if threading.current_thread().name.startswith(thread) and len(calls) < k:
                calls.append(real.__name__)
                if len(calls) == k:
                    intrude()
            return real(*args, **kwargs)

        return call

    for name in names:
        patch.setattr(os, name, before(getattr(os, name)))
    return calls


def test_of_two_that_claim_at_the_same_time_one_owns_and_the_other_saves_nothing(opts, monkeypatch):
    k = 0
    calls = []
    monkeypatch.setattr(fence, "STALE_SECONDS", 0.1)
    (opts.run_dir / "checkpoints").mkdir(parents=True)
    while len(calls) == k:
        k += 1
        both = first, second = [fence.Fence(opts.run_dir, uuid.uuid4().hex[:12]) for _ in range(2)]
        names = "open", "rename", "mkdir", "listdir", "pwrite"
        holders = [*both]
        with monkeypatch.context() as patch:
            calls = intruding(patch, names, "Main", k, second.claim)
            try:
                first.claim()
            except Fenced:
                first.release()
                holders = [second]
        if len(calls) == k:
            owns = [mine for mine in holders if mine.lock.is_ours()]
            assert len(owns) == 1 and [mine for mine in both if mine.staging.is_dir()] == owns, k
            second.release()
        first.release()
    assert k > 6


def test_a_staging_that_was_moved_away_lets_nothing_through_at_any_point_of_a_save(opts, monkeypatch):
    k = 0
    calls = []

    def a_successor_comes():
        os.rename(life.store.writer.staging, f"{opts.run_dir}/checkpoints/.gone-{k}")
        committed.extend(steps_of(opts))

    while len(calls) == k:
        k += 1
        committed = []
        with a_life(opts) as life:
            with monkeypatch.context() as patch:
                calls = intruding(
                    patch, ("open", "pwrite", "fsync", "rename", "mkdir"), "writer", k, a_successor_comes
                )
                write(life.store, k)
            error = life.store.saver.error
            life.store.saver.error = None
        if len(calls) == k:
            assert (k in steps_of(opts)) == (k in committed), (k, committed)
            assert k in committed or isinstance(error, Fenced), (k, error)
    assert k > 15


def test_a_look_whether_the_staging_is_there_lets_no_save_through(tmp_path, opts, monkeypatch):
    with a_life(opts) as life:
        os.rename(life.store.writer.staging, tmp_path / "gone")
        looks = intruding(monkeypatch, ("rmdir", "unlink"), "Main", 1, lambda: write(life.store, 1))
        with pytest.raises(Fenced):
            life.store.writer.check_staging(1)
        life.store.saver.error = None
    assert looks and not steps_of(opts)


def test_a_life_that_was_taken_over_puts_nothing_aside_and_does_not_say_so(tmp_path, opts):
    """It wakes up in the middle of a comparison of the ranks, and finds that they differ."""
    with a_life(opts) as life:
        save(life, 1)
        save(life, 2)
        os.rename(life.store.writer.staging, tmp_path / "gone")
        life.store.saver.agreed = 1
        with pytest.raises(ZeroDivisionError):
            roll_back(life.store, ZeroDivisionError())
    assert not life.said and sorted(os.listdir(life.store.fence.root)) == ["step-00000001", "step-00000002"]


# ---- a survivor saves, and the next life waits for it -----------------------------------------------------
def test_a_rescue_under_way_is_waited_for_before_anything_is_swept(tmp_path, opts):
    """The next life of a job starts while a survivor still writes: those steps must not be swept."""
    here = tmp_path / "here"
    lock = tmp_path / "run" / "lock"

    def rescue_slowly(life):
        rank_0_dies(life)
        real = writer.sync_folder
        mine = os.stat(lock).st_ino

        def slow(path):
            if path.name.startswith("step-"):
                here.touch()
                until(lambda: os.stat(lock).st_ino != mine, "the next life has claimed the run")
                time.sleep(0.5)
            real(path)

        writer.sync_folder = slow
        announced_rescue(life.store, 5)
        os._exit(0)

    with lives(opts, rescue_slowly):
        until(here.exists, "the rescue is on its way")
        assert resumes_at(opts, 5)


def test_a_survivor_that_has_waited_for_one_that_was_killed_is_waited_for(opts):
    staging = opts.run_dir / "checkpoints/.life-one"
    staging.mkdir(parents=True)
    lock = staging / fence.RESCUE
    lock.write_text(json.dumps(this_process() | {"process": [2**22 + 1, 0]}))
    fence.may_wait(lock, "7")
    found = []

    def save():
        with fence.rescuing(lock, time.monotonic, lambda: False, lambda: "7"):
            time.sleep(0.2)
            found.append(staging.exists())

    later = threading.Timer(0.3, save)  # it looks twice a second
    later.start()
    new = fence.Fence(opts.run_dir, "two")
    new.claim()
    later.join()
    new.release()
    assert found == [True] and not staging.exists()


@pytest.mark.parametrize("moves", [True, False])
@mock.patch.multiple(fence, BEAT_SECONDS=0.1, STALE_SECONDS=1.0, HUNG_SECONDS=0.5)
def test_a_rescue_is_waited_for_while_it_moves_and_no_longer(tmp_path, moves):
    here = tmp_path / "here"
    end = tmp_path / "end"
    path = tmp_path / fence.RESCUE

    def rescuing(progress):
        return fence.rescuing(path, progress, lambda: False, lambda: "7")

    def rescue():
        with rescuing(time.monotonic if moves else lambda: 7):
            here.touch()
            until(end.exists, "the end")

    with child(rescue):
        until(here.exists, "the rescue has begun")
        timer = threading.Timer(6, end.touch)  # longer than any limit
        timer.start()
        fence.wait_for(path)
        assert end.exists() == moves
        timer.cancel()
        if not moves:  # it does not keep another survivor from saving
            with rescuing(time.monotonic):
                assert fence.read_record(path)["pid"] == os.getpid()


@pytest.mark.parametrize("computes", [True, False])
def test_a_rescue_waits_for_a_step_as_long_as_it_computes(opts, monkeypatch, computes):
    """A huge net on CPUs takes longer than STEP_SECONDS; one that stands still is given up after them."""
    monkeypatch.setattr(saver, "STEP_SECONDS", 1.0)
    told = []
    with a_life(opts) as life:
        rescuer = threading.Thread(target=lambda: told.append(announced_rescue(life.store)))
        with life.state.lock:
            rescuer.start()
            began = time.thread_time()
            while computes and time.thread_time() - began < 2.5:
                pass
            if not computes:
                rescuer.join()
            at_step(life.state, 3)
        rescuer.join()
    assert told == ["step 3 saved by rank 0" if computes else ""]


def test_a_survivor_that_has_not_begun_its_rescue_is_waited_for(tmp_path, opts):
    """Another node, one step ahead, is still in a long forward when the next life has begun already."""
    here = tmp_path / "here"
    lock = tmp_path / "run" / "lock"

    def live(world):
        store, _ = started(opts, world)
        if world.rank == 0:
            write(store, 10)
        world.barrier()
        mine = os.stat(lock).st_ino
        if world.rank == 0:
            world.store.get("ready")
            here.touch()
            os._exit(1)
        world.store.set("ready", "1")
        until(lambda: os.stat(lock).st_ino != mine, "the next life has claimed the run")
        time.sleep(1)  # the rest of its step
        announced_rescue(store, 11)
        os._exit(0)

    with child(lambda: fork_ranks(2, live, node_size=1, may_die=[0, 1])):
        until(here.exists, "the owner dies")
        assert resumes_at(opts, 11)


def test_what_a_crash_leaves_in_staging_is_gone_after_the_next_start_and_only_that(tmp_path):
    opts, root = two_checkpoints(tmp_path, steps=(1,))
    for name in (".life-0123", ".life-0123.gone-ab"):
        shutil.copytree(root / "step-00000001", root / name / "step-00000002.1.1")
    (root / ".life-89ab").symlink_to(tmp_path)
    (root / ".life-abc.lock").touch()
    (root / ".snapshot").mkdir()  # a filer's own folder is none of our business
    (opts.run_dir / "mine.77.new").touch()  # a person's own file
    (opts.run_dir / ".new-half").touch()
    assert resumes_at(opts, 1)
    assert {*os.listdir(root)} == {".snapshot", "step-00000001"}
    ours = {"checkpoints", "ledger.jsonl", "lock", "options.json"}
    assert {*os.listdir(opts.run_dir)} == ours | {"mine.77.new"}
