"""launch/slurm.sbatch with commands in the place of Slurm's that note what they were asked for."""

import os
import subprocess

import pytest
from jobs import ROOT, executable

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


@pytest.fixture
def slurm(tmp_path):
    """Runs the script as a batch shell; returns its exit code and what Slurm's commands were asked for."""
    for name, text in {
        "srun": SRUN,
        "python": PYTHON,
        "scancel": '#!/bin/sh\necho scancel "$@" >> said\n',
        "mktemp": "#!/bin/sh\nsleep 0.3\nexec /usr/bin/mktemp\n",  # slow: no look may come before srun
        "squeue": '#!/bin/sh\necho squeue "$@" >> said\necho "$LEFT"\n',
    }.items():
        executable(tmp_path / name, text)
    usual = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
        "TRAIN_HOST": "10.0.0.7",
        "PYTHON": str(tmp_path / "python"),
        "CODE": "0",
        "LASTS": "0",
        "TRAIN_LOOK": "0.05",
    }
    said = tmp_path / "said"

    def run(*words, nodes=1, log=None, **env):
        env = os.environ | usual | {"SLURM_JOB_NUM_NODES": str(nodes)} | env
        said.write_text("")
        command = ["bash", SCRIPT, *words]
        done = subprocess.run(command, env=env, cwd=tmp_path, timeout=60, stdout=log, stderr=log)
        lines = said.read_text().splitlines()
        # srun, in the background, may note itself after a look
        return done.returncode, sorted(lines, key=lambda line: not line.startswith("srun"))

    return run


def test_the_whole_notice_but_20_seconds_is_there_for_saving_and_both_come_from_one_place(slurm):
    assert "timeout 100" in slurm()[1] and "#SBATCH --signal=B:USR1@120 " in SCRIPT.read_text()
    assert "timeout 580" in slurm(TRAIN_NOTICE="600")[1]
    assert "timeout 5" in slurm(TRAIN_NOTICE="600", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="5")[1]


def test_with_several_nodes_the_agents_meet_at_an_address_under_a_name_of_this_try(slurm):
    task = {"SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "4"}
    _, said = slurm("--lr", "a b", nodes=3, TRAIN_PORT="555", **task)
    assert "--nnodes=1:3 " in said[0] and "--rdzv_endpoint=10.0.0.7:555 " in said[0]
    assert "--rdzv_id=6_4-2 " in said[0] and said[0].endswith("train_ddp.py --lr a b")
    assert "--rdzv_endpoint=127." not in slurm(nodes=2, TRAIN_HOST="")[1][0]


def test_a_job_that_lost_fewer_nodes_goes_on(slurm):
    left, said = slurm(nodes=3, LEFT="2", LASTS="4", MIN_NODES="2")  # so many looks
    assert left == 0 and not [line for line in said if line.startswith("sc")]


def test_srun_is_asked_for_the_cpus_of_the_job_and_each_node_counts_its_own_gpus(slurm):
    for nodes, env, processes, cpus in (
        (2, {"SLURM_CPUS_PER_TASK": "48", "SLURM_GPUS_ON_NODE": "8"}, "gpu", "48"),
        (1, {"SLURM_GPUS_ON_NODE": "1"}, "1", ""),
        (1, {"SLURM_GPUS_ON_NODE": "8", "PROCESSES": "3"}, "3", ""),
    ):
        _, said = slurm(nodes=nodes, **env)
        assert f"--nproc_per_node={processes} " in said[0] and f"cpus {cpus}" in said


def test_what_a_compiler_or_a_shell_calls_host_is_not_where_the_nodes_meet(slurm):
    _, said = slurm(nodes=2, HOST="x86_64-conda-linux-gnu", PORT="8080", SCRIPT="mine.sh")
    assert "--rdzv_endpoint=10.0.0.7 " in said[0] and said[0].endswith(
        "train_ddp.py"
    )  # as this store says it


def test_a_store_that_dies_is_started_again_at_its_port(slurm, tmp_path):
    _, said = slurm(nodes=2, STORE="dies", LASTS="40")
    assert "--rdzv_endpoint=10.0.0.7:777 " in said[0]
    assert (tmp_path / "stores").read_text().split() == ["10.0.0.7:0", "10.0.0.7:777"]


def test_a_log_on_a_full_disk_stops_no_job(slurm):
    with open("/dev/full", "wb") as full:
        assert "--rdzv_endpoint=10.0.0.7 " in slurm(nodes=2, log=full)[1][0]


def test_a_store_that_does_not_start_ends_the_job_before_any_agent_is_started(slurm):
    assert slurm(nodes=2, STORE="broken") == (2, [])
