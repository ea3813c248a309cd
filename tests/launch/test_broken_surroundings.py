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
    command = f'exec "$@" {redirection}'
    return jobs.start("-c", command, "bash", sys.executable, *words, cold=True, program="bash", **env)


@pytest.mark.parametrize(
    "words, code",
    [
        (("torchrun.py", *TRAIN), 0),
        (("torchrun.py", *TRAIN, "--lr=nan"), 2),
        (("drill.py", sys.executable, "-c", "raise SystemExit(5)"), 2),
        (("store.py",), 2),
    ],
    ids=["torchrun.py", "torchrun.py, a mistake", "drill.py", "store.py"],
)
def test_a_launcher_whose_log_is_full_does_what_it_does_with_an_empty_one(jobs, run, words, code):
    start(jobs, FULL, LAUNCH / words[0], *words[1:], cwd=run.parent, PACE="0").ends_with(code)
    assert code or (reached(run) == 2 and audit(run) == CLEAN)


@pytest.mark.parametrize("redirection", [FULL, "2> >(exit)", "2>&-"])
def test_a_notice_reaches_the_training_whatever_becomes_of_the_log(jobs, tmp_path, redirection):
    words = (LAUNCH / "notice.py", "--file=leave", sys.executable, "-c", TRAINING)
    env = {"NOTICE_SECONDS": "0.05", "NOTICE_ADDRESS": f"http://127.0.0.1:{free_port()}"}
    job = start(jobs, redirection, *words, cwd=tmp_path, **env)
    until(lambda: "trains" in job.output, "the training")
    (tmp_path / "leave").touch()
    job.ends_with(143)


def test_a_store_whose_log_is_full_serves_until_it_is_asked_to_end(jobs):
    place = ("127.0.0.1", free_port())
    job = start(jobs, f"> /dev/full {FULL}", LAUNCH / "store.py", "{}:{}".format(*place))

    def answers():
        with socket.socket() as line:
            return line.connect_ex(place) == 0

    until(answers, "the store")
    job.kill(signal.SIGTERM)
    assert job.wait() in (0, -signal.SIGTERM)  # it may not yet have blocked the signal


# ---- a machine that lacks what a launcher needs ---------------------------------------------------
def test_a_launcher_without_a_temporary_folder_says_so(jobs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import tempfile\ndef nowhere():\n    raise FileNotFoundError(2, 'No usable temporary directory')\n"
        "tempfile.gettempdir = nowhere\n"
    )
    said = jobs.start(LAUNCH / "torchrun.py", *TRAIN, cold=True, PYTHONPATH=str(tmp_path)).ends_with(2)
    assert "needs a temporary folder" in said and "TMPDIR" in said and len(said.splitlines()) <= 3, said


GONE = """
import shutil, sys
from launch import agent, torchrun
settle = agent.settle
def remove(args, folder):
    shutil.rmtree(folder)
    raise FileNotFoundError(2, "No such file or directory")
agent.settle = remove
sys.exit(torchrun.main(sys.argv[1:]))
"""


def test_a_launchers_folder_that_is_cleaned_away_is_named_and_another_start_may_help(jobs, tmp_path):
    (tmp_path / "gone.py").write_text(GONE)
    said = jobs.start(tmp_path / "gone.py", *TRAIN, PYTHONPATH=str(ROOT)).ends_with(1)
    assert "torchelastic_" in said and "was removed" in said, said


def test_a_machines_name_that_is_too_long_for_dns_is_no_obstacle(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "n" * 64)
    agent.address_towards("192.0.2.9:29400")


def test_the_launchers_time_for_a_save_is_what_the_flag_says(monkeypatch, tmp_path):
    parser = agent.get_args_parser()
    if "--shutdown-timeout" not in parser.format_help():
        pytest.skip("newer than this torch")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    for words, seconds in (([], "600"), (["--shutdown-timeout=1234"], "1234")):
        agent.settle(parser.parse_args([*words, "train.py"]), str(tmp_path))
        assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds
