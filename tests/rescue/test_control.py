"""What a person asks of a running training is done by all ranks at one step, noted, and taken away."""

from functools import partial

import pytest
from jobs import PACED, ROOT, events, reached, steps_on_disk, until, wait_for


@pytest.mark.parametrize(
    "words, code",
    [
        (("train_mp.py", "--micro-batch-size=8"), 1),  # torchrun turns every code into 1
        (("launch/torchrun.py", "--nproc_per_node=2", ROOT / "train_ddp.py"), 143),
        (("launch/torchrun.py", "--nproc_per_node=2", "--max_restarts=0", ROOT / "train_ddp.py"), 143),
        (("train_dp.py", "--devices=cpu,cpu"), 143),
    ],
    ids=["torchrun", "launcher", "no restart", "alone"],
)
def test_a_run_saves_when_asked_trains_on_and_stops_when_asked_with_143_and_no_new_life(
    jobs, run, words, code
):
    words = (*words, *PACED, f"--run-dir={run}", "--save-every=0", "--save-seconds=0")
    start = partial(jobs.torchrun, 2) if code == 1 else jobs.python
    job = start(*words, "--epochs=99", PACE="0.02")

    def ask(name):
        (run / "control" / name).touch()
        until(lambda: not (run / "control" / name).exists() or job.poll() is not None, f"{name} to be done")
        assert not (run / "control" / name).exists(), job.output

    wait_for(run, 1, 0, job)
    ask("save")
    until(lambda: steps_on_disk(run), "the save")
    step = reached(run)
    until(lambda: reached(run) > step, "a further step")
    ask("stop")
    job.ends_with(code)
    assert len(events(run, "life")) == 1 and "stopped on control/stop: step" in job.output
    assert {reached(run)} == {stop["step"] for stop in events(run, "stop")} == {steps_on_disk(run)[-1]}
