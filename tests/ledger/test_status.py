"""RUN/status.json and what prints it: a probe may rely on it while the run is killed, stopped and done."""
import json
import time
from types import SimpleNamespace

import pytest
from jobs import PACED, events, until, wait_for

from common import errors
from common.ledger import Ledger
from common.ledger.__main__ import main
from common.ledger.status import FIELDS, Status, prometheus, read_status


def looked(path, condition):
    """The status that fulfils a condition; each look finds a whole object."""
    def look():
        found = json.loads(path.read_text()) if path.exists() else None
        return found and condition(found) and found
    return until(look, "a status")


def test_a_killed_stopped_and_done_run_says_so_with_its_reason(jobs, tmp_path):
    run, path = tmp_path / "run", tmp_path / "run" / "status.json"
    job = jobs.torchrun(2, "train_ddp.py", *PACED, f"--run-dir={run}", PACE="0.05")
    life = wait_for(run, 3, 0, job)
    now = looked(path, lambda status: status["state"] == "training" and status["step"] > 0)
    assert set(now) == set(FIELDS) and now["life"] == life["life"]
    assert (now["world"], now["total"], now["restarts"], now["exit_code"]) == (2, 22, 0, None)
    assert len(now["hosts"]) == 1 and 0 <= now["goodput"] <= 1
    jobs.kill(life["pids"][0])
    pid = wait_for(run, 7, 1, job)["pids"][1]
    now = looked(path, lambda status: status["restarts"] == 1 and status["state"] == "training")
    assert now["last_save_step"] >= events(run, "rescue")[0]["step"] and now["last_save_age_s"] < 60
    jobs.kill(pid, 15)
    now = looked(path, lambda status: status["restarts"] == 2)
    assert job.wait() == 0, job.output
    now = json.loads(path.read_text())
    assert (now["state"], now["exit_code"], now["step"]) == ("done", 0, 22) and "complete" in now["reason"]


def test_a_stop_and_an_error_leave_their_reason_and_exit_code(jobs, tmp_path):
    job = jobs.python("train_ddp.py", *PACED, f"--run-dir={tmp_path}/a", PACE="0.05")
    wait_for(tmp_path / "a", 2, 0, job)
    job.kill(15)
    assert job.wait() == 143
    now = read_status(tmp_path / "a")
    assert (now["state"], now["exit_code"]) == ("stopping", 143)
    assert "stopped on SIGTERM: step" in now["reason"]
    bad = ("--lr=1e308", "--optimizer=sgd")
    job = jobs.python("train_ddp.py", *PACED, f"--run-dir={tmp_path}/b", *bad, PACE="0")
    assert job.wait() == 5, job.output
    now = read_status(tmp_path / "b")
    assert now["state"] == "failed" and now["exit_code"] == 5 and "the loss is" in now["reason"], now


def test_status_is_printed_for_a_person_and_for_prometheus_and_its_age_is_probed(tmp_path, capsys):
    assert main([str(tmp_path), "--status"]) == 2
    Ledger(tmp_path).status.start(lambda: {"state": "training", "step": 7, "reason": None})
    capsys.readouterr()
    assert main([str(tmp_path), "--status", "--stale", "60"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 7
    assert main([str(tmp_path), "--status", "--prometheus", "--stale", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f'training_step{{run="{tmp_path.name}"}} 7' in lines
    assert f'training_state{{run="{tmp_path.name}",state="training"}} 1' in lines
    for flags in ("--stale 9", "--status --stale nan", "--status --stale -1", "--compare x --json",
                  "--compare x --status", "--compare x --audit"):
        with pytest.raises(SystemExit, match="2"):
            main([str(tmp_path), *flags.split()])
    assert "run=\"größe\"" in "".join(prometheus({}, "größe")), "Prometheus knows no \\u escapes"


def test_a_status_is_written_at_a_change_and_the_end_has_the_last_word(tmp_path, monkeypatch):
    monkeypatch.setattr("common.ledger.status.LOOK_EVERY_SECONDS", 0.01)
    facts, status = SimpleNamespace(state="training"), Status(tmp_path)
    status.start(lambda: {"state": facts.state, "step": time.monotonic()})
    first = read_status(tmp_path)["t"]
    facts.state = "evaluating"
    until(lambda: read_status(tmp_path)["state"] == "evaluating", "a change", 5)
    Status(tmp_path).end("rank 0 was killed", 1)  # by another rank
    status.end("another reason", 1)
    facts.state = "training"
    end = time.monotonic() + 0.05
    until(lambda: time.monotonic() > end, "a look")
    now = read_status(tmp_path)
    assert (now["state"], now["reason"], now["exit_code"]) == ("failed", "another reason", 1)
    assert now["t"] >= first
    assert {path.name for path in tmp_path.iterdir()} == {"status.json", "control"}


def test_a_disk_that_is_full_costs_no_step(tmp_path):
    Status(tmp_path / "missing").start(lambda: {"state": "training"})


def test_the_reason_of_an_end_goes_where_kubernetes_looks_only_if_it_does(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(errors, "TERMINATION_LOG", str(tmp_path / "log"))
    with pytest.raises(SystemExit):
        errors.fail("no such model\nname one")
    assert not (tmp_path / "log").exists()
    (tmp_path / "log").write_text("an older and longer reason than this one will be")
    with pytest.raises(SystemExit):
        errors.fail("no such model\nname one")
    assert (tmp_path / "log").read_text() == "no such model\nname one\n"
