"""Each launcher does its work where its log's disk is full, and says in three lines what else is broken."""

import os
import signal
import socket
import sys

import pytest
from jobs import CLEAN, PACED, ROOT, audit, free_port, reached, until
from test_notice import TRAINING

from launch import agent

LAUNCH = ROOT / "launch"
TRAIN = ("--nproc_per_node=2", ROOT / "train_ddp.py", *PACED, "--max-steps=2", "--run-dir=run")
FULL = "2> /dev/full"


def start(jobs, redirection, *words, **env):
    return jobs.start("-c", f'exec "$@" {redirection}', "bash", *words, cold=True, program="bash", **env)


# {launcher: (its words, its exit code)}
LOGGED = {
    "torchrun.py": ((LAUNCH / "torchrun.py", *TRAIN), 0),
    "torchrun.py, a mistake": ((LAUNCH / "torchrun.py", *TRAIN, "--lr=nan"), 2),
    "drill.py": ((LAUNCH / "drill.py", sys.executable, "-c", "raise SystemExit(5)"), 2),
    "store.py": ((LAUNCH / "store.py",), 2),
}


@pytest.mark.parametrize("launcher", LOGGED)
def test_a_launcher_whose_log_is_full_does_what_it_does_with_an_empty_one(jobs, tmp_path, launcher):
    words, code = LOGGED[launcher]
    start(jobs, FULL, sys.executable, *words, cwd=tmp_path, PACE="0").ends_with(code)
    assert code or (reached(tmp_path / "run") == 2 and audit(tmp_path / "run") == CLEAN)


@pytest.mark.parametrize("redirection", [FULL, "2> >(exit)", "2>&-"])
def test_a_notice_reaches_the_training_whatever_becomes_of_the_log(jobs, tmp_path, redirection):
    words = (LAUNCH / "notice.py", "--file=leave", sys.executable, "-c", TRAINING)
    env = {"NOTICE_SECONDS": "0.05", "NOTICE_ADDRESS": f"http://127.0.0.1:{free_port()}"}
    job = start(jobs, redirection, sys.executable, *words, cwd=tmp_path, **env)
    until(lambda: "trains" in job.output, "the training")
    (tmp_path / "leave").touch()
    job.ends_with(143)


def test_a_store_whose_log_is_full_serves_until_it_is_asked_to_end(jobs):
    port = free_port()
    job = start(jobs, f"> /dev/full {FULL}", sys.executable, LAUNCH / "store.py", f"127.0.0.1:{port}")

    def answers():
        with socket.socket() as line:
            return line.connect_ex(("127.0.0.1", port)) == 0

    until(answers, "the store")
    job.kill(signal.SIGTERM)
    assert job.wait() in (0, -signal.SIGTERM)  # it may not yet have blocked the signal


# ---- a machine that lacks what a launcher needs ---------------------------------------------------
def test_a_launcher_without_a_temporary_folder_says_so(jobs, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import tempfile\ndef nowhere():\n    raise FileNotFoundError(2, 'No usable temporary directory')\n"
        "tempfile.gettempdir = nowhere\n"
    )
    job = jobs.start(LAUNCH / "torchrun.py", *TRAIN, cold=True, PYTHONPATH=str(tmp_path))
    said = job.ends_with(2)
    assert "needs a temporary folder" in said and "TMPDIR" in said and len(said.splitlines()) <= 3, said


GONE = """
import shutil, sys
from pathlib import Path
from launch import agent, torchrun
start = agent.Forks._start
def remove(forks):
    shutil.rmtree(Path(forks.error_files[0]).parents[3])
    start(forks)
agent.Forks._start = remove
sys.exit(torchrun.main(sys.argv[1:]))
"""


def test_a_launchers_folder_that_is_cleaned_away_is_named_and_another_start_may_help(jobs, tmp_path):
    (tmp_path / "gone.py").write_text(GONE)
    said = jobs.start(tmp_path / "gone.py", *TRAIN, PYTHONPATH=str(ROOT)).ends_with(1)
    assert "No such file" in said and "its folder /" in said and len(said.splitlines()) <= 4, said


def test_the_launchers_time_for_a_save_is_what_the_flag_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    parser = agent.get_args_parser()
    agent.settle(parser.parse_args(["train.py"]), str(tmp_path))
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"
    if "--shutdown-timeout" in parser.format_help():
        agent.settle(parser.parse_args(["--shutdown-timeout=1234", "train.py"]), str(tmp_path))
        assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "1234"
