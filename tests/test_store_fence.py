"""One job writes into a run folder, and of that job only the newest life: whoever was declared dead commits nothing."""
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from stores import a_life, at_step, child, end, is_at, new_store, options, save, steps_of, tiny_state

from common import UserError, fence, files
from common.fence import Fenced
from common.manifest import checkpoints

DEADLINE = 60


def until(condition, what):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.005)


def lives(opts, path, then=lambda life: signal.pause()):
    """A child's life: it owns the run, says so in `path`, and goes on with `then`."""
    def live():
        with a_life(opts) as life:
            path.write_text(str(os.getpid()))
            then(life)
    return child(live)


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def test_a_second_job_is_refused_within_ten_seconds_with_host_and_pid_of_the_first(tmp_path):
    opts, here = options(tmp_path), tmp_path / "here"
    with lives(opts, here) as pid:
        until(here.exists, "the first job owns the run")
        began = time.monotonic()
        with pytest.raises(UserError, match=f"in use by another job: host {os.uname().nodename}, pid {pid}, life") as error:
            new_store(opts).restore(tiny_state(opts))
        assert time.monotonic() - began < 10 and error.value.code == 2
        os.kill(pid, 0)                                             # the first is unaffected


def test_the_lock_of_a_killed_job_is_taken_over_within_a_second(tmp_path):
    opts, here = options(tmp_path), tmp_path / "here"
    with lives(opts, here, lambda life: (save(life, 3), signal.pause())) as pid:
        until(lambda: steps_of(opts) == [3], "the first job has saved")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        store, state = new_store(opts), tiny_state(opts)
        began = time.monotonic()
        store.restore(state)
        assert time.monotonic() - began < 1 and is_at(state, 3)
        end(store)


def test_a_stopped_owner_is_taken_over_and_its_late_commit_is_refused(tmp_path, monkeypatch):
    """It is stopped in the middle of a save, loses the run, and wakes up to finish what it began."""
    opts, here, ready, go, end = options(tmp_path), *(tmp_path / name for name in ("here", "ready", "go", "end"))
    monkeypatch.setattr(fence, "STALE_AFTER", 1.0)

    def stop_in_mid_save(life):
        save(life, 1)
        real = files.sync_folder

        def stop(path):
            real(path)
            if path.name.startswith("step-00000009"):               # written and whole: only the rename is missing
                ready.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
                until(go.exists, "the successor has taken over")    # the signal may stop this thread a moment later
        files.sync_folder = stop
        life.store.save(at_step(life.state, 9))
        life.store.wait()
        try:
            life.store.check()
            end.write_text("committed")
        except Fenced as error:
            end.write_text(f"fenced: {error}")
        with contextlib.suppress(Fenced):
            life.store.rescue(at_step(life.state, 10))
            end.write_text("rescued")

    with lives(opts, here, stop_in_mid_save) as pid:
        until(lambda: ready.exists() and state_of(pid) == "T", "the first job stands still in mid-save")
        with a_life(opts) as life:
            assert is_at(life.state, 1)
            save(life, 2)
            go.touch()
            os.kill(pid, signal.SIGCONT)
            until(end.exists, "the first job has ended its save")
            until(lambda: state_of(pid) == "Z", "the first job has ended")
            assert end.read_text().startswith(f"fenced: {opts.run_dir} was taken over by another job while this one stood still")
            assert f"pid {os.getpid()}" in end.read_text()
            save(life, 3)
        assert steps_of(opts) == [3, 2]


def test_the_orphan_of_a_dead_agent_is_taken_over_at_once_if_it_stands_still(tmp_path, monkeypatch):
    opts, here = options(tmp_path), tmp_path / "here"
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    real = fence.about_me
    with monkeypatch.context() as patch:
        started = fence.about_me()["agent"]
        from common import processes
        patch.setattr(processes, "_agent", lambda: f"{agent.pid}/{processes._started(agent.pid)}")
        assert fence.about_me()["agent"] != started
        with lives(opts, here, lambda life: os.kill(os.getpid(), signal.SIGSTOP)) as pid:
            patch.undo()
            assert fence.about_me is real
            until(lambda: here.exists() and state_of(pid) == "T", "it stands still")
            agent.kill()
            agent.wait()
            began = time.monotonic()
            with a_life(opts) as life:
                assert life.source is None and time.monotonic() - began < fence.STALE_AFTER / 2


def test_a_live_owner_is_never_robbed_even_if_it_does_not_move_its_counter(tmp_path, monkeypatch):
    """A lock held in C for long stops every Python thread: that is no death, as long as the process can be seen to run."""
    opts, here = options(tmp_path), tmp_path / "here"
    monkeypatch.setattr(fence, "STALE_AFTER", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(fence, "BEAT", 1000)
        with lives(opts, here) as pid:
            until(here.exists, "the first job owns the run")
            with pytest.raises(UserError, match=f"pid {pid}"):
                new_store(opts).restore(tiny_state(opts))


def test_on_another_machine_only_the_counter_tells_the_living_from_the_dead(tmp_path, monkeypatch):
    opts, here = options(tmp_path), tmp_path / "here"
    monkeypatch.setattr(fence, "STALE_AFTER", 1.0)
    monkeypatch.setattr(fence, "fate_of", lambda owner: "unknown")
    with lives(opts, here) as pid:
        until(here.exists, "the first job owns the run")
        with pytest.raises(UserError, match="in use by another job"):
            new_store(opts).restore(tiny_state(opts))
        os.kill(pid, signal.SIGSTOP)
        with a_life(opts) as life:                                  # the network file system still holds its lock
            save(life, 1)
    assert steps_of(opts) == [1]


def test_a_rescue_under_way_is_waited_for_before_anything_is_swept(tmp_path):
    """The next life of a job starts while a survivor on another node still writes: those steps must not be swept."""
    opts, here, lock = options(tmp_path), tmp_path / "here", tmp_path / "run" / "lock"

    def rescue_slowly(life):
        life.store.fence.stop.set()
        os.close(life.store.fence.fd)                               # a rank that does not own: rank 0 is dead
        real = files.sync_folder

        def slow(path):
            if path.name.startswith("step-"):
                here.write_text("now")
                until(lambda: f'"{life.store.world.life}"' not in lock.read_text(), "the next life has claimed the run")
                time.sleep(0.5)
            real(path)
        files.sync_folder = slow
        life.store.rescue(at_step(life.state, 5))
        os._exit(0)

    with lives(opts, here, rescue_slowly):
        until(lambda: here.exists() and here.read_text() == "now", "the rescue is on its way")
        with a_life(opts) as life:
            assert is_at(life.state, 5)


def test_an_orphan_that_is_still_saving_is_waited_for(tmp_path, monkeypatch):
    """The agent was killed, its worker has heard of it and saves: the next job must not rob it of that."""
    opts, here = options(tmp_path), tmp_path / "here"
    fates, real = [], fence.fate_of

    def orphan(owner):
        fates.append(real(owner))
        return "orphan" if fates[-1] == "alive" else fates[-1]

    monkeypatch.setattr(fence, "fate_of", orphan)
    with lives(opts, here, lambda life: (time.sleep(1.0), life.store.rescue(at_step(life.state, 5)), os._exit(0))):
        until(here.exists, "it trains")
        with a_life(opts) as life:
            assert is_at(life.state, 5) and "alive" in fates


def test_a_rescuer_that_stands_still_is_not_waited_for_and_commits_nothing(tmp_path):
    opts, here, go, end = options(tmp_path), tmp_path / "here", tmp_path / "go", tmp_path / "end"

    def stop_in_rescue(life):
        life.store.fence.stop.set()
        os.close(life.store.fence.fd)
        life.store.writer.renew = None
        real = files.sync_folder

        def stop(path):
            if path.name.startswith("step-"):
                os.kill(os.getpid(), signal.SIGSTOP)
                until(go.exists, "the successor has taken over")
            real(path)
        files.sync_folder = stop
        try:
            life.store.rescue(at_step(life.state, 5))
            end.write_text("rescued")
        except Fenced:
            end.write_text("fenced")
        os._exit(0)

    with lives(opts, here, stop_in_rescue) as pid:
        until(lambda: here.exists() and state_of(pid) == "T", "the rescuer stands still")
        began = time.monotonic()
        with a_life(opts) as life:
            assert life.source is None and time.monotonic() - began < fence.RESCUE_WAIT / 2
            go.touch()
            os.kill(pid, signal.SIGCONT)
            until(end.exists, "the rescuer has ended")
    assert end.read_text() == "fenced" and steps_of(opts) == []


def test_two_that_take_over_at_the_same_time_do_not_both_own(tmp_path, monkeypatch):
    opts, here = options(tmp_path), tmp_path / "here"
    monkeypatch.setattr(fence, "fate_of", lambda owner: "lost")
    with lives(opts, here):
        until(here.exists, "the first job owns the run")
        results, start = [], threading.Barrier(2)

        def take():
            mine = fence.Fence(opts.run_dir, f"{threading.get_ident():012x}"[-12:])
            start.wait()
            with contextlib.suppress(UserError):
                mine.fd = mine._take_over()
                mine._sweep()
                mine.staging.mkdir()
                mine._check()
                results.append(mine)

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(mine.staging.is_dir() and mine._is_ours() for mine in results) <= 1
        for mine in results:
            os.close(mine.fd)


def intrude(opts, monkeypatch, k):
    """Save while a successor comes in before the writer's k-th call: (calls made, committed before it came, the error)."""
    real, count, before = {name: getattr(os, name) for name in ("open", "write", "fsync", "rename", "mkdir")}, [], []

    def intruding(name):
        def call(*args, **kwargs):
            if threading.current_thread().name == "writer":
                count.append(name)
                if len(count) == k:
                    real["rename"](life.store.writer.staging, f"{opts.run_dir}/checkpoints/.gone-{k}")
                    real["rename"](f"{opts.run_dir}/lock", f"{opts.run_dir}/old")
                    before.extend(steps_of(opts))
                    (opts.run_dir / "lock").write_text(json.dumps({"host": "other", "pid": 1}))
            return real[name](*args, **kwargs)
        return call

    with a_life(opts) as life:
        with monkeypatch.context() as patch:
            for name in real:
                patch.setattr(os, name, intruding(name))
            life.store.save(at_step(life.state, k))
            life.store.wait()
        error, life.store.error = life.store.error, None
    return len(count), k in before, error


def test_a_staging_that_was_moved_away_lets_nothing_through_at_any_point_of_a_save(tmp_path, monkeypatch):
    opts, k, calls = options(tmp_path), 0, 1
    while k < calls:
        k += 1
        calls, committed, error = intrude(opts, monkeypatch, k)
        assert (k in steps_of(opts)) == committed or k > calls, (k, committed)
        assert committed or isinstance(error, Fenced) or k > calls, (k, error)
    assert calls > 15


def test_the_lock_file_may_hold_anything(tmp_path):
    opts = options(tmp_path)
    with a_life(opts):
        pass
    for content in (b"", b"\0" * 512, b"[1]", b"[" * 5000, b'{"beat": NaN, "agents": 5, "job": []}', os.urandom(3000)):
        (opts.run_dir / "lock").write_bytes(content)
        with a_life(opts) as life:
            save(life, 1)
    assert checkpoints(opts.run_dir / "checkpoints")
