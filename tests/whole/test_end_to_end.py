"""The three scripts as a person runs them: killed, stopped, resized, carried from script to script, with the
result of a run that nobody disturbed. Worlds agree to 1e-9 here (float64, no dropout), so that a sample or a
step too many would show.
"""

import signal
import time

import pytest
from jobs import (
    CLEAN,
    PACED,
    STEPS,
    audit,
    command,
    events,
    kill_at,
    lives,
    reached,
    state,
    steps_on_disk,
    until,
    wait_for,
)
from test_promises import assert_same_model

SCRIPTS = {
    "dp": ("train_dp.py", "--devices=cpu,cpu"),
    "mp": ("train_mp.py", "--devices=cpu,cpu"),
    "ddp": ("train_ddp.py",),
}


def assert_same(run, undisturbed, **counts):
    """Every sample once, and the weights of the undisturbed run."""
    assert audit(run) == CLEAN | counts
    assert_same_model(run, undisturbed)


def plain(jobs, script, run, *flags, **env):
    return jobs.python(*SCRIPTS[script], *PACED, f"--run-dir={run}", *flags, **env)


def ddp(jobs, nproc, run, *flags, **kwargs):
    return jobs.torchrun(nproc, "train_ddp.py", *PACED, f"--run-dir={run}", *flags, **kwargs)


# ---- kills and changes of the world ---------------------------------------------------------------
def test_a_run_moves_from_dp_to_ddp_to_mp_through_kills_of_each(jobs, run, undisturbed):
    job = plain(jobs, "dp", run, "--save-every=4")
    wait_for(run, 6, 0, job)
    until(lambda: steps_on_disk(run), "a save")
    job.kill()
    job.ends_with(-9)
    job = ddp(jobs, 2, run)
    wait_for(run, 12, 1, job)
    job.kill(signal.SIGTERM)
    job.wait()
    plain(jobs, "mp", run).ends_with(0)
    lost = audit(run)["lost"]
    assert 0 < lost < STEPS
    assert_same(run, undisturbed, lost=lost, redone=lost)


def test_workers_that_still_import_torch_die_with_their_agent_too(jobs, run):
    job = ddp(jobs, 2, run, cold=True)
    until(lambda: len(job.workers) == 2 or job.poll() is not None, "the workers' start")
    until(lambda: all("train_ddp.py" in command(pid) for pid in job.workers), "their own program")
    pids = job.workers
    job.kill()
    until(lambda: not any(pid in jobs.alive() for pid in pids), "the workers to follow their agent")
    assert not lives(run)


def test_whatever_save_every_is_the_end_of_an_epoch_is_saved_if_it_is_the_best_or_the_last(jobs, run):
    """With no rate to speak of no evaluation is better than the first."""
    plain(jobs, "ddp", run, "--epochs=4", "--lr=1e-300", "--save-every=1000000", PACE="0").ends_with(0)
    assert [event["step"] for event in events(run, "save")] == [STEPS // 2, 2 * STEPS]


def test_eval_only_evaluates_an_unfinished_run_and_moves_no_weight_and_no_metric(jobs, run):
    plain(jobs, "ddp", run, "--max-steps=15", PACE="0").ends_with(0)
    kept = [*run.rglob("*.safetensors"), run / "metrics.jsonl", run / "options.json"]
    before = [path.read_bytes() for path in kept]
    said = plain(jobs, "mp", run, "--eval-only").ends_with(0)
    assert "\nevaluating at step 15" in said and "\nstep 15  val_loss" in said
    assert [path.read_bytes() for path in kept] == before


# ---- asked to stop --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "script, signals", [("ddp", ["SIGUSR1"]), ("mp", ["SIGTERM", "SIGTERM"]), ("dp", ["SIGINT", "SIGTERM"])]
)
def test_sigterm_sigint_or_sigusr1_ends_the_step_saves_and_leaves_with_143(
    jobs, run, undisturbed, script, signals
):
    job = plain(jobs, script, run, PACE="0.2")
    wait_for(run, 3, 0, job)
    for name in signals:
        job.kill(getattr(signal, name))
    said = job.ends_with(143)
    assert "Traceback" not in said and any(f"stopped on {name}" in said for name in signals), said
    step = reached(run)
    plain(jobs, script, run, PACE="0").ends_with(0)
    assert lives(run)[1]["step"] == step
    assert_same(run, undisturbed)


def test_a_signal_to_one_worker_ends_that_life_only(jobs, run, undisturbed):
    """The only one that pays for real starts, with plain torchrun; the campaign is its long form."""
    job = ddp(jobs, 2, run, cold=True)
    kill_at(job, run, 4, number=signal.SIGTERM)
    kill_at(job, run, 8, life=1)
    said = job.ends_with(0)
    assert f"{run}: starting" in said
    assert len(lives(run)) == 3
    assert_same(run, undisturbed)


def test_ctrl_z_a_sigstop_and_fg_after_the_hang_timeout_is_no_hang(jobs, run, undisturbed):
    job = plain(jobs, "ddp", run, "--hang-timeout=3", PACE="0.02")
    wait_for(run, 3, 0, job)
    job.kill(signal.SIGSTOP)  # what SIGTSTP comes to where a shell can continue the process
    until(lambda: state(job.pid) == "T", "the process to stop")
    woken = time.monotonic() + 6.2  # at 6 s faulthandler would have ended it
    until(lambda: time.monotonic() > woken, "a while")
    job.kill(signal.SIGCONT)
    job.ends_with(0)
    assert_same(run, undisturbed)
