"""launch/ and tests/run.sh: one command from a fresh clone to a training, and the same command again after
any end.
"""

import json
import os
import re
import shutil
import signal
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from jobs import (
    CLEAN,
    PACED,
    ROOT,
    audit,
    children,
    executable,
    free_port,
    kill_at,
    listening,
    lives,
    ran,
    until,
    wait_for,
)

from launch import agent
from launch.torchrun import check_options

LOCAL, TORCHRUN = ROOT / "launch" / "local.sh", ROOT / "launch" / "torchrun.py"
HOME = Path(sys.prefix)
# as the kernel writes 127.0.0.1 and ::1
LOOPBACK = re.compile("0100007F|0{24}01000000|0{16}FFFF00000100007F")
needs_an_environment = pytest.mark.skipif(
    not (HOME / "bin" / "python").exists(), reason="the tests run in no environment"
)


@pytest.fixture(autouse=True)
def a_fresh_shell(monkeypatch):
    """No environment is active."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "NPROC", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")


@pytest.fixture
def clone(tmp_path):
    """A copy of the launchers at a place with spaces, which installs nothing and whose agent only says what
    it was given.
    """
    root = tmp_path / "a clone; with 'odd' $HOME"
    (root / "launch").mkdir(parents=True)
    for name in ("launch/local.sh", "launch/setup.sh"):
        shutil.copy(ROOT / name, root / name)
    (root / "requirements.txt").write_text("# nothing\n\npip >= 9\n")
    said = "import json, sys; print(json.dumps([sys.prefix, *sys.argv]))"
    (root / "launch/torchrun.py").write_text(said)
    return root


def given(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- the environment ------------------------------------------------------------------------------
def test_the_first_call_makes_an_environment_beside_the_project_and_the_second_finds_it(clone, tmp_path):
    words = ["--run-dir", "$(touch x); `touch y` a  b", "--lr=0.1", "", "*"]
    first = ran(clone / "launch/local.sh", "--nproc", 3, *words, cwd=tmp_path)
    assert "making " in first.stdout
    prefix, launcher, *rest = given(first)
    assert Path(prefix) == clone / ".venv" and Path(launcher).parent == clone / "launch"
    assert rest == ["--nproc_per_node=3", f"{clone}/train_ddp.py", *words]
    assert not {"x", "y"} & {path.name for path in tmp_path.iterdir()}
    made = (clone / ".venv/pyvenv.cfg").stat().st_mtime_ns
    second = ran(clone / "launch/local.sh", cwd=tmp_path, NPROC="5")
    assert len(second.stdout.splitlines()) == 1 and given(second)[2] == "--nproc_per_node=5"
    assert (clone / ".venv/pyvenv.cfg").stat().st_mtime_ns == made


@needs_an_environment
@pytest.mark.parametrize(
    "variable, visible, count",
    [
        ("VIRTUAL_ENV", "--unset=CUDA_VISIBLE_DEVICES", 4),
        ("CONDA_PREFIX", "CUDA_VISIBLE_DEVICES=2,GPU-7a,1", 3),
        ("VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES=", 2),
        ("VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES=-1", 2),
    ],
)
def test_an_active_environment_is_used_and_a_process_started_for_each_visible_gpu(
    clone, tmp_path, variable, visible, count
):
    gpus = executable(tmp_path / "bin/nvidia-smi", "#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: H; done\n")
    path = f"PATH={gpus}:{os.environ['PATH']}"
    prefix, _, processes, _ = given(
        ran("env", visible, path, f"{variable}={HOME}", clone / "launch/local.sh")
    )
    assert Path(prefix) == HOME and processes == f"--nproc_per_node={count}"
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize("log", ["", "2> /dev/full"])
def test_an_active_environment_that_lacks_something_is_left_alone_and_another_one_made(clone, tmp_path, log):
    calls = tmp_path / "calls"
    executable(tmp_path / "bin/python", f'#!/bin/sh\necho "$@" >> "{calls}"\nexit 1\n')
    words = ("-c", f'exec "$@" {log}', "sh", clone / "launch/local.sh")
    done = ran("sh", *words, CONDA_PREFIX=str(tmp_path))
    assert Path(given(done)[0]) == clone / ".venv" and (log or "is used" in done.stderr)
    assert "pip" not in calls.read_text() and "venv" not in calls.read_text()


@needs_an_environment
def test_the_true_reason_is_named_why_an_active_environment_is_not_used(clone):
    with (clone / "requirements.txt").open("a") as file:
        file.write(f"torch < {version('torch')}\n")
    done = ran(clone / "launch/local.sh", VIRTUAL_ENV=str(HOME))  # no index
    assert done.returncode == 2
    assert f"{HOME} has no use here (torch is {version('torch')}, wanted is <" in done.stderr
    assert f"installing into {clone}/.venv (torch is missing)" in done.stdout


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_the_shell_scripts_are_clean():
    scripts = [
        *ROOT.glob("launch/*.sh"),
        ROOT / "launch/slurm.sbatch",
        ROOT / "tests/run.sh",
        ROOT / ".ci/run",
    ]
    done = ran("shellcheck", "-x", *scripts)
    assert done.returncode == 0, done.stdout


# ---- torchrun's flags -----------------------------------------------------------------------------
@needs_an_environment
@pytest.mark.parametrize(
    "launcher, words, told",
    [
        (LOCAL, "--lr nan", "error: --lr"),
        (LOCAL, "--nproc", "error: --nproc needs a number"),
        (LOCAL, "--nproc 1;id", "error: --nproc: '1;id' is not"),
        (TORCHRUN, "--nproc_per_node=3 train_ddp.py --lr nan", "error: --lr"),
        (TORCHRUN, "--nproc_per_node=none train_ddp.py", "error: torchrun cannot start so"),
        (TORCHRUN, "no_such_script.py", "no_such_script.py"),
    ],
)
def test_a_wrong_flag_is_refused_once_in_three_lines_with_exit_code_2(launcher, words, told):
    program = [sys.executable] * (launcher == TORCHRUN)
    done = ran(*program, launcher, *words.split(), VIRTUAL_ENV=str(HOME), RANK="of an outer job")
    assert done.returncode == 2 and done.stderr.count(told) == 1, done
    assert len(done.stderr.splitlines()) <= 3


def test_a_script_that_parses_options_of_its_own_is_no_script_of_ours(tmp_path):
    (tmp_path / "own.py").write_text("def parse_options(): ...")
    assert check_options([tmp_path / "own.py"], processes=1) is None


@pytest.mark.parametrize("machines", [2, 128, 129, 512, 1024, 2048])
def test_settings_of_the_rendezvous_are_the_launchers_own_or_a_persons(tmp_path, machines):
    """Each heartbeat rewrites one value of the store: from 600 machines on some would seem to be dead."""
    words = f"--nnodes=1:{machines} --rdzv_endpoint=127.0.0.1:29400 --rdzv_backend=c10d --rdzv-conf=is_host=0"
    args = agent.get_args_parser().parse_args([*f"{words},last_call_timeout=9".split(), "train_ddp.py"])
    agent.settle(args, str(tmp_path))
    found = agent.config_from_args(args)[0].rdzv_configs
    assert found.items() >= {"is_host": "0", "last_call_timeout": "9", "keep_alive_max_attempt": "3"}.items()
    seconds = int(found["keep_alive_interval"])
    assert machines / seconds <= 64 and (seconds == 2) == (machines <= 128)


@pytest.mark.parametrize(
    "endpoint, address",
    [("192.0.2.9:29400", "10.0.0.7"), ("127.0.0.1:29400", None), ("/shared/JOB.meeting", None)],
)
def test_the_launcher_takes_its_address_in_the_network_for_its_own_name_may_be_a_loopback(
    monkeypatch, endpoint, address
):
    """Debian writes `127.0.1.1 node01` into /etc/hosts, and torch calls the other machines to node01."""

    class Probe(socket.socket):
        def connect(self, place):
            self.way = place[0]

        def getsockname(self):
            return ("127.0.0.1" if self.way.startswith("127.") else "10.0.0.7", 1)

    monkeypatch.setattr(socket, "socket", Probe)
    assert agent.address_towards(endpoint) == address


# ---- the training ---------------------------------------------------------------------------------
WAITS = "--nnodes=2 --rdzv_backend=c10d --rdzv_id=one --rdzv_endpoint=meeting --rdzv_conf=store_type=file"


@pytest.mark.parametrize(
    "words, begins",
    [("", lambda job: "starting" in job.output), (WAITS, lambda job: os.path.exists("meeting"))],
)
def test_as_process_1_too_a_launcher_ends_at_once_while_it_has_no_workers(jobs, tmp_path, words, begins):
    alone = ["--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or ran("unshare", *alone, "true").returncode:
        pytest.skip("no PID namespace can be made here")
    words = [*alone, sys.executable, TORCHRUN, *words.split(), ROOT / "train_ddp.py", *PACED]
    job = jobs.start(*words, cold=True, program="unshare", cwd=tmp_path)
    until(lambda: begins(job), "the launcher to be there")
    os.kill(children(job.pid)[0], signal.SIGTERM)
    assert "Traceback" not in job.ends_with(143) and not os.path.exists("runs")


@needs_an_environment
def test_nohup_outlives_sighup_and_after_sigkill_the_same_command_goes_on_and_nothing_told_a_secret(
    jobs, tmp_path
):
    run = tmp_path / "run of 'one'"
    words = [*PACED, "--epochs=8", "--run-dir", run]  # a life that is killed must not complete it
    env = {"VIRTUAL_ENV": str(HOME), "PACE": "0.1", "A_TOKEN": "secret-4711"}
    job = jobs.start("--unset=OMP_NUM_THREADS", "nohup", LOCAL, *words, cold=True, program="env", **env)
    life = wait_for(run, 3, job=job)
    for pid in (job.pid, *life["pids"]):
        assert all(map(LOOPBACK.fullmatch, listening(pid))), listening(pid)
    job.kill(signal.SIGHUP)  # it outlives its terminal
    wait_for(run, 6, job=job)
    job.kill()
    until(lambda: not jobs.alive(), "the workers and their server to follow their agent")
    again = [TORCHRUN, "--nproc_per_node=2", ROOT / "train_ddp.py", *words]
    jobs.start(*again, PACE="0").ends_with(0)
    assert audit(run) == CLEAN and len(lives(run)) == 2 and "OMP_NUM_THREADS" not in job.output
    files = [job.out, *(path for path in run.rglob("*") if path.is_file())]
    assert not [path for path in files if b"secret-4711" in path.read_bytes()]
    # what only the workers can see is handed on too
    assert jobs.start(*again, "--seed", 7).ends_with(2).count("error: ") == 1


def machine(jobs, rank, port, *words):
    """One of two under `--node_rank --master_addr --master_port`: what most people type."""
    flags = ["--nnodes=2", f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
    return jobs.start(TORCHRUN, *flags, *words)


def test_machines_with_fixed_numbers_need_no_name_for_the_job_survive_a_kill_and_pass_on_an_exit_code(
    jobs, tmp_path, run
):
    port = free_port()
    train = (ROOT / "train_ddp.py", *PACED, "--run-dir", run)
    nodes = [machine(jobs, rank, port, *train) for rank in (0, 1)]
    assert kill_at(nodes[0], run, 3)["world"] == 2
    for node in nodes:
        node.ends_with(0)
    assert audit(run) == CLEAN
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(2)\n")
    for node in [machine(jobs, rank, port, tmp_path / "ends.py") for rank in (0, 1)]:
        assert "Traceback" not in node.ends_with(2)


@pytest.mark.parametrize("rank, why", [(0, "failed to listen"), (1, "timed out")])
def test_machines_with_fixed_numbers_that_cannot_meet_say_why_and_end(jobs, run, rank, why):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = free_port() if rank else taken.getsockname()[1]
        train = (ROOT / "train_ddp.py", *PACED, "--run-dir", run)
        said = machine(jobs, rank, port, "--rdzv_conf=timeout=3", *train).ends_with(1)
    assert said.count("no rendezvous (") == 1 and why in said and "is its port free" in said, said
    assert len(said.splitlines()) <= 3, said


def test_a_machine_joins_a_running_job_with_the_documented_command_of_plain_torchrun(jobs, run):
    text = re.search(r"TORCH_\w+=1 torchrun --nnodes.*\n.*", (ROOT / "train_ddp.py").read_text())[0]
    for old, new in (
        ("\\", ""),
        ("=8", "=1"),
        ("=1:4", "=1:2"),
        ("HOST:29400", f"127.0.0.1:{free_port()}"),
        ("train_ddp.py --run-dir /shared/run", f"{ROOT}/train_ddp.py --run-dir {run}"),
    ):
        text = text.replace(old, new)
    setting, *words = text.split()
    here = ["--local_addr=127.0.0.1", "--rdzv_conf=last_call_timeout=1"]
    words = [words[0], *here, *words[1:], *PACED, "--epochs=999"]
    env = dict([setting.split("=")], PACE="0.05")
    first = jobs.start(*words, **env)
    wait_for(run, 2, job=first)
    late = jobs.start(*words, **env)
    assert wait_for(run, 3, life=1, job=late)["world"] == 2
    for job in (late, first):
        job.kill(signal.SIGTERM)
        job.wait()
    assert "warning" not in first.output
