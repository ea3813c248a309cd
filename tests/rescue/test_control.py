"""What a person asks of a running training is done by all ranks at one step, noted, and taken away."""

import signal

import pytest
from jobs import CLEAN, PACED, ROOT, STEPS, audit, events, reached, until, wait_for


def ask(run, name, job):
    """Touches RUN/control/NAME, and waits until it is gone."""
    until(lambda: (run / "control").is_dir(), "the folder")
    (run / "control" / name).touch()
    until(lambda: not (run / "control" / name).exists() or job.poll() is not None, f"{name} to be done")
    assert not (run / "control" / name).exists(), job.output


SCRIPTS = {
    "ddp": ("train_ddp.py", 2, ()),
    "dp": ("train_dp.py", 0, ("--devices=cpu,cpu",)),
    "mp": ("train_mp.py", 2, ("--micro-batch-size=8",)),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_saves_when_asked_and_trains_on(jobs, tmp_path, name):
    script, nproc, flags = SCRIPTS[name]
    run = tmp_path / "run"
    flags = (*PACED, f"--run-dir={run}", "--save-every=0", "--save-seconds=0", "--epochs=99", *flags)
    start = jobs.python if not nproc else lambda *rest, **env: jobs.torchrun(nproc, *rest, **env)
    job = start(script, *flags, PACE="0.02")
    wait_for(run, 1, 0, job)
    ask(run, "save", job)
    until(lambda: any((run / "checkpoints").glob("step-*/manifest.json")), "the save")
    step = reached(run)
    until(lambda: reached(run) > step, "a further step")
    job.kill(signal.SIGTERM)
    assert job.wait() != 0
    assert len(events(run, "life")) == 1


@pytest.mark.parametrize("how", ["torchrun", "launcher", "alone"])
def test_stop_ends_all_processes_after_one_step_with_143_and_no_new_life(jobs, tmp_path, how):
    run = tmp_path / "run"
    flags = (*PACED, f"--run-dir={run}")
    if how == "torchrun":
        job = jobs.torchrun(2, "train_ddp.py", *flags, PACE="0.05")
    else:
        words = ("launch/torchrun.py", "--nproc_per_node=2", ROOT / "train_ddp.py")
        job = jobs.python(*(words if how == "launcher" else words[-1:]), *flags, PACE="0.05")
    wait_for(run, 2, 0, job)
    ask(run, "stop", job)
    code = job.wait()
    assert code == 143 if how != "torchrun" else code != 0, job.output
    assert len(events(run, "life")) == 1 and {reached(run)} == {stop["step"] for stop in events(run, "stop")}
    assert reached(run) < STEPS and "stopped on control/stop: step" in job.output
    jobs.python("train_ddp.py", *flags, PACE="0").ends_with(0)
    assert audit(run) == CLEAN
