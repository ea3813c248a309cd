"""--log-to: a person's own function gets each row of metrics.jsonl once, and a bad one stops no training."""
import json
import re
from importlib.util import find_spec

import pytest
from jobs import PACED, ROOT, until, wait_for
from test_log import curve, life, options, steps

from common.options import parse_options

TRACKER = """
import json, os, sys
def note(row):
    with open(os.environ["TRACKED"], "a") as file:
        file.write(json.dumps(row) + "\\n")
def broken(row):
    raise ValueError("no connection")
"""


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """The flag's value; the rows that the function got are the lines of tmp_path/tracked."""
    (tmp_path / "tracker.py").write_text(TRACKER)
    monkeypatch.setenv("TRACKED", str(tmp_path / "tracked"))
    return f"{tmp_path}/tracker.py:note"


def got(tmp_path):
    return [json.loads(line)["step"] for line in (tmp_path / "tracked").read_text().splitlines()]


def test_each_row_is_told_once_through_lives_that_resume_earlier(tmp_path, tracked):
    opts = options(tmp_path / "run", log_to=tracked)
    life(opts, 0, 5)
    life(opts, 3, 7)
    life(opts, 7, 7)
    assert got(tmp_path) == [1, 2, 3, 4, 5, 6, 7]


def test_a_row_that_was_written_but_not_told_is_told_by_the_next_life(tmp_path, tracked, capsys):
    run = tmp_path / "run"
    life(options(run), 0, 3)  # the flag comes later
    life(options(run, log_to=tracked.replace("note", "broken")), 3, 4)
    assert capsys.readouterr().out.count("no connection") == 1 and steps(run) == [1, 2, 3, 4]
    life(options(run, log_to=tracked), 4, 4)
    assert got(tmp_path) == [1, 2, 3, 4]


def test_damaged_rows_are_passed_over_and_the_others_are_told(tmp_path, tracked):
    run = tmp_path / "run"
    life(options(run), 0, 2)
    rows = run / "metrics.jsonl"
    rows.write_text("[" * 100_000 + "\n[1]\n{}\n" + '{"step": "x"}\n' + rows.read_text())
    (run / "log-to.json").write_text("[1]")
    life(options(run, log_to=tracked), 2, 3)
    assert got(tmp_path) == [1, 2, 3]


def test_kills_lose_no_row_and_repeat_at_most_the_one_they_interrupt(jobs, tmp_path, tracked):
    run = tmp_path / "run"
    job = jobs.torchrun(2, "train_ddp.py", *PACED, f"--run-dir={run}", f"--log-to={tracked}", PACE="0.02",
                        TRACKED=str(tmp_path / "tracked"))
    for number in range(2):
        jobs.kill(wait_for(run, 5 + 6 * number, number, job)["pids"][0])
    assert job.wait() == 0, job.output
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [json.loads(line) for line in (tmp_path / "tracked").read_text().splitlines()]
    key = [(row["step"], "val_loss" in row) for row in told]
    assert set(key) == {(row["step"], "val_loss" in row) for row in rows} and len(key) <= len(rows) + 2


def test_a_file_that_is_not_there_is_refused_at_once():
    with pytest.raises(SystemExit, match="2"):
        parse_options("", ["--log-to", "nowhere.py:f"], script="ddp")


def test_tensorboard_gets_world_lives_goodput_and_the_norm_of_the_gradient(jobs, tmp_path):
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    flags = [flag for flag in PACED if flag != "--no-tensorboard"]
    assert jobs.python("train_ddp.py", *flags, f"--run-dir={run}", PACE="0").wait() == 0
    for name in ("world", "lives", "goodput", "grad_norm", "data_wait", "samples_per_s"):
        assert curve(run, f"run/{name}"), name
    assert all(value > 0 for _, value in curve(run, "run/grad_norm"))


@pytest.mark.parametrize("package, name, left", [
    ("wandb", "wandb_offline", "wandb/offline-run-*/*.wandb"), ("mlflow", "mlflow_files", "mlflow.db")])
def test_the_readmes_trackers_track_a_training_and_leave_no_process(jobs, tmp_path, package, name, left):
    if not find_spec(package):  # importing wandb leaves files
        pytest.skip(f"needs {package}")
    text = (ROOT / "common" / "README.md").read_text()
    code = re.search(r"```python\n(def wandb_offline.*?)```", text, re.DOTALL)[1]
    (tmp_path / "my_tracker.py").write_text(code)
    job = jobs.python("train_ddp.py", *PACED, f"--run-dir={tmp_path}/run", "--max-steps=3",
                      f"--log-to={tmp_path}/my_tracker.py:{name}", cold=True, PACE="0")
    assert job.wait() == 0 and "--log-to" not in job.output, job.output
    until(lambda: not jobs.alive(), f"the end of {package}'s own processes")
    assert json.loads((tmp_path / "run" / "log-to.json").read_text()) == {"train": 3, "val": 3}
    assert list(jobs.folder.glob(left))
