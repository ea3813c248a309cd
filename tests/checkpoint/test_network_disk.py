"""File systems as they are: slow, away, late to tell (netfs.py)."""

import os
import time

from jobs import CLEAN, PACED, audit, events, lives, wait_for
from netfs import served
from ranks import fork_ranks
from stores import announced_rescue, options, resumes_at, started, steps_of, write

from common import place
from common.extras import owner


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
        assert len(lives(run)) == 2 and events(run, "rescue")
        assert audit(run) == CLEAN


def test_the_nodes_of_a_job_find_a_new_folder_to_be_one_and_any_of_them_saves_what_the_owner_would_have(
    tmp_path, monkeypatch
):
    """Each has just looked for the folder, and its machine remembers that there was none."""
    with served(tmp_path, machines=2, late=2) as fs:  # seconds; NFS: up to 60

        def live(world):
            place._this_boot = lambda: f"machine {world.rank}"
            opts = options(fs.mounts[world.rank])
            assert not os.path.exists(opts.run_dir / "checkpoints")
            world.barrier()
            store, _ = started(opts, world)
            if store.owns:
                write(store, 3)
            world.barrier()
            if world.rank == 0:
                world.store.wait(["rescued"])
                os._exit(1)
            written = announced_rescue(store, 4)
            world.store.set("rescued", "1")
            return written

        assert fork_ranks(2, live, node_size=1, may_die=[0]) == [1, "step 4 saved by rank 1"]
        monkeypatch.setattr(place, "_this_boot", lambda: "another machine")
        monkeypatch.setattr(owner, "LEASE_SECONDS", 2.5)
        opts = options(fs.mounts[0])
        assert resumes_at(opts, 4) and steps_of(opts) == [4, 3]
