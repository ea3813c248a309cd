"""File systems as they are: slow, away, late to tell (netfs.py)."""

import os
import signal
import threading
import time

import pytest
from jobs import CLEAN, PACED, audit, events, until, wait_for
from jobs import lives as lives_of
from netfs import served
from ranks import fork_ranks
from stores import (
    a_life,
    announced_rescue,
    at_step,
    end,
    is_at,
    lives,
    options,
    refused,
    resumes_at,
    save,
    started,
    steps_of,
    write,
)

from common import place
from common.checkpoint import disk, fence

LATE = 2  # seconds; NFS: up to 60


def becomes(machine):
    """What this process does from now on, it does on that machine."""
    place._this_boot = lambda: f"machine {machine}"


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    monkeypatch.setattr(place, "_this_boot", place._this_boot)
    monkeypatch.setattr(disk, "RETRY_SECONDS", (0.05,) * len(disk.RETRY_SECONDS))
    for name, seconds in (("MOVING_SECONDS", 2.0), ("STALE_SECONDS", 1.2), ("LEASE_SECONDS", 2.5)):
        monkeypatch.setattr(fence, name, seconds)


def test_a_training_with_a_kill_on_a_slow_disk_ends_like_any_other(jobs, tmp_path):
    with served(tmp_path, latency=0.001) as fs:
        run = fs.mounts[0] / "run"
        job = jobs.torchrun(2, "train_ddp.py", *PACED, f"--run-dir={run}", "--save-every=100", PACE="0.02")
        assert jobs.kill(wait_for(run, 6, job=job)["pids"][1])
        wait_for(run, 14, 1, job)
        fs.set(away=True)
        time.sleep(1)
        fs.set(away=False)
        job.ends_with(0)
        assert len(lives_of(run)) == 2 and events(run, "rescue")
        assert audit(run) == CLEAN


def test_a_second_job_on_another_machine_is_refused_and_takes_over_after_a_lease(tmp_path):
    with served(tmp_path, machines=2, late=LATE) as fs:
        mine, theirs = (options(mount, keep=9) for mount in fs.mounts)
        with lives(theirs, lambda life: (save(life, 1), signal.pause()), lambda: becomes(1)) as pid:
            becomes(0)
            refused(mine, f"in use by another job: host .*, pid {pid}", code=6)
            os.kill(pid, signal.SIGSTOP)
            began = time.monotonic()
            with a_life(mine) as life:
                assert is_at(life.state, 1)
                assert time.monotonic() - began > fence.LEASE_SECONDS - fence.BEAT_SECONDS
                save(life, 2)


def test_the_nodes_of_a_job_that_start_into_a_new_shared_folder_find_it_to_be_one(tmp_path):
    """Each has just looked for the folder, and its machine remembers that there was none."""
    with served(tmp_path, machines=3, late=LATE) as fs:

        def begin(world):
            becomes(world.rank)
            opts = options(fs.mounts[world.rank])
            assert not os.path.exists(opts.run_dir / "checkpoints")
            world.barrier()
            store, state = started(opts, world)
            if store.owns:
                write(store, 3)
            world.barrier()
            return store.owns, store.writer.staging.name, end(store)

        found = fork_ranks(3, begin, node_size=1)
        assert [owns for owns, *_ in found] == [True, False, False] and len(set(found[1:])) == 1
        assert steps_of(options(fs.server)) == [3]


def test_a_survivor_on_another_machine_saves_what_the_owner_would_have(tmp_path):
    with served(tmp_path, machines=2, late=LATE) as fs:

        def live(world):
            becomes(world.rank)
            opts = options(fs.mounts[world.rank])
            store, state = started(opts, world)
            if store.owns:
                at_step(state, 3)
                store.save()
            world.barrier()
            if world.rank == 0:
                world.store.wait(["rescued"])
                os._exit(1)
            written = announced_rescue(store, 4)
            world.store.set("rescued", "1")
            return written

        assert fork_ranks(2, live, node_size=1, may_die=[0]) == [1, "step 4 saved by rank 1"]
        becomes(2)
        assert resumes_at(options(fs.mounts[0]), 4)


def test_a_server_that_was_away_for_longer_than_a_lease_costs_no_job_its_run(tmp_path, monkeypatch):
    """Nobody could move a counter meanwhile, and nobody could look."""
    with served(tmp_path, machines=2) as fs:
        mine, theirs = (options(mount, keep=9) for mount in fs.mounts)
        saved = tmp_path / "saved"
        monkeypatch.setattr(fence, "LEASE_SECONDS", 1.5)

        def live(life):
            until((tmp_path / "go").exists, "the server is back")
            save(life, 2)
            saved.touch()
            signal.pause()

        with lives(theirs, live, lambda: becomes(1)):
            becomes(0)
            threading.Timer(0.5, fs.set, kwargs={"away": True}).start()
            back = threading.Timer(0.5 + 2 * fence.LEASE_SECONDS, fs.set, kwargs={"away": False})
            back.start()
            refused(mine, "in use by another job", code=6)
            back.join()
            (tmp_path / "go").touch()
            until(saved.exists, "the first job goes on")
        assert steps_of(options(fs.server)) == [2]


def test_netfs_is_late_as_nfs_is(tmp_path):
    """Names and sizes show late; an open (of a folder too) and a mkdir ask the server."""
    with served(tmp_path, machines=2, late=60) as fs:
        one, other = fs.mounts
        assert not (other / "file").exists()
        (one / "file").write_text("first")
        assert not (other / "file").exists()
        with pytest.raises(FileExistsError):
            os.mkdir(other / "file")
        assert (other / "file").read_text() == "first"
        assert os.stat(other / "file").st_size == 5
        (one / "file").write_text("the second")
        assert os.stat(other / "file").st_size == 5
        assert (other / "file").read_text() == "the second"
        (one / "new").write_text("x")
        os.rename(one / "new", one / "file")
        assert (other / "file").read_text() == "x" and os.listdir(other) == ["file"]
