"""The promise in its barest form: plain torchrun, no variable, no launch file, one kill after the other."""
from jobs import PACED, audit, lives, wait_for


def plain_kills(jobs, run, kills):
    """Kills workers under `torchrun --nproc_per_node=2 --max_restarts=100`, real processes all; the audit's
    counts.
    """
    flags = [*PACED, f"--run-dir={run}", f"--epochs={1 + kills // 3}"]
    job = jobs.torchrun(2, "train_ddp.py", *flags, restarts=100, cold=True, PACE="0.02")
    for kill in range(kills):
        assert jobs.kill(wait_for(run, 3 * kill + 2, kill, job)["pids"][kill % 2])
    assert job.wait() == 0, job.output
    assert len(lives(run)) == kills + 1
    return audit(run) | {"kills": kills, "lives": len(lives(run))}
