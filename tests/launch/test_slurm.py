"""launch/slurm.sbatch with commands in the place of Slurm's that note what they were asked for."""

import os
import subprocess

import pytest
from jobs import ROOT

from common.errors import note_reason

SCRIPT = ROOT / "launch/slurm.sbatch"
SRUN = """#!/usr/bin/env bash
leave() { exit "$CODE"; }
trap leave USR1
echo $$ > agents
echo srun "$@" >> said
echo timeout "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >> said
echo cpus "$SRUN_CPUS_PER_TASK" >> said
until awk '/^squeue/ { looks++ } END { exit (looks < ENVIRON["LASTS"]) }' said; do sleep 0.02; done
leave
"""
PYTHON = """#!/bin/sh
[ "$STORE" != broken ] || exit 2
[ "$1" != launch/store.py ] || echo "$2" >> stores
if [ "$STORE" = dies ] && [ "$(grep -c . stores)" = 1 ]; then echo "store on ${2%:0}:777"; exit 1; fi
[ "$1" != launch/store.py ] || { echo "store on ${2%:0}"; exec sleep 60; }
"""
SCANCEL = """#!/bin/sh
echo scancel "$@" >> said
until [ -s agents ]; do sleep 0.02; done
kill -USR1 $(cat agents)
"""


@pytest.fixture
def slurm(tmp_path):
    """Runs the script as a batch shell; returns its exit code and what Slurm's commands were asked for."""
    for name, text in {
        "srun": SRUN,
        "scancel": SCANCEL,
        "python": PYTHON,
        "scontrol": '#!/bin/sh\necho scontrol "$@" >> said\n',
        "mktemp": "#!/bin/sh\nsleep 0.3\nexec /usr/bin/mktemp\n",  # slow: no look may come before srun
        "squeue": '#!/bin/sh\necho squeue "$@" >> said\necho "$LEFT"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*words, log=None, **env):
        given = (
            os.environ
            | {
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "SLURM_SUBMIT_DIR": str(tmp_path),
                "SLURM_JOB_NUM_NODES": "1",
                "SLURM_JOB_ID": "7",
                "PYTHON": str(tmp_path / "python"),
                "CODE": "0",
                "LASTS": "0",
                "TRAIN_LOOK": "0.05",
            }
            | env
        )
        done = subprocess.run(
            ["bash", SCRIPT, *words], env=given, cwd=tmp_path, timeout=60, stdout=log, stderr=log
        )
        said = (tmp_path / "said").read_text().splitlines() if (tmp_path / "said").exists() else []
        (tmp_path / "said").unlink(missing_ok=True)
        said.sort(
            key=lambda line: not line.startswith("srun")
        )  # srun, in the background, may note itself after a look
        return done.returncode, said

    return run


def test_the_whole_notice_but_20_seconds_is_there_for_saving_and_both_come_from_one_place(slurm):
    assert "timeout 100" in slurm()[1] and "#SBATCH --signal=B:USR1@120 " in SCRIPT.read_text()
    assert "timeout 580" in slurm(TRAIN_NOTICE="600")[1]
    assert "timeout 5" in slurm(TRAIN_NOTICE="600", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5")[1]


def test_with_several_nodes_the_agents_meet_at_an_address_under_a_name_of_this_try(slurm):
    _, said = slurm(
        "--lr",
        "a b",
        SLURM_JOB_NUM_NODES="3",
        TRAIN_HOST="10.0.0.7",
        TRAIN_PORT="555",
        SLURM_RESTART_COUNT="2",
        SLURM_ARRAY_JOB_ID="6",
        SLURM_ARRAY_TASK_ID="4",
    )
    command = said[0]
    assert "--nnodes=1:3 " in command and "--rdzv_endpoint=10.0.0.7:555 " in command
    assert "--rdzv_id=6_4-2 " in command and command.endswith("train_ddp.py --lr a b")
    assert "--rdzv_endpoint=127." not in slurm(SLURM_JOB_NUM_NODES="2")[1][0]


@pytest.mark.parametrize("code, again", [("143", True), ("1", True), ("0", False), ("2", False)])
def test_a_job_that_lost_too_many_nodes_saves_and_this_task_of_an_array_is_queued_again(slurm, code, again):
    """The last task of an array has the number of the array: with that, all tasks would be stopped."""
    status, said = slurm(
        SLURM_JOB_NUM_NODES="3",
        MIN_NODES="2",
        LEFT="1",
        LASTS="999",
        CODE=code,
        SLURM_ARRAY_JOB_ID="7",
        SLURM_ARRAY_TASK_ID="2",
    )
    assert status == int(code) and "--nnodes=2:3" in said[0] and "squeue -h -j 7_2 -o %D" in said
    assert "scancel --signal=USR1 7_2" in said and ("scontrol requeue 7_2" in said) == again


def test_a_job_that_lost_fewer_nodes_goes_on(slurm):
    left, said = slurm(SLURM_JOB_NUM_NODES="3", LEFT="2", LASTS="4", MIN_NODES="2")  # so many looks
    assert left == 0 and "--nnodes=2:3" in said[0] and not [one for one in said if one.startswith("sc")]


def test_srun_is_asked_for_the_cpus_of_the_job_and_each_node_counts_its_own_gpus(slurm):
    _, said = slurm(
        SLURM_CPUS_PER_TASK="48", SLURM_GPUS_ON_NODE="8", SLURM_JOB_NUM_NODES="2", TRAIN_HOST="10.0.0.7"
    )
    assert "cpus 48" in said and "--nproc_per_node=gpu" in said[0]
    _, said = slurm(SLURM_GPUS_ON_NODE="1")
    assert "--nproc_per_node=1" in said[0]
    _, said = slurm(PROCESSES="3", SLURM_GPUS_ON_NODE="8")
    assert "cpus " in said and "--nproc_per_node=3" in said[0]


@pytest.mark.parametrize("host", ["x86_64-conda-linux-gnu", "login1"])
def test_what_a_compiler_or_a_shell_calls_host_is_not_where_the_nodes_meet(slurm, host):
    _, said = slurm(SLURM_JOB_NUM_NODES="2", HOST=host, PORT="8080", SCRIPT="mine.sh", TRAIN_HOST="10.0.0.7")
    assert "--rdzv_endpoint=10.0.0.7 " in said[0] and said[0].endswith("train_ddp.py")


def test_a_store_that_dies_is_started_again_at_its_port(slurm, tmp_path):
    _, said = slurm(SLURM_JOB_NUM_NODES="2", TRAIN_HOST="10.0.0.7", STORE="dies", LASTS="40")
    assert "--rdzv_endpoint=10.0.0.7:777 " in said[0]
    assert (tmp_path / "stores").read_text().split() == ["10.0.0.7:0", "10.0.0.7:777"]


def test_a_log_on_a_full_disk_stops_no_job(slurm):
    with open("/dev/full", "wb") as full:
        assert (
            "--rdzv_endpoint=10.0.0.7 "
            in slurm(SLURM_JOB_NUM_NODES="2", TRAIN_HOST="10.0.0.7", log=full)[1][0]
        )


def test_a_store_that_does_not_start_ends_the_job_before_any_agent_is_started(slurm):
    assert slurm(SLURM_JOB_NUM_NODES="2", STORE="broken") == (2, [])


def test_the_port_of_the_store_does_not_follow_from_the_jobs_number(slurm):
    _, said = slurm(SLURM_JOB_NUM_NODES="2", TRAIN_HOST="10.0.0.7")
    assert "--rdzv_endpoint=10.0.0.7 " in said[0]  # as this store says it


def test_why_a_training_ends_is_written_on_the_node_that_asked_for_it_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TERMINATION_LOG", f"{tmp_path}/log")
    note_reason("of another node")
    assert not (tmp_path / "log").exists()
    (tmp_path / "log").touch()
    note_reason("of this one")
    assert (tmp_path / "log").read_text() == "of this one\n"
