"""launch/ and tests/run.sh: one command from a fresh clone to a training, and the same command again after
any end.
"""
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import PACED, ROOT, audit, children, lives, state, until, wait_for
from police import listeners

LOCAL, TORCHRUN = ROOT / "launch" / "local.sh", ROOT / "launch" / "torchrun.py"
HOME = Path(sys.prefix)
# as the kernel writes 127.0.0.1 and ::1
LOOPBACK = re.compile("0100007F|0{24}01000000|0{16}FFFF00000100007F")
needs_an_environment = pytest.mark.skipif(not (HOME / "bin" / "python").exists(),
                                          reason="the tests run in no environment")


def environment(**extra):
    """As in a fresh shell: no environment is active, unless `extra` says so."""
    left_out = ("VIRTUAL_ENV", "CONDA_PREFIX", "NPROC", "PYTHONPATH")
    return {k: v for k, v in os.environ.items() if k not in left_out} | {"PIP_NO_INDEX": "1"} | extra


def sh(*command, cwd=ROOT, path=None, **extra):
    """What a command did; `path` goes before the PATH."""
    env = environment(**extra)
    if path:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    return subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True,
                          timeout=120)


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
    prefix, agent, *rest = given(first)
    assert Path(prefix) == clone / ".venv" and Path(agent).parent == clone / "launch"
    assert rest == ["--nproc_per_node=3", str(clone / "train_ddp.py"), *words]
    assert not {"x", "y"} & {path.name for path in tmp_path.iterdir()}
    made = (clone / ".venv/pyvenv.cfg").stat().st_mtime_ns
    second = sh(clone / "launch/local.sh", cwd=tmp_path, NPROC="5", CUDA_VISIBLE_DEVICES="")
    assert len(second.stdout.splitlines()) == 1 and given(second)[2] == "--nproc_per_node=5"
    assert (clone / ".venv/pyvenv.cfg").stat().st_mtime_ns == made

    shutil.rmtree(next((clone / ".venv/lib").glob("python*/site-packages")) / "pip")  # as if cut short
    assert "making " in sh(clone / "launch/local.sh", cwd=tmp_path).stdout
    tests = sh(clone / "tests/run.sh", "--version", cwd=tmp_path)  # no pytest was asked for
    assert tests.returncode == 1 and "No module named pytest" in tests.stderr


@needs_an_environment
@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_is_used_and_none_is_made(clone, variable):
    assert Path(given(sh(clone / "launch/local.sh", **{variable: str(HOME)}))[0]) == HOME
    assert not (clone / ".venv").exists()


@needs_an_environment
@pytest.mark.parametrize(("visible", "count"), [(None, 4), ("0", 1), ("2,GPU-7a,1", 3), ("", 2)])
def test_a_process_is_started_for_each_gpu_that_is_visible(clone, tmp_path, visible, count):
    gpus = executable(tmp_path / "bin/nvidia-smi", "#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: H; done\n")
    given_env = ["env", *(["-u", "CUDA_VISIBLE_DEVICES"] if visible is None else
                          [f"CUDA_VISIBLE_DEVICES={visible}"])]
    done = sh(*given_env, clone / "launch/local.sh", path=gpus, VIRTUAL_ENV=str(HOME))
    assert given(done)[2] == f"--nproc_per_node={count}"


@needs_an_environment
@pytest.mark.parametrize("line", ["no-such-package-here", "pip>=9999  # newer than there is"])
def test_what_is_missing_or_too_old_is_installed_and_a_failure_has_a_way_out(clone, line):
    (clone / "requirements.txt").write_text(f"{line}\n")
    done = sh(clone / "launch/local.sh", VIRTUAL_ENV=str(HOME))
    assert (done.returncode == 2 and "installing into" in done.stdout
            and "No matching distribution" in done.stderr)
    assert re.search(r"error: pip could not install.*\n       .*type the same command again\n\Z", done.stderr)


def test_an_environment_that_is_gone_an_old_python_and_a_missing_venv_are_said_in_words(clone, tmp_path):
    gone = sh(clone / "launch/local.sh", VIRTUAL_ENV=str(tmp_path / "gone"))
    assert gone.returncode == 2 and "has no bin/python\n       deactivate it" in gone.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "pipless"], check=True,
                   timeout=60)
    pipless = sh(clone / "launch/local.sh", VIRTUAL_ENV=str(tmp_path / "pipless"))
    assert pipless.returncode == 2 and "has no pip\n" in pipless.stderr and "-m ensurepip" in pipless.stderr
    old = executable(tmp_path / "old/python3", '#!/bin/sh\n[ "$1" = -c ] && exit 1\necho Python 3.8.18\n')
    done = sh(clone / "launch/local.sh", path=old)
    assert done.returncode == 2 and "Python 3.8.18, but Python 3.10 or newer is needed" in done.stderr
    bare = executable(tmp_path / "bare/python3",
                      f'#!/bin/sh\n[ "$2" = venv ] && exit 1\nexec "{sys.executable}" "$@"\n')
    done = sh(clone / "launch/local.sh", path=bare)
    assert done.returncode == 2 and "apt install python3-venv" in done.stderr
    assert not (clone / ".venv").exists()
    (clone / ".venv").write_text("somebody's file")
    done = sh(clone / "launch/local.sh")
    assert (done.returncode == 2 and "is in the way" in done.stderr
            and (clone / ".venv").read_text() == "somebody's file")


@pytest.mark.parametrize("words", [("--nproc", "0"), ("--nproc", "two"), ("--nproc",), ("--nproc=-1",),
                                   ("--nproc", "1;id")])
def test_a_number_of_processes_that_is_none_is_refused(words):
    done = sh(LOCAL, *words)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: --nproc")
    assert len(done.stderr.splitlines()) == 2


def test_gpus_decide_the_number_of_processes_and_the_agent(clone, tmp_path):
    gpus = executable(tmp_path / "bin/nvidia-smi",
                      '#!/bin/sh\necho "GPU 0: one (UUID: GPU-1)"\necho "GPU 1: two (UUID: GPU-2)"\n'
                                                   'echo "GPU 2: three (UUID: GPU-3)"\n')
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run([clone / "launch/local.sh"], env=env | {"PATH": f"{gpus}:{env['PATH']}"},
                          capture_output=True, text=True,
                          timeout=120)
    assert given(done)[1:3] == [str(clone / "launch/torchrun.py"), "--nproc_per_node=3"]


@needs_an_environment
@pytest.mark.parametrize("visible, number", [("1", 1), ("0,2", 2), ("GPU-1,GPU-2,GPU-3", 3)])
def test_only_visible_gpus_get_a_process(clone, tmp_path, visible, number):
    gpus = executable(tmp_path / "bin/nvidia-smi",
                      "#!/bin/sh\nfor n in 0 1 2 3 4 5 6 7; do echo GPU $n: a; done\n")
    done = sh(clone / "launch/local.sh", path=gpus, VIRTUAL_ENV=str(HOME), CUDA_VISIBLE_DEVICES=visible)
    assert given(done)[2] == f"--nproc_per_node={number}"


def test_a_server_runs_exactly_what_a_person_types(clone):
    (clone / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", clone / ".ci/run")
    executable(clone / "tests/run.sh", '#!/bin/sh\necho "$0" "$@"\n')
    done = sh(clone / ".ci/run", "a b", cwd="/")
    assert Path(done.stdout.removesuffix(" a b\n")).resolve() == (clone / "tests/run.sh").resolve()
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    assert re.findall(r"run: (.*)", workflow) == [".ci/run"]


def test_the_shell_scripts_are_clean():
    scripts = [*ROOT.glob("launch/*.sh"), ROOT / "launch/slurm.sbatch", ROOT / "tests/run.sh",
               ROOT / ".ci/run"]
    for path in scripts:
        assert subprocess.run(["bash", "-n", path], timeout=60).returncode == 0
        assert path.name == "setup.sh" or os.access(path, os.X_OK), path
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: syntax alone was checked")
    done = subprocess.run(["shellcheck", "-x", *scripts], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_nothing_here_opens_tensorboard_to_the_network():
    for path in [*ROOT.glob("launch/*"), *ROOT.glob("train_*.py"), *ROOT.glob("common/**/*.py"),
                 ROOT / "README.md", *ROOT.glob("*/README.md")]:
        if path.is_file():
            assert "bind_all" not in path.read_text()
    assert re.findall(r"^tensorboard .*", (ROOT / "README.md").read_text(),
                      re.MULTILINE)[0].count("--host 127.0.0.1") == 1


# ---- the training ---------------------------------------------------------------------------------
@needs_an_environment
@pytest.mark.parametrize("words", [("--lr", "nan"), ("--learning-rate", "1"), ("--run-dir", "/")])
def test_a_wrong_flag_is_said_once_with_exit_code_2_before_any_process_is_started(words):
    for command in ([LOCAL], [sys.executable, TORCHRUN, "--nproc_per_node=3", ROOT / "train_ddp.py"]):
        done = sh(*command, *words, VIRTUAL_ENV=str(HOME), RANK="of an outer job")
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("error:") == 1
        assert 2 <= len(done.stderr.splitlines()) <= 3


@needs_an_environment
def test_help_is_that_of_the_training():
    done = sh(LOCAL, "--help", VIRTUAL_ENV=str(HOME))
    assert (done.returncode == 0 and "torchrun --nproc_per_node=2 train_ddp.py" in done.stdout
            and "--epochs" in done.stdout)


def test_settings_on_the_command_line_come_on_top_of_the_launchers_own(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "launch")
    for name in ("PET_LOG_DIR", "PET_MONITOR_INTERVAL"):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes back what is set
        monkeypatch.delenv(name)
    launcher = importlib.import_module("torchrun")
    own = launcher.SETTINGS["PET_RDZV_CONF"]
    monkeypatch.setenv("PET_RDZV_CONF", own)
    assert launcher.settled(["--nnodes=1:2", "--rdzv_conf=is_host=0,last_call_timeout=9"], str(tmp_path)) == [
        "--nnodes=1:2", f"--rdzv_conf={own},is_host=0,last_call_timeout=9"]
    assert launcher.settled(["--nproc_per_node=2"], str(tmp_path))[0] == "--rdzv_backend=c10d"
    # the machine's own name may be unknown to it
    assert launcher.settled(["--standalone"], str(tmp_path)) == ["--local_addr=127.0.0.1", "--standalone"]


@pytest.mark.parametrize("own, endpoint, address", [
    ("127.0.1.1", "192.0.2.9:29400", "10.0.0.7"), ("10.0.0.5", "192.0.2.9:29400", None),
    ("127.0.1.1", "127.0.0.1:29400", None),
    ("127.0.1.1", None, None), ("127.0.1.1", "/shared/JOB.meeting", None)])
def test_where_a_machines_name_is_a_loopback_the_launcher_takes_its_address_in_the_network(monkeypatch, own,
                                                                                           endpoint, address):
    """Debian writes `127.0.1.1 node01` into /etc/hosts, and torch tells the other machines to come to node01.
    """
    class Probe(socket.socket):
        def connect(self, place):
            self.way = place[0]

        def getsockname(self):
            return ("127.0.0.1" if self.way.startswith("127.") else "10.0.0.7", 1)

    monkeypatch.syspath_prepend(ROOT / "launch")
    launcher = importlib.import_module("torchrun")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: own)
    monkeypatch.setattr(socket, "socket", Probe)
    assert launcher.address_towards(endpoint) == address


def test_slurm_names_a_task_of_an_array_and_queues_again_what_another_try_may_mend(tmp_path):
    """The last task of an array has the number of the array: scancel and requeue would reach every task."""
    script = (ROOT / "launch/slurm.sbatch").read_text()
    for name in ("srun", "scancel", "scontrol"):
        executable(tmp_path / "bin" / name, f'#!/bin/sh\necho {name} "$@" >> said\n'
                                            + ('kill -USR1 $PPID; sleep 0.2; exit $CODE\n' if name == "srun"
                                               else ""))
    env = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7",
           "PYTHON": "true"}
    for more, job in (({}, "7"), ({"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "7_2")):
        for code, again in (("143", True), ("1", True), ("137", True), ("0", False), ("2", False),
                            ("4", False)):
            done = sh("bash", "-c", script, cwd=tmp_path, path=tmp_path / "bin", CODE=code, **env, **more)
            assert done.returncode == int(code), done.stderr
            said = (tmp_path / "said").read_text()
            assert f"scancel --signal=USR1 {job}\n" in said and (f"scontrol requeue {job}\n" in said) == again
            (tmp_path / "said").unlink()


@pytest.mark.parametrize("arguments, environ, processes", [
    ([], {}, 1), (["--nproc_per_node=3"], {}, 3), (["--nproc-per-node", "3"], {}, 3),
    ([], {"PET_NPROC_PER_NODE": "3"}, 3),
    (["--nproc_per_node=2"], {"PET_NPROC_PER_NODE": "3"}, 2), (["--nproc_per_node=gpu"], {}, 0),
    (["--nnodes=1:1"], {}, 1),
    (["--nnodes=2", "--nproc_per_node=1"], {}, 0), (["--nnodes=1:4"], {}, 0),
    (["--nproc_per_node=2"], {"PET_NNODES": "2"}, 0)])
def test_the_launcher_counts_processes_as_torchrun_does_or_not_at_all(monkeypatch, arguments, environ,
                                                                      processes):
    monkeypatch.syspath_prepend(ROOT / "launch")
    monkeypatch.setattr(os, "environ", environ)
    assert importlib.import_module("torchrun").count(arguments) == processes


@pytest.mark.parametrize("codes, left_with", [
    ([143, 143], 143), ([143, -9], 143), ([-9, -9], 1), ([-15, -15], 143), ([], 143), ([143, 3], 3),
    ([0, 0], 0)])
def test_a_stop_is_143_unless_everybody_was_killed_before_it_had_saved(monkeypatch, codes, left_with):
    monkeypatch.syspath_prepend(ROOT / "launch")
    workers = importlib.import_module("workers").Workers(0, None)
    workers.codes, workers.asked, workers.code = codes, True, 143
    assert workers.verdict() == left_with
    workers.codes, workers.asked, workers.code = [], False, 2  # a wrong flag of torchrun's
    assert workers.verdict() == 2


@pytest.mark.parametrize("name, words", [
    ("RendezvousConnectionError", "no rendezvous at there:29400 in"),
    ("RendezvousTimeoutError", "too few machines came in"),
    ("RendezvousClosedError", "is over: it is complete, or a machine gave it up")])
def test_machines_that_do_not_meet_are_told_where_how_long_and_what_to_look_at(monkeypatch, name, words):
    import torch.distributed.elastic.rendezvous as rendezvous
    monkeypatch.syspath_prepend(ROOT / "launch")
    error = getattr(rendezvous, name)("The connection\nhas failed. See inner exception for details.")
    words_given = ["--rdzv_id=J7", "--rdzv_endpoint", "there:29400"]
    said = importlib.import_module("agent").not_met(error, words_given, 9)
    assert said.startswith("job J7") and words in said and said.count("\n") <= 2


def hears(pid):
    """Whether a process has a handler of its own for SIGTERM."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(caught, 16) >> signal.SIGTERM - 1 & 1


WAITS = ["--nnodes=2", "--rdzv_backend=c10d", "--rdzv_id=one", "--rdzv_endpoint=meeting",
         "--rdzv_conf=store_type=file"]


@pytest.mark.parametrize("agent, when", [(["torchrun.py"], hears), (["torchrun.py", *WAITS], hears),
                                         (["torchrun.py", *WAITS], lambda _: os.path.getsize("meeting"))])
def test_as_process_1_too_a_launcher_ends_at_once_while_it_has_no_workers(start, monkeypatch, tmp_path, agent,
                                                                          when):
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True,
                                                     timeout=60).returncode:
        pytest.skip("no PID namespace can be made here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meeting").touch()
    job = start(*alone, sys.executable, ROOT / "launch" / agent[0], *agent[1:], ROOT / "train_ddp.py", *PACED)
    until(lambda: children(job.pid) and when(children(job.pid)[0]), "the launcher to be there")
    os.kill(children(job.pid)[0], signal.SIGTERM)
    assert job.wait(10) == 143, job.output()
    assert not (tmp_path / "runs").exists() and "Traceback" not in job.output()


def test_a_worker_that_still_saves_is_given_time_and_one_that_does_nothing_is_not(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")
    launcher = importlib.import_module("patience")

    def waited_for(code):
        with subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"],
                              stdout=subprocess.PIPE) as worker:
            worker.stdout.readline()
            began, patience = time.monotonic(), launcher.Patience([worker.pid], grace=0.3, longest=1.5)
            until(lambda: not patience.lasts([worker.pid]), "the end of patience", 20)
            worker.kill()
            return time.monotonic() - began

    assert waited_for("import time; time.sleep(60)") < 1.4 < waited_for("while True: pass")


@pytest.fixture
def start(tmp_path):
    """Starts a command in a session of its own; nothing of it outlives the test."""
    started = []

    def begin(*command, **extra):
        out = open(tmp_path / f"output-{len(started)}", "w+b")
        started.append(subprocess.Popen(list(map(str, command)), cwd=tmp_path, env=environment(**extra),
                                        stdout=out, stderr=out,
                                        stdin=subprocess.DEVNULL, start_new_session=True))
        started[-1].output = lambda: Path(out.name).read_text()
        started[-1].out = out
        return started[-1]

    yield begin
    for process in started:
        process.kill()  # its workers die with it
        process.wait()
        process.out.close()


@needs_an_environment
@pytest.mark.parametrize("agent", ["local.sh", "torchrun.py"])
def test_a_worker_killed_a_job_interrupted_and_killed_whole_and_the_same_command_each_time(agent, start,
                                                                                           tmp_path):
    run = tmp_path / "run of 'one'"
    command = {"local.sh": [LOCAL],
               "torchrun.py": [sys.executable, TORCHRUN, "--nproc_per_node=2", ROOT / "train_ddp.py"]}[agent]
    command += [*PACED, "--run-dir", run]
    env = {"VIRTUAL_ENV": str(HOME), "PACE": "0.1", "A_TOKEN": "secret-4711"}
    before = len(list(Path(os.environ["TMPDIR"]).glob("torchelastic_*")))

    job = start(*command, **env)
    life = wait_for(run, 3, job=job)
    assert len(life["pids"]) == 2 and {*life["pids"]} < {*children(job.pid)}
    for pid in (job.pid, *life["pids"]):
        assert all(LOOPBACK.match(place) for place in listeners(pid).values()), listeners(pid)
    os.kill(life["pids"][1], signal.SIGKILL)
    wait_for(run, 6, life=1, job=job)
    job.send_signal(signal.SIGINT)  # Ctrl-C: the terminal sends it to the agent
    assert job.wait(60) == 143, job.output()
    assert "stopped on SIGINT" in job.output() and "Traceback" not in job.output()

    job = start(*command, **env)
    wait_for(run, 9, life=2, job=job)
    workers = children(job.pid)
    job.kill()
    until(lambda: all(state(pid) in "ZX" for pid in workers), "the workers to follow their agent", 10)

    job = start(*command, **env | {"PACE": "0"})
    assert job.wait(60) == 0, job.output()
    assert audit(run) == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
    assert len(lives(run)) == 4
    left = list(Path(os.environ["TMPDIR"]).glob("torchelastic_*"))
    assert len(left) <= before + 1  # of the one that was killed
    texts = [job.output(),
             *(path.read_bytes().decode(errors="replace") for path in run.rglob("*") if path.is_file())]
    assert not any("secret-4711" in text for text in texts)  # nobody writes down the environment
    if agent == "torchrun.py":  # what only the workers can see is handed on too
        job = start(*command, "--seed", 7, **env)
        assert job.wait(60) == 2 and job.output().count("error: ") == 1, job.output()
        assert "--seed was 0, now 7" in job.output() and "Traceback" not in job.output()


def test_machines_with_fixed_numbers_need_no_name_for_the_job_and_survive_a_kill(jobs, tmp_path):
    """`--node_rank --master_addr --master_port`: what most people type, and as variables what Kubeflow sets.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port), "PACE": "0.02"}
    nodes = [jobs.torchrun(1, "train_ddp.py", *PACED, "--run-dir", tmp_path / "run", PET_NODE_RANK=str(rank),
                           **env)
             for rank in (0, 1)]
    life = wait_for(tmp_path / "run", 3, job=nodes[0])
    assert life["world"] == 2 and jobs.kill(life["pids"][1])
    assert [node.wait(100) for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert audit(tmp_path / "run") == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}


def test_a_machine_joins_a_running_job_with_the_documented_command_of_plain_torchrun(jobs, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = re.search(r"TORCH_\w+=1 torchrun --nnodes.*\n.*",
                     (ROOT / "train_ddp.py").read_text())[0].replace("\\", "")
    for old, new in (("=8", "=1"), ("=1:4", "=1:2"), ("HOST:29400", f"127.0.0.1:{port}"),
                     ("/shared/run", str(tmp_path / "run"))):
        text = text.replace(old, new)
    setting, *command = text.split()
    at = command.index("train_ddp.py")
    here = ["--local_addr=127.0.0.1", "--rdzv_conf=last_call_timeout=1"]
    command[at:at + 1] = [*here, ROOT / "train_ddp.py", *PACED, "--epochs=999"]
    env = dict([setting.split("=")], PACE="0.05")
    first = jobs.start(*command, **env)
    wait_for(tmp_path / "run", 2, job=first)
    late = jobs.start(*command, **env)
    assert wait_for(tmp_path / "run", 3, life=1, job=late)["world"] == 2
    for job in (late, first):
        job.kill(signal.SIGTERM)
        job.wait()
    assert "warning" not in first.output


@needs_an_environment
@pytest.mark.parametrize("agent", ["local.sh", "torchrun.py"])
def test_nohup_outlives_the_terminal_and_slurms_early_warning_saves(agent, start, tmp_path):
    run = tmp_path / "run"
    command = {"local.sh": [LOCAL],
               "torchrun.py": [sys.executable, TORCHRUN, "--nproc_per_node=2", ROOT / "train_ddp.py"]}[agent]
    job = start("nohup", *command, *PACED, "--run-dir", run, VIRTUAL_ENV=str(HOME), PACE="0.05")
    wait_for(run, 2, job=job)
    job.send_signal(signal.SIGHUP)
    wait_for(run, 6, job=job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 143, job.output()
    assert len(lives(run)) == 1 and "stopped on SIGUSR1" in job.output(), job.output()


def test_slurm_hands_on_the_trainings_exit_code(tmp_path):
    """That it saves and is queued again before its time is up was tried by hand, on one machine: Slurm lets
    that take minutes.
    """
    if not shutil.which("sbatch") or subprocess.run(["sinfo"], capture_output=True, timeout=60).returncode:
        pytest.skip("no Slurm to submit to")
    submit = ["sbatch", "--wait", "--output", tmp_path / "log", "launch/slurm.sbatch", *PACED, "--run-dir",
              tmp_path / "run"]
    for more, code in (([], 0), (["--seed=7"], 2)):
        done = subprocess.run([*submit, *more], cwd=ROOT, env=environment(PYTHON=sys.executable), timeout=120)
        assert done.returncode == code, (tmp_path / "log").read_text()
    assert audit(tmp_path / "run") == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
