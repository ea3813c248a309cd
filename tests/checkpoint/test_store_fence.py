"""One job writes into a run folder, and of that job only the newest life: whoever was declared dead commits
nothing.
"""
import contextlib
import errno
import fcntl
import json
import os
import signal
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

from common.checkpoint import disk, fence
from common.checkpoint.fence import Fenced
from common.checkpoint.folder import checkpoints
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
    mine.write(process="1073741824/1")
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
        owner = f"in use by another job: host {os.uname().nodename}, pid {pid}"
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
        real = disk.sync_folder

        def stop(path):
            real(path)
            if path.name.startswith("step-00000009"):  # written and whole: only the rename is missing
                ready.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
                # the signal may stop this thread a moment later
                until(go.exists, "the successor has taken over")
        disk.sync_folder = stop
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


def elsewhere(patch):
    """Each process is from now on on a machine of its own."""
    real = fence.this_process
    patch.setattr(fence, "this_process", lambda: real() | {"machine": f"machine of {os.getpid()}"})
    patch.setattr(fence, "has_ended", lambda owner, name: False)


@pytest.mark.parametrize("locks", ["as they should be", "local to each machine"])
def test_an_owner_whose_moves_show_late_is_not_robbed(tmp_path, monkeypatch, locks):
    """A second for what takes half a minute: a file system that tells other machines of a write once in a
    while.
    """
    opts, here, go, end = options(tmp_path), *(tmp_path / name for name in ("here", "go", "end"))
    for name, seconds in (("STALE_SECONDS", 0.3 if locks == "as they should be" else 2.5),
                          ("LEASE_SECONDS", 5.0), ("MOVING_SECONDS", 3.0)):
        monkeypatch.setattr(fence, name, seconds)
    elsewhere(monkeypatch)

    def live(life):
        until(go.exists, "the second job was refused")
        save(life, 1)
        end.touch()
    with monkeypatch.context() as patch:
        patch.setattr(fence, "BEAT_SECONDS", 1.0)
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
        opened[fd] = real["pread"](fd, fence.RECORD_BYTES, 0) if os.path.basename(path) == "lock" else None
        return fd

    monkeypatch.setattr(fence, "LEASE_SECONDS", 2.5)
    monkeypatch.setattr(fence, "MOVING_SECONDS", 2.0)
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
    monkeypatch.setattr(fence, "STALE_SECONDS", 1.5)

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
        patch.setattr(fence, "BEAT_SECONDS", 1000)
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
        real = disk.sync_folder

        def slow(path):
            if path.name.startswith("step-"):
                here.write_text("now")
                until(lambda: f'"{life.store.world.life}"' not in lock.read_text(),
                      "the next life has claimed the run")
                time.sleep(0.5)
            real(path)
        disk.sync_folder = slow
        announced_rescue(life.store, at_step(life.state, 5))
        os._exit(0)

    with lives(opts, here, rescue_slowly):
        until(lambda: here.exists() and here.read_text() == "now", "the rescue is on its way")
        with a_life(opts) as life:
            assert is_at(life.state, 5)


def test_a_rescuer_that_stands_still_is_not_waited_for_and_commits_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(fence, "RESCUE_SECONDS", 1.5)
    opts, here, go, end = options(tmp_path), tmp_path / "here", tmp_path / "go", tmp_path / "end"

    def stop_in_rescue(life):
        rank_0_dies(life)
        real = disk.sync_folder

        def stop(path):
            if path.name.startswith("step-"):
                os.kill(os.getpid(), signal.SIGSTOP)
                until(go.exists, "the successor has taken over")
            real(path)
        disk.sync_folder = stop
        try:
            announced_rescue(life.store, at_step(life.state, 5))
            end.write_text("rescued")
        except Fenced:
            end.write_text("fenced")
        os._exit(0)

    with lives(opts, here, stop_in_rescue) as pid:
        until(lambda: here.exists() and state_of(pid) == "T", "the rescuer stands still")
        with a_life(opts) as life:
            assert life.source is None
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
        with fence.rescuing(staging / fence.RESCUE, moved, lambda: False):
            here.touch()
            until(go.exists, "it was waited for")
        here.unlink()

    def waited():
        began = time.monotonic()
        fence.wait_for(staging / fence.RESCUE)
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
        patch.setattr(fence, "BEAT_SECONDS", 1000)  # its machine is gone, and the network keeps its lock
        here.unlink()
        with child(lambda: rescue(None)):
            until(here.exists, "the rescue has begun")
            assert 1.4 < waited() < 2.9
            # nor does it keep another survivor from saving
            with fence.rescuing(staging / fence.RESCUE, None, lambda: False):
                assert waited() < 1


def test_only_what_is_ours_is_swept(tmp_path, monkeypatch):
    opts, real = options(tmp_path), os.rename
    with a_life(opts) as life:
        save(life, 1)
    root = opts.run_dir / "checkpoints"
    for name in (".snapshot", ".life-abc", ".life-abc.gone-1"):
        (root / name).mkdir()
    (root / ".life-abc.lock").touch()
    (opts.run_dir / "mine.77.new").touch()  # a person's own file

    def rename(old, new):
        if str(old).endswith(".snapshot"):
            raise OSError(errno.EROFS, "Read-only file system", str(old))
        real(old, new)
    monkeypatch.setattr(os, "rename", rename)
    with a_life(opts) as life:  # a filer's own folder is none of our business
        assert is_at(life.state, 1)
    assert sorted(os.listdir(root)) == [".snapshot", "step-00000001"]
    assert sorted(os.listdir(opts.run_dir)) == ["checkpoints", "lock", "mine.77.new", "options.json"]


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
    for content in (b"", b"\0" * 512, b"[1]", b"[" * 5000, b'{"beat": NaN, "job": []}', os.urandom(3000),
                    f'{{"job": {job}, "machine": 7, "process": [], "beat": {{}}}}'.encode()):
        (opts.run_dir / "lock").write_bytes(content)
        with a_life(opts) as life:
            save(life, 1)
    assert checkpoints(opts.run_dir / "checkpoints")


def test_time_in_which_nobody_could_look_is_not_time_in_which_the_owner_stood_still(monkeypatch):
    """The file server was away, or this process was stopped: the owner's counter could not move either."""
    now, still = [100.0], fence.Still()
    monkeypatch.setattr(fence.time, "monotonic", lambda: now[0])
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


@pytest.mark.parametrize("gone", ["they stand still", "they never leave"])
def test_nodes_that_do_not_leave_are_not_waited_for_one_after_the_other(tmp_path, monkeypatch, gone):
    staging, new = tmp_path / "run/checkpoints/.life-a", fence.Fence(tmp_path / "run", "b")
    staging.mkdir(parents=True)
    monkeypatch.setattr(fence, "NODE_STILL_SECONDS", 1.0 if gone == "they stand still" else 60.0)
    monkeypatch.setattr(fence, "NODES_SECONDS", 2.0)

    def attend(rank):
        fence.Fence(tmp_path / "run", "a").attend(rank)
        (tmp_path / f"here-{rank}").touch()
        signal.pause()

    with contextlib.ExitStack() as nodes:
        for rank in range(1, 6):
            nodes.enter_context(child(lambda rank=rank: attend(rank)))
        until(lambda: len(list(tmp_path.glob("here-*"))) == 5, "the nodes train")
        waits, real = [], fence.wait_for
        monkeypatch.setattr(fence, "wait_for", lambda *args, **how: (waits.append(how["deadline"]),
                                                                     real(*args, **how)))
        new._sweep()
    assert len(waits) == 5 and len(set(waits)) == 1 and not staging.exists()


def test_a_node_that_trains_writes_to_the_shared_disk_once_in_ten_seconds(tmp_path, monkeypatch):
    (tmp_path / "run/checkpoints/.life-a").mkdir(parents=True)
    node = fence.Fence(tmp_path / "run", "a")
    closing = []
    monkeypatch.setattr(fence.atexit, "register", closing.append)
    monkeypatch.setattr(fence, "BEAT_SECONDS", 0.01)  # of an owner
    node.attend(1)
    time.sleep(0.5)
    assert json.loads((node.staging / "node.1").read_text())["beat"] == 0 and fence.NODE_BEAT_SECONDS == 10
    closing[0]()


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
        store.rescue(state)
        return len(took)

    assert sum(fork_ranks(6, stop)) == 1 and steps_of(opts) == [3]
