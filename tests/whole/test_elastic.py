"""A loop of one's own (common/elastic.py): the example of common/README.md, through kills and worlds."""
import json

import pytest
from jobs import ROOT, until
from test_readme import COMMON, fenced, section

from common.checkpoint.__main__ import main as checkpoints
from common.ledger import audit

EXAMPLE = fenced(section(COMMON, "A loop of your own"), "python")[0]
CLEAN = {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}


@pytest.fixture
def script(tmp_path):
    """The example, with a pause in each step, so that a kill strikes between two of them."""
    path = tmp_path / "my_loop.py"
    loop = "        for batch in run:"
    text = EXAMPLE.replace("runs/mine", str(tmp_path / "run"))
    text = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}"
    path.write_text(text.replace(loop, f"        import time\n{loop}\n            time.sleep(0.05)"))
    return path


def events(run, name):
    try:
        lines = (run / "ledger.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := json.loads(line))["event"] == name]


def evaluations(run):
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["val_acc"] for row in rows if "val_acc" in row}


def reached(run, step):
    path = run / "metrics.jsonl"
    return path.exists() and f'"step": {step}' in path.read_text()


def test_a_loop_of_ones_own_loses_nothing_through_a_kill_and_another_world(jobs, script, tmp_path):
    run = tmp_path / "run"
    job = jobs.start("torchrun", "--nproc_per_node=2", "--max_restarts=3", script)
    until(lambda: reached(run, 10) or job.poll() is not None, "ten steps")
    assert job.poll() is None, job.output
    jobs.kill(events(run, "life")[-1]["pids"][1])
    until(lambda: len(events(run, "life")) == 2 and reached(run, 20), "the next life")
    jobs.kill(events(run, "life")[-1]["pids"][0], 15)
    job.wait()
    assert jobs.start(script).wait() == 0, job.output
    assert audit(run) == CLEAN and events(run, "life")[-1]["world"] == 1
    assert sorted(evaluations(run)) == [9, 18, 27, 36], "each epoch was reported once, 513 samples by 64"
    (tmp_path / "run").rename(tmp_path / "killed")
    assert jobs.start(script).wait() == 0
    assert evaluations(tmp_path / "killed") == pytest.approx(evaluations(run), abs=0.02)
    assert checkpoints([str(run)]) == 0


def test_a_life_that_died_before_its_report_is_followed_by_one_that_does(jobs, script, tmp_path):
    text, first = script.read_text(), "    run.net.eval()\n"
    script.write_text(text.replace(first, f"{first}    assert sys.argv[1:]\n"))
    job = jobs.start(script)
    assert job.wait() == 1 and "AssertionError" in job.output and not evaluations(tmp_path / "run")
    assert jobs.start(script, "on").wait() == 0
    assert sorted(evaluations(tmp_path / "run")) == [9, 18, 27, 36] and audit(tmp_path / "run") == CLEAN


def test_a_batch_that_was_not_trained_on_is_an_error(jobs, script, tmp_path):
    script.write_text(script.read_text().replace("run.step(loss, count=len(batch.y))", "pass"))
    job = jobs.start(script)
    assert job.wait() == 1 and "a batch was not trained on: call run.step(" in job.output, job.output


def test_what_has_no_index_is_refused_and_a_rate_may_be_a_tensor(jobs, script):
    text, dataset = script.read_text(), "dataset=points"
    script.write_text(text.replace(dataset, "dataset=iter([])"))
    job = jobs.start(script)
    assert job.wait() == 2 and "has no index" in job.output and "Traceback" not in job.output
    script.write_text(text.replace("lr=0.02", "lr=torch.tensor(0.02)"))
    assert jobs.start(script).wait() == 0


def test_its_errors_have_the_exit_codes_of_the_scripts(jobs, script, tmp_path):
    assert jobs.start(script).wait() == 0
    for path in (tmp_path / "run/checkpoints").rglob("model.safetensors"):
        path.write_bytes(b"")
    damaged, lost = jobs.start(script), jobs.start(script, RANK="3")
    assert damaged.wait() == 3 and "error: " in damaged.output, damaged.output
    assert lost.wait() == 2 and "RANK=3 is set, but WORLD_SIZE is not" in lost.output, lost.output
    assert "Traceback" not in damaged.output + lost.output


def test_a_net_whose_checkpoints_would_lack_something_is_refused(jobs, script):
    text = script.read_text()
    script.write_text(text.replace("nn.Linear(32, 2)", "nn.Linear(32, 2), nn.LazyLinear(2)"))
    job = jobs.start(script)
    assert job.wait() == 2 and "lazy layer" in job.output and "Traceback" not in job.output


def test_a_loop_that_is_left_early_has_saved_its_last_step(jobs, script, tmp_path):
    text = script.read_text()
    script.write_text(text + "                break\n")
    assert jobs.start(script).wait() == 0
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*")) == ["step-00000009"]
