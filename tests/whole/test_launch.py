"""launch/ and tests/run.sh: one command from a fresh clone to a training, and the same command again after
any end.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
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
    free_port,
    kill_at,
    listening,
    lives,
    ran,
    until,
    wait_for,
)

from launch import agent, torchrun

LOCAL, TORCHRUN = ROOT / "launch" / "local.sh", ROOT / "launch" / "torchrun.py"
HOME = Path(sys.prefix)
# as the kernel writes 127.0.0.1 and ::1
LOOPBACK = re.compile("0100007F|0{24}01000000|0{16}FFFF00000100007F")
needs_an_environment = pytest.mark.skipif(
    not (HOME / "bin" / "python").exists(), reason="the tests run in no environment"
)


def environment(**extra):
    """As in a fresh shell: no environment is active, unless `extra` says so; None unsets a variable."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "NPROC", "PYTHONPATH")
    }
    env |= {"PIP_NO_INDEX": "1"} | extra
    return {name: value for name, value in env.items() if value is not None}


def sh(*words, cwd=ROOT, path=None, **extra):
    """What a command did; `path` goes before the PATH."""
    env = environment(**extra)
    if path:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    return subprocess.run(
        list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )


def executable(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path.parent


@pytest.fixture
def clone(tmp_path):
    """A copy of the launchers at a place with spaces, which installs nothing and whose agent only says what
    it was given.
    """
    root = tmp_path / "a clone; with 'odd' $HOME"
    for name in ("launch", "tests"):
        (root / name).mkdir(parents=True)
    for name in ("launch/local.sh", "launch/setup.sh", "tests/run.sh"):
        shutil.copy(ROOT / name, root / name)
    for name in ("requirements.txt", "tests/requirements.txt"):
        (root / name).write_text("# nothing\n\npip >= 9\n")
    said = "import json, sys; print(json.dumps([sys.prefix, *sys.argv]))"
    (root / "launch/torchrun.py").write_text(said)
    return root


def given(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- the environment ------------------------------------------------------------------------------
def test_the_first_call_makes_an_environment_beside_the_project_and_the_second_finds_it(clone, tmp_path):
    words = ["--run-dir", "$(touch x); `touch y` a  b", "--lr=0.1", "", "*"]
    first = sh(clone / "launch/local.sh", "--nproc", 3, *words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert "making " in first.stdout
    prefix, launcher, *rest = given(first)
    assert Path(prefix) == clone / ".venv" and Path(launcher).parent == clone / "launch"
    assert rest == ["--nproc_per_node=3", f"{clone}/train_ddp.py", *words]
    assert not {"x", "y"} & {path.name for path in tmp_path.iterdir()}
    made = (clone / ".venv/pyvenv.cfg").stat().st_mtime_ns
    second = sh(clone / "launch/local.sh", cwd=tmp_path, NPROC="5", CUDA_VISIBLE_DEVICES="")
    assert len(second.stdout.splitlines()) == 1 and given(second)[2] == "--nproc_per_node=5"
    assert (clone / ".venv/pyvenv.cfg").stat().st_mtime_ns == made


@needs_an_environment
@pytest.mark.parametrize(
    "variable, visible, count",
    [
        ("VIRTUAL_ENV", None, 4),
        ("CONDA_PREFIX", "2,GPU-7a,1", 3),
        ("VIRTUAL_ENV", "", 2),
        ("VIRTUAL_ENV", "-1", 2),
    ],
)
def test_an_active_environment_is_used_and_a_process_started_for_each_visible_gpu(
    clone, tmp_path, variable, visible, count
):
    gpus = executable(tmp_path / "bin/nvidia-smi", "#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: H; done\n")
    words = given(
        sh(clone / "launch/local.sh", path=gpus, CUDA_VISIBLE_DEVICES=visible, **{variable: str(HOME)})
    )
    assert Path(words[0]) == HOME and words[2] == f"--nproc_per_node={count}"
    assert not (clone / ".venv").exists()


def test_an_active_environment_that_lacks_something_is_left_alone_and_another_one_made(clone, tmp_path):
    calls = tmp_path / "calls"
    executable(tmp_path / "bin/python", f'#!/bin/sh\necho "$@" >> "{calls}"\nexit 1\n')
    done = sh(clone / "launch/local.sh", CONDA_PREFIX=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert Path(given(done)[0]) == clone / ".venv" and "is used" in done.stderr
    assert "pip" not in calls.read_text() and "venv" not in calls.read_text()


@needs_an_environment
@pytest.mark.parametrize(
    "wanted, why",
    [
        (f"torch < {version('torch')}", rf"torch is {re.escape(version('torch'))}, wanted is <"),
        ("no-such-thing", "no-such-thing is missing"),
    ],
)
def test_the_true_reason_is_named_why_an_active_environment_is_not_used(clone, tmp_path, wanted, why):
    with (clone / "requirements.txt").open("a") as file:
        file.write(f"{wanted}\n")
    done = sh(clone / "launch/local.sh", VIRTUAL_ENV=str(HOME), CUDA_VISIBLE_DEVICES="")  # no index
    assert done.returncode == 2 and re.search(rf"{HOME} has no use here \({why}.*\): ", done.stderr)
    name = wanted.split()[0]
    assert f"installing into {clone}/.venv ({name} is missing)" in done.stdout


@needs_an_environment
def test_local_sh_whose_log_is_full_makes_its_environment_all_the_same(clone, tmp_path):
    executable(tmp_path / "bin/python", "#!/bin/sh\nexit 1\n")
    words = ("-c", 'exec "$@" 2> /dev/full', "sh", clone / "launch/local.sh")
    assert (
        Path(given(sh("sh", *words, CONDA_PREFIX=str(tmp_path), CUDA_VISIBLE_DEVICES=""))[0])
        == clone / ".venv"
    )


@needs_an_environment
def test_local_sh_runs_a_module_in_the_same_environment_from_anywhere(tmp_path):
    words = ["-m", "common.ledger", tmp_path, "--pid", 1]
    for env in ({"VIRTUAL_ENV": str(HOME)}, {"CONDA_PREFIX": str(HOME), "NPROC": "none"}):
        done = sh(LOCAL, *words, cwd=tmp_path, **env)
        assert done.returncode == 2 and "holds no life" in done.stderr and done.stdout == ""


def test_the_shell_scripts_are_clean():
    scripts = [
        *ROOT.glob("launch/*.sh"),
        ROOT / "launch/slurm.sbatch",
        ROOT / "tests/run.sh",
        ROOT / ".ci/run",
    ]
    for path in scripts:
        assert ran("bash", "-n", path).returncode == 0
        assert path.name == "setup.sh" or os.access(path, os.X_OK), path
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: syntax alone was checked")
    done = ran("shellcheck", "-x", *scripts)
    assert done.returncode == 0, done.stdout


# ---- torchrun's flags -----------------------------------------------------------------------------
@needs_an_environment
@pytest.mark.parametrize("words", [("--lr", "nan"), ("--nproc",), ("--nproc", "1;id")])
def test_a_wrong_flag_is_refused_in_three_lines_with_exit_code_2_before_any_process_is_started(words):
    commands = [[LOCAL]]
    if "--nproc" not in words:
        commands.append([sys.executable, TORCHRUN, "--nproc_per_node=3", ROOT / "train_ddp.py"])
    for words_before in commands:
        done = sh(*words_before, *words, VIRTUAL_ENV=str(HOME), RANK="of an outer job")
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("error:") == 1
        assert 2 <= len(done.stderr.splitlines()) <= 3


def test_a_wrong_flag_of_torchruns_own_and_a_script_that_is_not_there_are_refused(jobs):
    for words, text in (
        (["--nproc_per_node=none", "train_ddp.py"], "torchrun cannot start so"),
        (["no_such_script.py"], "no_such_script.py"),
    ):
        said = jobs.start(TORCHRUN, *words).ends_with(2)
        assert text in said and len(said.splitlines()) <= 3, said


def test_settings_of_the_rendezvous_come_on_top_of_the_launchers_own(tmp_path):
    args = agent.get_args_parser().parse_args(
        [
            "--nnodes=1:2",
            "--rdzv_endpoint=127.0.0.1:29400",
            "--rdzv_backend=c10d",
            "--rdzv-conf",
            "is_host=0,last_call_timeout=9",
            "train_ddp.py",
        ]
    )
    agent.settle(args, str(tmp_path))
    config = agent.config_from_args(args)[0]
    assert {"last_call_timeout=9", "keep_alive_interval=2", "keep_alive_max_attempt=3", "is_host=0"} <= {
        f"{name}={value}" for name, value in config.rdzv_configs.items()
    }


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


@pytest.mark.parametrize(
    "words, environ, processes",
    [
        ([], {}, 1),
        (["--nproc-per-node", "3"], {}, 3),
        (["--nproc_per=2"], {"PET_NPROC_PER_NODE": "3"}, 2),
        (["--nproc_per_node=gpu"], {}, 0),
        (["--nnodes=1:4"], {}, 0),
        (["--nproc_per_node=2"], {"PET_NNODES": "2"}, 0),
    ],
)
def test_the_launcher_counts_processes_as_torchrun_does_or_not_at_all(monkeypatch, words, environ, processes):
    monkeypatch.setattr(os, "environ", environ)
    assert torchrun.glance(words)[0] == processes


# ---- the training ---------------------------------------------------------------------------------
def hears(pid):
    """Whether a process has a handler of its own for SIGTERM."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(caught, 16) >> signal.SIGTERM - 1 & 1


WAITS = [
    "--nnodes=2",
    "--rdzv_backend=c10d",
    "--rdzv_id=one",
    "--rdzv_endpoint=meeting",
    "--rdzv_conf=store_type=file",
]


@pytest.mark.parametrize("words, when", [([], hears), (WAITS, lambda _: os.path.getsize("meeting"))])
def test_as_process_1_too_a_launcher_ends_at_once_while_it_has_no_workers(jobs, tmp_path, words, when):
    alone = ["--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or sh("unshare", *alone, "true").returncode:
        pytest.skip("no PID namespace can be made here")
    (tmp_path / "meeting").touch()
    words = [*alone, sys.executable, TORCHRUN, *words, ROOT / "train_ddp.py", *PACED]
    job = jobs.start(*words, cold=True, program="unshare", cwd=tmp_path)
    until(lambda: children(job.pid) and when(children(job.pid)[0]), "the launcher to be there")
    os.kill(children(job.pid)[0], signal.SIGTERM)
    assert "Traceback" not in job.ends_with(143) and not (tmp_path / "runs").exists()


def left_in_the_temporary_folder():
    return {
        name for name in os.listdir(os.environ["TMPDIR"]) if re.search("torch.*-|^torchelastic_|^pymp-", name)
    }


@needs_an_environment
def test_nohup_outlives_sighup_and_after_sigkill_and_ctrl_c_the_same_command_goes_on(jobs, tmp_path):
    run = tmp_path / "run of 'one'"
    words = [*PACED, "--epochs", "8", "--run-dir", run]  # a life that is killed must not complete it
    fresh = [f"--unset={name}" for name in ("CONDA_PREFIX", "NPROC", "PYTHONPATH", "OMP_NUM_THREADS")]
    env = {"VIRTUAL_ENV": str(HOME), "PACE": "0.1", "A_TOKEN": "secret-4711", "PIP_NO_INDEX": "1"}
    before = left_in_the_temporary_folder()

    job = jobs.start(*fresh, "nohup", LOCAL, *words, cold=True, program="env", **env)
    life = wait_for(run, 3, job=job)
    for pid in (job.pid, *life["pids"]):
        assert all(map(LOOPBACK.fullmatch, listening(pid))), listening(pid)
    job.kill(signal.SIGHUP)  # it outlives its terminal
    os.kill(life["pids"][1], signal.SIGKILL)
    wait_for(run, 6, life=1, job=job)
    os.killpg(job.pid, signal.SIGINT)  # Ctrl-C
    out = job.ends_with(143)
    assert "stopped on SIGINT" in out and not any(word in out for word in ("Traceback", "OMP_NUM_THREADS"))
    assert left_in_the_temporary_folder() == before

    warm = [TORCHRUN, "--nproc_per_node=2", ROOT / "train_ddp.py", *words]
    job = jobs.start(*warm, PACE="0.1")
    wait_for(run, 9, life=2, job=job)
    job.kill()
    until(lambda: not jobs.alive(), "the workers and their server to follow their agent")
    jobs.start(*warm, PACE="0").ends_with(0)
    assert audit(run) == CLEAN and len(lives(run)) == 4
    texts = [out, *(path.read_bytes().decode(errors="replace") for path in run.rglob("*") if path.is_file())]
    assert not any("secret-4711" in text for text in texts)  # nobody writes down the environment
    # what only the workers can see is handed on too
    assert jobs.start(*warm, "--seed", 7).ends_with(2).count("error: ") == 1


def with_fixed_numbers(jobs, *words):
    """Two machines under `--node_rank --master_addr --master_port`: what most people type."""
    env = {
        "PET_NNODES": "2",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(free_port()),
        "PACE": "0.02",
    }
    return [jobs.start(TORCHRUN, *words, PET_NODE_RANK=str(rank), **env) for rank in (0, 1)]


def test_machines_with_fixed_numbers_pass_on_an_exit_code(jobs, tmp_path):
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(2)\n")
    for node in with_fixed_numbers(jobs, tmp_path / "ends.py"):
        assert "Traceback" not in node.ends_with(2)


def test_machines_with_fixed_numbers_need_no_name_for_the_job_and_survive_a_kill(jobs, tmp_path):
    nodes = with_fixed_numbers(jobs, ROOT / "train_ddp.py", *PACED, "--run-dir", tmp_path / "run")
    assert kill_at(nodes[0], tmp_path / "run", 3)["world"] == 2
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert audit(tmp_path / "run") == CLEAN


@pytest.mark.parametrize("rank, why", [("0", "failed to listen"), ("1", "timed out")])
def test_machines_with_fixed_numbers_that_cannot_meet_say_why_and_end(jobs, tmp_path, rank, why):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if rank == "0" else free_port()
        said = jobs.start(
            TORCHRUN,
            "--nnodes=2",
            f"--node_rank={rank}",
            "--master_addr=127.0.0.1",
            f"--master_port={port}",
            "--rdzv_conf=timeout=3",
            ROOT / "train_ddp.py",
            *PACED,
            "--run-dir",
            tmp_path / "run",
        ).ends_with(1)
    assert said.count("no rendezvous (") == 1 and why in said and "is its port free" in said, said
    assert len(said.splitlines()) <= 3, said


def test_a_temporary_folder_with_a_long_name_is_no_obstacle(jobs, tmp_path):
    place = tmp_path / ("long" * 30)
    place.mkdir()
    (tmp_path / "ends.py").write_text("")
    jobs.start(TORCHRUN, tmp_path / "ends.py", TMPDIR=str(place)).ends_with(0)


def test_a_machine_joins_a_running_job_with_the_documented_command_of_plain_torchrun(jobs, tmp_path, run):
    text = re.search(r"TORCH_\w+=1 torchrun --nnodes.*\n.*", (ROOT / "train_ddp.py").read_text())[0]
    for old, new in (
        ("\\", ""),
        ("=8", "=1"),
        ("=1:4", "=1:2"),
        ("HOST:29400", f"127.0.0.1:{free_port()}"),
        ("/shared/run", f"{tmp_path}/run"),
    ):
        text = text.replace(old, new)
    setting, *words = text.split()
    at = words.index("train_ddp.py")
    here = ["--local_addr=127.0.0.1", "--rdzv_conf=last_call_timeout=1"]
    words[at : at + 1] = [*here, ROOT / "train_ddp.py", *PACED, "--epochs=999"]
    env = dict([setting.split("=")], PACE="0.05")
    first = jobs.start(*words, **env)
    wait_for(run, 2, job=first)
    late = jobs.start(*words, **env)
    assert wait_for(run, 3, life=1, job=late)["world"] == 2
    for job in (late, first):
        job.kill(signal.SIGTERM)
        job.wait()
    assert "warning" not in first.output
