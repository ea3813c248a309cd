"""What a person asks of a running training is done by all ranks at one step, noted, and taken away."""
import json
import signal

import pytest
from jobs import PACED, ROOT, STEPS, audit, events, reached, until, wait_for

from common.ledger.status import Control

CLEAN = {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}


def ask(run, name, job):
    """Touches RUN/control/NAME, and waits until it is gone."""
    until(lambda: (run / "control").is_dir(), "the folder")
    (run / "control" / name).touch()
    until(lambda: not (run / "control" / name).exists() or job.poll() is not None, f"{name} to be done")
    assert not (run / "control" / name).exists(), job.output


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


SCRIPTS = {"ddp": ("train_ddp.py", 2, ()), "dp": ("train_dp.py", 0, ("--devices=cpu,cpu",)),
           "mp": ("train_mp.py", 2, ("--micro-batch-size=8",))}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_saves_and_evaluates_when_asked_and_trains_on(jobs, tmp_path, name):
    script, nproc, flags = SCRIPTS[name]
    run = tmp_path / "run"
    flags = (*PACED, f"--run-dir={run}", "--save-every=0", "--save-seconds=0", "--epochs=99", *flags)
    start = jobs.python if not nproc else lambda *rest, **env: jobs.torchrun(nproc, *rest, **env)
    job = start(script, *flags, PACE="0.02")
    wait_for(run, 1, 0, job)
    ask(run, "save", job)
    assert any((run / "checkpoints").glob("step-*/manifest.json"))
    ask(run, "evaluate", job)
    step = reached(run)
    until(lambda: reached(run) > step, "a further step")
    job.kill(signal.SIGTERM)
    assert job.wait() != 0
    told = {event["what"]: event["step"] for event in events(run, "control")}
    assert set(told) == {"save", "evaluate"}
    assert told["evaluate"] in [row["step"] for row in rows(run) if "val_loss" in row]
    assert len(events(run, "life")) == 1


def test_a_signal_saves_and_the_run_goes_on(jobs, tmp_path):
    run = tmp_path / "run"
    job = jobs.torchrun(2, "train_ddp.py", *PACED, f"--run-dir={run}", "--save-every=0", PACE="0.05")
    life = wait_for(run, 2, 0, job)
    jobs.kill(life["pids"][1], signal.SIGUSR2)  # any rank: the owner of the folder saves
    until(lambda: events(run, "save"), "a save")
    assert job.wait() == 0 and events(run, "save")[0]["step"] == events(run, "control")[0]["step"], job.output


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
    code = job.wait(40)
    assert code == 143 if how != "torchrun" else code != 0, job.output
    (stop,) = events(run, "control")
    assert len(events(run, "life")) == 1 and stop["what"] == "stop" and reached(run) == stop["step"] < STEPS
    assert "stopped on control/stop: step" in job.output
    assert jobs.python("train_ddp.py", *flags, PACE="0").wait() == 0 and audit(run) == CLEAN


def test_stop_epoch_ends_after_the_evaluation_of_the_epoch(jobs, tmp_path):
    run = tmp_path / "run"
    job = jobs.torchrun(2, "train_ddp.py", *PACED, f"--run-dir={run}", PACE="0.05")
    wait_for(run, 2, 0, job)
    ask(run, "stop-epoch", job)
    assert job.wait(40) != 0 and reached(run) == STEPS // 2, job.output
    assert rows(run)[-1]["step"] == STEPS // 2 and "val_loss" in rows(run)[-1]
    assert len(events(run, "life")) == 1
    job = jobs.python("train_ddp.py", *PACED, f"--run-dir={run}", PACE="0")
    assert job.wait() == 0 and audit(run) == CLEAN


def test_a_wish_is_taken_once_and_its_file_goes_when_it_is_done(tmp_path):
    control = Control(tmp_path)
    control.folder.mkdir()
    for name in ("save", "evaluate", "nonsense"):
        (control.folder / name).touch()
    control.look(4, 0)
    assert control.wanted == {"save", "evaluate"} and not control.take("save")
    control.agree(["save", "evaluate"], 5)
    assert control.take("save") and not control.take("save") and control.take("evaluate")
    control.look(5, 4)
    assert not control.wanted and len(list(control.folder.iterdir())) == 3
    control.look(6, 4)
    assert (control.folder / "save").exists() and not (control.folder / "evaluate").exists()
    control.look(6, 5)
    assert [path.name for path in control.folder.iterdir()] == ["nonsense"] and not control.doing
