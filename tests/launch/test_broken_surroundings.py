"""Each launcher does its work where its log's disk is full, and says in three lines what else is broken."""

import os
import sys

import pytest
from jobs import CLEAN, PACED, ROOT, audit, free_port, reached, until
from test_notice import TRAINING

from launch import agent

LAUNCH = ROOT / "launch"
TRAIN = ("--nproc_per_node=2", ROOT / "train_ddp.py", *PACED, "--max-steps=2", "--run-dir=run")
FULL = "2> /dev/full"


def start(jobs, redirection, *words, **env):
    command = f'exec "$@" {redirection}'
    return jobs.start("-c", command, "bash", sys.executable, *words, cold=True, program="bash", **env)


@pytest.mark.parametrize("words, code", [((), 0), (("--lr=nan",), 2)])
def test_a_launcher_whose_log_is_full_does_what_it_does_with_an_empty_one(jobs, run, words, code):
    start(jobs, FULL, LAUNCH / "torchrun.py", *TRAIN, *words, cwd=run.parent, PACE="0").ends_with(code)
    assert code or (reached(run) == 2 and audit(run) == CLEAN)


@pytest.mark.parametrize("redirection", [FULL, "2> >(exit)", "2>&-"])
def test_a_notice_reaches_the_training_whatever_becomes_of_the_log(jobs, tmp_path, redirection):
    words = (LAUNCH / "notice.py", "--file=leave", sys.executable, "-c", TRAINING)
    env = {"NOTICE_SECONDS": "0.05", "NOTICE_ADDRESS": f"http://127.0.0.1:{free_port()}"}
    job = start(jobs, redirection, *words, cwd=tmp_path, **env)
    until(lambda: "trains" in job.output, "the training")
    (tmp_path / "leave").touch()
    job.ends_with(143)


def test_the_launchers_time_for_a_save_is_what_the_flag_says(monkeypatch, tmp_path):
    parser = agent.get_args_parser()
    if "--shutdown-timeout" not in parser.format_help():
        pytest.skip("newer than this torch")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    agent.settle(parser.parse_args(["--shutdown-timeout=1234", "train.py"]), str(tmp_path))
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "1234"
