"""What a person asks of a running training is done by all ranks at one step, noted, and taken away."""

from functools import partial

import pytest
from jobs import CLEAN, PACED, ROOT, audit, events, reached, steps_on_disk, until, wait_for


def ask(run, name, job):
    """Touches RUN/control/NAME, and waits until it is gone."""
    until(lambda: (run / "control").is_dir(), "the folder")
    (run / "control" / name).touch()
    until(lambda: not (run / "control" / name).exists() or job.poll() is not None, f"{name} to be done")
    assert not (run / "control" / name).exists(), job.output


@pytest.mark.parametrize(
    "how, words",
    [
        ("torchrun", ("train_mp.py", "--micro-batch-size=8")),
        ("launcher", ("launch/torchrun.py", "--nproc_per_node=2", ROOT / "train_ddp.py")),
        ("alone", ("train_dp.py", "--devices=cpu,cpu")),
    ],
)
def test_a_run_saves_when_asked_trains_on_and_stops_when_asked_with_143_and_no_new_life(
    jobs, run, how, words
):
    flags = (*PACED, f"--run-dir={run}", "--save-every=0", "--save-seconds=0")
    start = jobs.python if how != "torchrun" else partial(jobs.torchrun, 2)
    job = start(*words, *flags, "--epochs=99", PACE="0.02")
    wait_for(run, 1, 0, job)
    ask(run, "save", job)
    until(lambda: any((run / "checkpoints").glob("step-*/manifest.json")), "the save")
    step = reached(run)
    until(lambda: reached(run) > step, "a further step")
    ask(run, "stop", job)
    code = job.wait()
    assert code == 143 if how != "torchrun" else code != 0, job.output
    assert len(events(run, "life")) == 1 and "stopped on control/stop: step" in job.output
    assert {reached(run)} == {stop["step"] for stop in events(run, "stop")} == {steps_on_disk(run)[-1]}
    again = f"--max-steps={reached(run) + 1}"
    start(*words, *flags, again, PACE="0").ends_with(0)
    assert audit(run) == CLEAN
