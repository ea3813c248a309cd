"""One job writes into a run folder, and of that job only the newest life: whoever was declared dead commits
nothing.
"""
import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
from ranks import fork_ranks
from stores import (
    a_life,
    announced_rescue,
    at_step,
    child,
    end,
    is_at,
    new_store,
    options,
    save,
    steps_of,
    tiny_state,
)

from common.checkpoint import fence, files, owner
from common.checkpoint import lock_file as held
from common.checkpoint.fence import Fenced
from common.checkpoint.manifest import checkpoints
from common.errors import UserError

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


def rank_0_dies(life):
    """This process goes on as another rank of its node."""
    mine = life.store.fence.held
    mine.stop.set()
    mine.thread.join()
    mine.write(pid=1 << 30)
    os.close(mine.fd)
    life.store.writer.renew = None


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def test_a_second_job_is_refused_within_ten_seconds_with_host_and_pid_of_the_first(tmp_path):
    opts, here = options(tmp_path), tmp_path / "here"
    with lives(opts, here) as pid:
        until(here.exists, "the first job owns the run")
        began = time.monotonic()
        owner = f"in use by another job: host {os.uname().nodename}, pid {pid}, life"
        with pytest.raises(UserError, match=owner) as error:
            new_store(opts).restore(tiny_state(opts))
        assert time.monotonic() - began < 10 and error.value.code == 6
        os.kill(pid, 0)  # the first is unaffected


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
    opts, here, ready, go, end = options(tmp_path), *(tmp_path / name
                                                      for name in ("here", "ready", "go", "end"))
    monkeypatch.setattr(fence, "STALE_SECONDS", 1.0)

    def stop_in_mid_save(life):
        save(life, 1)
        real = files.sync_folder

        def stop(path):
            real(path)
            if path.name.startswith("step-00000009"):  # written and whole: only the rename is missing
                ready.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
                # the signal may stop this thread a moment later
                until(go.exists, "the successor has taken over")
        files.sync_folder = stop
        life.store.save(at_step(life.state, 9))
        life.store.wait()
        try:
            life.store.check()
            end.write_text("committed")
        except Fenced as error:
            end.write_text(f"fenced: {error}")
        with contextlib.suppress(Fenced):
            announced_rescue(life.store, at_step(life.state, 10))
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
            assert end.read_text().startswith(f"fenced: {opts.run_dir} was taken over by another job while "
                                              f"this one stood still")
            assert f"pid {os.getpid()}" in end.read_text()
            save(life, 3)
        assert steps_of(opts) == [3, 2]


def test_the_orphan_of_a_dead_agent_is_taken_over_at_once_if_it_stands_still(tmp_path, monkeypatch):
    opts, here = options(tmp_path), tmp_path / "here"
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    real = fence.this_process
    with monkeypatch.context() as patch:
        started = fence.this_process()["agent"]
        from common.options import process as processes
        patch.setattr(processes, "this_agent", lambda: f"{agent.pid}/{processes._started(agent.pid)}")
        assert fence.this_process()["agent"] != started
        with lives(opts, here, lambda life: os.kill(os.getpid(), signal.SIGSTOP)) as pid:
            patch.undo()
            assert fence.this_process is real
            until(lambda: here.exists() and state_of(pid) == "T", "it stands still")
            agent.kill()
            agent.wait()
            began = time.monotonic()
            with a_life(opts) as life:
                assert life.source is None and time.monotonic() - began < fence.STALE_SECONDS / 2


def test_a_live_owner_is_never_robbed_even_if_it_does_not_move_its_counter(tmp_path, monkeypatch):
    """A lock held in C for long stops every Python thread: that is no death, as long as the process can be
    seen to run.
    """
    opts, here = options(tmp_path), tmp_path / "here"
    monkeypatch.setattr(fence, "STALE_SECONDS", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(held, "BEAT_SECONDS", 1000)
        with lives(opts, here) as pid:
            until(here.exists, "the first job owns the run")
            with pytest.raises(UserError, match=f"pid {pid}"):
                new_store(opts).restore(tiny_state(opts))


def elsewhere(patch, machine="another"):
    """What this process sees as of now is on another machine than itself."""
    real = fence.holder_status
    patch.setattr(fence, "holder_status",
                  lambda owner: real(owner | {"machine": machine} if owner else owner))


def test_on_another_machine_only_the_counter_tells_the_living_from_the_dead(tmp_path, monkeypatch):
    opts, here = options(tmp_path), tmp_path / "here"
    monkeypatch.setattr(fence, "LEASE_SECONDS", 4.0)
    elsewhere(monkeypatch)
    with lives(opts, here) as pid:
        until(here.exists, "the first job owns the run")
        with pytest.raises(UserError, match="in use by another job") as error:
            new_store(opts).restore(tiny_state(opts))
        assert error.value.code == 6
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with a_life(opts) as life:  # the network file system still holds its lock
            assert time.monotonic() - began > 3.5
            save(life, 1)
    assert steps_of(opts) == [1]


def test_the_free_lock_of_a_process_elsewhere_is_taken_in_seconds_and_not_after_a_lease(tmp_path,
                                                                                        monkeypatch):
    opts, here = options(tmp_path), tmp_path / "here"
    monkeypatch.setattr(fence, "LEASE_SECONDS", 30.0)
    elsewhere(monkeypatch)
    with lives(opts, here) as pid:
        until(here.exists, "the first job owns the run")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        began = time.monotonic()
        with a_life(opts):
            assert fence.FREE_LOCK_SECONDS <= time.monotonic() - began < 10
    began = time.monotonic()
    with a_life(opts):  # that one has signed off
        assert time.monotonic() - began < 1


@pytest.mark.parametrize("locks", ["as they should be", "local to each machine"])
def test_an_owner_whose_moves_show_late_is_not_robbed(tmp_path, monkeypatch, locks):
    """A second for what takes half a minute: a file system that tells other machines of a write once in a
    while.
    """
    opts, here, go, end = options(tmp_path), *(tmp_path / name for name in ("here", "go", "end"))
    monkeypatch.setattr(fence, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(fence, "LEASE_SECONDS", 5.0)
    elsewhere(monkeypatch)

    def live(life):
        until(go.exists, "the second job was refused")
        save(life, 1)
        end.touch()
    with monkeypatch.context() as patch:
        patch.setattr(held, "BEAT_SECONDS", 1.0)
        if locks != "as they should be":
            monkeypatch.setattr(fcntl, "lockf", lambda *args: None)
        with lives(opts, here, live):
            until(here.exists, "the first job owns the run")
            with pytest.raises(UserError, match="in use by another job") as error:
                new_store(opts).restore(tiny_state(opts))
            assert error.value.code == 6
            go.touch()
            until(end.exists, "the first job goes on")
    assert steps_of(opts) == [1]


def test_the_counter_is_seen_through_the_caches_of_both_machines(tmp_path, monkeypatch):
    """As on NFS: what was written reaches the server with a sync, and what it has is seen through a new open.
    """
    opts, here, pending, opened = options(tmp_path), tmp_path / "here", {}, {}
    real = {name: getattr(os, name) for name in ("open", "pread", "pwrite", "fdatasync")}

    def pwrite(fd, data, at):
        if not os.readlink(f"/proc/self/fd/{fd}").endswith("lock"):
            return real["pwrite"](fd, data, at)
        pending[fd] = data, at

    def sync(fd):
        if fd in pending:
            real["pwrite"](fd, *pending.pop(fd))
        real["fdatasync"](fd)

    def open_(path, *args, **kwargs):
        fd = real["open"](path, *args, **kwargs)
        opened[fd] = real["pread"](fd, held.RECORD_BYTES, 0) if os.path.basename(path) == "lock" else None
        return fd

    monkeypatch.setattr(fence, "LEASE_SECONDS", 2.5)
    elsewhere(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(os, "fdatasync", sync)
        with lives(opts, here):
            patch.setattr(os, "pwrite", real["pwrite"])
            patch.setattr(os, "fdatasync", real["fdatasync"])
            until(here.exists, "the first job owns the run")
            patch.setattr(os, "open", open_)
            patch.setattr(os, "pread", lambda fd, *args: opened[fd])
            with pytest.raises(UserError, match="in use by another job"):
                new_store(opts).restore(tiny_state(opts))


@pytest.mark.parametrize("locks", ["lost", "never shared"])
def test_two_that_believe_to_hold_the_lock_do_not_both_own(tmp_path, monkeypatch, locks):
    """A lease that expired, a server that has started again; or mounts with nolock and its like."""
    opts, here, go, end = options(tmp_path, keep=9), *(tmp_path / name for name in ("here", "go", "end"))
    elsewhere(monkeypatch)

    def live(life):
        save(life, 1)
        if locks == "lost":
            # POSIX: that drops it, as a lease that expires would
            os.close(os.open(opts.run_dir / "lock", os.O_RDONLY))
        here.write_text("now")
        until(go.exists, "the successor has saved")
        with contextlib.suppress(Fenced):
            save(life, 3)
            end.write_text("saved")
        with contextlib.suppress(Fenced):
            save(life, 5)
            end.write_text("saved")
        end.write_text("fenced") if not end.exists() else None

    with monkeypatch.context() as patch:
        patch.setattr(held, "BEAT_SECONDS", 1000)
        if locks == "never shared":
            monkeypatch.setattr(fcntl, "lockf", lambda *args: None)
        with lives(opts, here, live):
            until(lambda: here.exists() and here.read_text() == "now", "the first job has lost its lock")
            with a_life(opts) as life:
                save(life, 2)
                go.touch()
                until(lambda: end.exists() and end.read_text(), "the first job has tried to save")
                save(life, 4)
            assert end.read_text() == "fenced"
    assert steps_of(opts) == [4, 2, 1]


@pytest.mark.parametrize("stands_still", [True, False])
def test_a_newer_life_of_the_same_job_has_the_run_in_the_end(tmp_path, monkeypatch, stands_still):
    """Its agents have given up a machine that they cannot reach: whether that one trains on or not, nobody
    waits for ever.
    """
    opts, here = options(tmp_path), tmp_path / "here"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setattr(owner, "agent_id", lambda: 7)
    for name, seconds in (("STALE_SECONDS", 1.0), ("SAME_JOB_SECONDS", 3.0), ("LEASE_SECONDS", 60.0)):
        monkeypatch.setattr(fence, name, seconds)
    elsewhere(monkeypatch)
    with lives(opts, here) as pid:
        until(here.exists, "the first life owns the run")
        if stands_still:
            os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with a_life(opts) as life:
            assert (time.monotonic() - began < 3) is stands_still
            save(life, 1)


def test_a_rescue_under_way_is_waited_for_before_anything_is_swept(tmp_path):
    """The next life of a job starts while a survivor on another node still writes: those steps must not be
    swept.
    """
    opts, here, lock = options(tmp_path), tmp_path / "here", tmp_path / "run" / "lock"

    def rescue_slowly(life):
        rank_0_dies(life)
        real = files.sync_folder

        def slow(path):
            if path.name.startswith("step-"):
                here.write_text("now")
                until(lambda: f'"{life.store.world.life}"' not in lock.read_text(),
                      "the next life has claimed the run")
                time.sleep(0.5)
            real(path)
        files.sync_folder = slow
        announced_rescue(life.store, at_step(life.state, 5))
        os._exit(0)

    with lives(opts, here, rescue_slowly):
        until(lambda: here.exists() and here.read_text() == "now", "the rescue is on its way")
        with a_life(opts) as life:
            assert is_at(life.state, 5)


@pytest.mark.parametrize("disk", ["fast", "three times as slow as every limit"])
def test_an_orphan_that_is_still_saving_is_waited_for(tmp_path, monkeypatch, disk):
    """The agent was killed, its worker has heard of it and saves: the next job must not rob it of that."""
    opts, here = options(tmp_path), tmp_path / "here"
    fates, real = [], fence.holder_status

    def orphan(owner):
        fates.append(real(owner))
        return "orphan" if fates[-1] == "alive" else fates[-1]

    def rescue(life):
        if disk == "fast":
            time.sleep(1.0)
        else:
            write = life.store.writer._write_tensors
            life.store.writer._write_tensors = lambda *args: (time.sleep(2.4), write(*args))[1]
            life.store.save(at_step(life.state, 4))
        announced_rescue(life.store, at_step(life.state, 5))
        os._exit(0)

    monkeypatch.setattr(fence, "holder_status", orphan)
    if disk != "fast":
        monkeypatch.setattr(held, "BEAT_SECONDS", 0.1)
        for name in ("FREE_LOCK", "STALE", "LEASE", "SAME_JOB", "ORPHAN", "RESCUE"):
            monkeypatch.setattr(fence, f"{name}_SECONDS", 0.8)
    with lives(opts, here, rescue):
        until(here.exists, "it trains")
        with a_life(opts) as life:
            assert is_at(life.state, 5) and "alive" in fates


def test_a_rescuer_that_stands_still_is_not_waited_for_and_commits_nothing(tmp_path):
    opts, here, go, end = options(tmp_path), tmp_path / "here", tmp_path / "go", tmp_path / "end"

    def stop_in_rescue(life):
        rank_0_dies(life)
        real = files.sync_folder

        def stop(path):
            if path.name.startswith("step-"):
                os.kill(os.getpid(), signal.SIGSTOP)
                until(go.exists, "the successor has taken over")
            real(path)
        files.sync_folder = stop
        try:
            announced_rescue(life.store, at_step(life.state, 5))
            end.write_text("rescued")
        except Fenced:
            end.write_text("fenced")
        os._exit(0)

    with lives(opts, here, stop_in_rescue) as pid:
        until(lambda: here.exists() and state_of(pid) == "T", "the rescuer stands still")
        began = time.monotonic()
        with a_life(opts) as life:
            assert life.source is None and time.monotonic() - began < fence.RESCUE_SECONDS / 2
            go.touch()
            os.kill(pid, signal.SIGCONT)
            until(end.exists, "the rescuer has ended")
    assert end.read_text() == "fenced" and steps_of(opts) == []


def claim_within_a_claim(opts, monkeypatch, k):
    """A second one claims before the first one's k-th call: (calls made, the two)."""
    real, count = {name: getattr(os, name) for name in ("open", "rename", "mkdir", "listdir", "pwrite")}, []
    first, second = (fence.Fence(opts.run_dir, uuid.uuid4().hex[:12]) for _ in range(2))
    beats = threading.enumerate()

    def intruding(name):
        def call(*args, **kwargs):
            if threading.current_thread() in beats and len(count) < k:
                count.append(name)
                if len(count) == k:
                    second.claim()
            return real[name](*args, **kwargs)
        return call

    with monkeypatch.context() as patch:
        for name in real:
            patch.setattr(os, name, intruding(name))
        with contextlib.suppress(Fenced):
            first.claim()
    return len(count), first, second


def test_of_two_that_claim_at_the_same_time_one_owns_and_the_other_saves_nothing(tmp_path, monkeypatch):
    opts, k = options(tmp_path), 0
    (opts.run_dir / "checkpoints").mkdir(parents=True)
    while True:
        k += 1
        calls, first, second = claim_within_a_claim(opts, monkeypatch, k)
        if calls < k:
            break
        owns = [mine for mine in (first, second) if mine.held and mine.held.is_ours()]
        assert len(owns) == 1, k
        loser = second if owns[0] is first else first
        owns[0].renew()
        if loser.held:
            with pytest.raises(Fenced):  # what its next save would come to
                loser.renew()
        assert not loser.staging.exists() and owns[0].staging.is_dir(), k
        second.release(), first.release()
    first.release()
    assert k > 8


def test_a_rescue_is_waited_for_while_it_lives_and_moves_and_no_longer(tmp_path, monkeypatch):
    staging, here, go = tmp_path / ".life-a", tmp_path / "here", tmp_path / "go"
    staging.mkdir()
    monkeypatch.setattr(fence, "RESCUE_SECONDS", 1.5)
    monkeypatch.setattr(fence, "HUNG_SECONDS", 3.0)

    def rescue(moved):
        with fence.rescuing(staging, moved):
            here.touch()
            until(go.exists, "it was waited for")
        here.unlink()

    def waited():
        began = time.monotonic()
        fence._wait_for_rescue(staging / fence.RESCUE)
        return time.monotonic() - began

    with child(lambda: rescue(time.monotonic)):  # it allocates, hashes, syncs: no file grows
        until(here.exists, "the rescue has begun")
        threading.Timer(4.0, go.touch).start()
        assert waited() > 3.9
        until(lambda: not here.exists(), "the rescue has ended")
    go.unlink()
    with child(lambda: rescue(lambda: 7)):  # it lives, and waits for what never comes
        until(here.exists, "the rescue has begun")
        assert 2.9 < waited() < 10
    with monkeypatch.context() as patch:
        patch.setattr(held, "BEAT_SECONDS", 1000)  # its machine is gone, and the network keeps its lock
        here.unlink()
        with child(lambda: rescue(None)):
            until(here.exists, "the rescue has begun")
            assert 1.4 < waited() < 2.9
            with fence.rescuing(staging):  # nor does it keep another survivor from saving
                assert waited() < 1


def test_only_what_is_ours_is_swept(tmp_path, monkeypatch):
    opts, real = options(tmp_path), os.rename
    with a_life(opts) as life:
        save(life, 1)
    root = opts.run_dir / "checkpoints"
    for name in (".snapshot", ".life-abc", ".gone-abc"):
        (root / name).mkdir()
    for path in (root / ".life-abc.lock", opts.run_dir / "lock.0123456789ab",
                 opts.run_dir / "options.json.77.new"):
        path.touch()

    def rename(old, new):
        if str(old).endswith(".snapshot"):
            raise OSError(errno.EROFS, "Read-only file system", str(old))
        real(old, new)
    monkeypatch.setattr(os, "rename", rename)
    with a_life(opts) as life:  # a filer's own folder is none of our business
        assert is_at(life.state, 1)
    assert sorted(os.listdir(root)) == [".snapshot", "step-00000001"]
    assert sorted(os.listdir(opts.run_dir)) == ["checkpoints", "lock", "options.json"]


def test_a_file_system_without_locks_is_said_with_the_way_out(tmp_path, monkeypatch):
    def lockf(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")
    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(UserError, match=r"(?s)this file system has no locks.*Lustre: -o flock.*--run-dir"):
        new_store(options(tmp_path)).restore(tiny_state(options(tmp_path)))


def intrude(opts, monkeypatch, k):
    """Save while a successor comes in before the writer's k-th call: (calls made, committed before it came,
    the error).
    """
    real, count, before = {name: getattr(os, name)
                           for name in ("open", "pwrite", "fsync", "rename", "mkdir")}, [], []

    def intruding(name):
        def call(*args, **kwargs):
            if threading.current_thread().name.startswith("writer"):
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
    job = json.dumps(fence.this_process()["job"])
    for content in (b"", b"\0" * 512, b"[1]", b"[" * 5000, b'{"beat": NaN, "agents": 5, "job": []}',
                    os.urandom(3000),
                    *(f'{{"job": {job}, "agents": {agents}, "begun": {agents}}}'.encode()
                      for agents in ("5", "[[1]]", "null")),
                    (f'{{"begun": {{"job": {job}, "agents": 5}}, "machine": 7, '
                     '"pid": [], "beat": {}}').encode()):
        (opts.run_dir / "lock").write_bytes(content)
        with a_life(opts) as life:
            save(life, 1)
    assert checkpoints(opts.run_dir / "checkpoints")


def test_time_in_which_nobody_could_look_is_not_time_in_which_the_owner_stood_still(monkeypatch):
    """The file server was away, or this process was stopped: the owner's counter could not move either."""
    now, still = [100.0], held.Still()
    monkeypatch.setattr(held.time, "monotonic", lambda: now[0])
    still(7)
    for seconds, expected in ((0.5, 0.5), (60.0, 1.5), (0.5, 2.0)):
        now[0] += seconds
        assert still(7) == expected
    assert still(8) == 0


def test_a_survivor_that_has_not_begun_its_rescue_is_waited_for(tmp_path):
    """Another node, one step ahead, is still in a long forward when the next life has begun already."""
    opts, here, lock = options(tmp_path), tmp_path / "here", tmp_path / "run" / "lock"

    def live(world):
        store, state = new_store(opts, world), tiny_state(opts)
        store.restore(state)
        if world.rank == 0:
            save(SimpleNamespace(store=store, state=state), 10)
        world.barrier("begun")
        if world.rank == 0:
            world.store.get("ready")
            here.touch()
            os._exit(1)
        world.store.set("ready", "1")
        until(lambda: f'"{world.life}"' not in lock.read_text(), "the next life has claimed the run")
        time.sleep(1)                                               # the rest of its step
        announced_rescue(store, at_step(state, 11))
        os._exit(0)

    with child(lambda: fork_ranks(2, live, node_size=1, may_die=[0, 1])):
        until(here.exists, "the owner dies")
        with a_life(opts) as life:
            assert is_at(life.state, 11)


@pytest.mark.parametrize("gone", ["it stands still", "it never leaves"])
def test_a_node_that_does_not_leave_is_not_waited_for_long(tmp_path, monkeypatch, gone):
    staging, here = tmp_path / ".life-a", tmp_path / "here"
    staging.mkdir()
    monkeypatch.setattr(fence, "NODE_STILL_SECONDS", 1.0)
    monkeypatch.setattr(fence, "NODE_SECONDS", 2.0)
    monkeypatch.setattr(held, "BEAT_SECONDS", 1000 if gone == "it stands still" else 0.1)
    mine = fence.Fence(tmp_path / "run", "b")
    mine.root, mine.staging = tmp_path, tmp_path / ".life-b"
    (tmp_path / "run").mkdir()

    def attend():
        theirs = fence.Fence(tmp_path / "run", "a")
        theirs.staging = staging
        theirs.attend(1)
        here.touch()
        signal.pause()

    with child(attend):
        until(here.exists, "the node trains")
        began = time.monotonic()
        mine._sweep()
        assert (0.9 if gone == "it stands still" else 1.9) < time.monotonic() - began < 5
        assert not staging.exists()


def test_of_many_that_stop_at_once_only_one_takes_the_lock(tmp_path):
    """A thousand ranks that take one lock in turn over a network come to their end too late."""
    opts = options(tmp_path)

    def stop(world):
        took, real = [], fence.Held

        def held_by(path, *args):
            if path.name == fence.RESCUE:
                took.append(path)
            return real(path, *args)
        fence.Held = held_by
        store, state = new_store(opts, world), tiny_state(opts)
        store.restore(state)
        write = store.writer._write_tensors
        store.writer._write_tensors = lambda *args: (time.sleep(0.5), write(*args))[1]
        at_step(state, 3)
        world.barrier("step")
        with store.writer.rescuing(3, lambda: store.writer.is_saved(state)):
            store.rescue(state)
        return len(took)

    assert sum(fork_ranks(6, stop)) == 1 and steps_of(opts) == [3]
