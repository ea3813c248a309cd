"""launch/drill.py disturbs a command as it says, and judges what it finds."""

import signal
import sys

import pytest
from jobs import PACED, ROOT, STEPS, lives, reached, until

DRILL = ROOT / "launch/drill.py"
TRAIN = (sys.executable, ROOT / "launch/torchrun.py", "--nproc_per_node=2", ROOT / "train_ddp.py", *PACED)


def test_a_drill_strikes_with_kills_a_stop_and_another_number_and_finds_the_same_bits(jobs, tmp_path):
    words = [*TRAIN, "--virtual-ranks=4", "--run-dir", tmp_path / "run"]
    said = jobs.start(DRILL, "--kills", 2, *words, PACE="0.1").ends_with(0)
    table = dict(line.split(maxsplit=1) for line in said.splitlines()[-5:])
    assert table["lives"] == "4, of 2, 2, 3, 3 processes", said
    assert table["samples"] == "missed 0, repeated 0" and table["steps"] == "lost 0, redone 0"
    assert table["final"] == "weights             the same bits as of the undisturbed run"
    assert len(said.partition("next step")[2].splitlines()[0].split()) == 2
    assert len(lives(tmp_path / "run-undisturbed")) == 1
    # its folder is there now
    assert "completed no run" in jobs.start(DRILL, *words).ends_with(2)


def test_a_drill_that_cannot_strike_says_so(jobs, tmp_path):
    words = [*TRAIN, "--max-steps=1", "--run-dir", tmp_path / "run"]
    said = jobs.start(DRILL, *words, PACE="0").ends_with(1)
    assert "broken: 5 faults have not struck: the run is too short" in said


@pytest.mark.parametrize("name", ["run", "run-undisturbed"])
def test_a_drill_that_is_told_to_stop_ends_what_it_has_started(name, jobs, tmp_path):
    run = tmp_path / "run"
    drill = jobs.start(DRILL, *TRAIN, "--run-dir", run, PACE="0.1" if name == "run-undisturbed" else "0.5")
    until(lambda: lives(tmp_path / name) and reached(run), f"a step beside {name}")
    drill.kill(signal.SIGTERM)
    drill.ends_with(143)
    until(lambda: not jobs.alive(), "the end of all that it has started", 20)
    assert 0 < reached(run) < STEPS
