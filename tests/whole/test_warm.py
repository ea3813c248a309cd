"""launch/torchrun.py on one machine: restarts without imports, exit codes passed on; and the breaker of runs
that come to nothing.
"""

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from jobs import CLEAN, PACED, ROOT, TESTS, audit, children, command, free_port, lives, until, wait_for
from test_first_page import copied

TORCHRUN = ROOT / "launch" / "torchrun.py"
NOHUP = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # these tests run under nohup


def warm(jobs, *arguments, nproc=2, **env):
    return jobs.start(TORCHRUN, f"--nproc_per_node={nproc}", ROOT / "train_ddp.py", *arguments, **env)


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def fork_server(job):
    return next(pid for pid in children(job.pid) if "resource_tracker" not in command(pid) and children(pid))


def asked_to_stop(job, run):
    (run / "control/stop").touch()
    return job.ends_with(143)


def test_a_killed_worker_is_replaced_at_once_and_nothing_is_lost(jobs, run):
    job = warm(jobs, *PACED, "--run-dir", run, "--epochs=999")  # it must not end before the last kill
    for life in range(3):
        pid = wait_for(run, 2 + 4 * life, life, job)["pids"][life % 2]
        assert pid in children(fork_server(job))  # a process of its own would import torch for seconds
        assert jobs.kill(pid)
    wait_for(run, 14, 3, job)
    said = asked_to_stop(job, run)
    assert "torchrun:" not in said and "is gone" not in said  # a survivor knows how
    assert audit(run) == CLEAN
    assert [life["restart"] for life in lives(run)] == [0, 1, 2, 3]


def test_a_killed_fork_server_is_replaced_too(jobs, run):
    job = warm(jobs, *PACED, "--run-dir", run, PACE="0.02")
    wait_for(run, 3, 0, job)
    assert jobs.kill(fork_server(job))
    job.ends_with(0)
    assert audit(run) == CLEAN


def test_sigterm_sigint_sigusr1_or_sighup_leaves_143_though_a_worker_is_stopped_and_the_command_goes_on(
    jobs, run
):
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1] + [signal.SIGHUP] * (not NOHUP)
    for life, number in enumerate(numbers):
        job = warm(jobs, *PACED, "--run-dir", run)
        pids = wait_for(run, 3 + 4 * life, life, job)["pids"]
        assert jobs.kill(pids[life % 2], signal.SIGSTOP)  # it is woken, and not waited for
        job.kill(number)
        job.ends_with(143)
    warm(jobs, *PACED, "--run-dir", run, nproc=3).ends_with(0)
    assert audit(run) == CLEAN
    assert [life["world"] for life in lives(run)] == [2] * len(numbers) + [3]


def test_a_stop_before_the_first_step_leaves_143_and_no_folder(jobs, run):
    def folders():
        return {*Path(os.environ["TMPDIR"]).glob("torchelastic_*")}

    before = folders()
    for begins in (lambda job: "starting" in job.output, lambda job: any(map(children, children(job.pid)))):
        job = warm(jobs, *PACED, "--run-dir", run, cold=True)
        until(lambda: begins(job), "the launcher, then a worker")  # noqa: B023
        job.kill(signal.SIGTERM)
        job.ends_with(143)
    assert folders() == before


# Its words: a note that it has begun, and one that lets it end.
WAITS = """
import pathlib, signal, sys, time
begun, saved = map(pathlib.Path, sys.argv[1:])
begun.touch()
while not saved.exists():
    time.sleep(0.01)
sys.exit(143)
"""
DEAF = WAITS.replace("begun.touch()", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nbegun.touch()")


def test_no_number_of_signals_ends_the_wait_for_a_save(jobs, tmp_path):
    job = jobs.start(TORCHRUN, script(tmp_path, DEAF), tmp_path / "begun", tmp_path / "saved")
    until((tmp_path / "begun").exists, "the script")
    for _ in range(6):
        job.kill(signal.SIGTERM)
        time.sleep(0.3)  # each is heard by itself
    assert job.poll() is None
    (tmp_path / "saved").touch()
    job.ends_with(143)


# A signal comes when a process has begun and the agent does not know it yet: it ends with its fork server.
IN_THE_MIDST = """
import os, pathlib, runpy, signal, sys, time
from multiprocessing import context
begin = context.ForkServerProcess._Popen
def midst(process):
    popen = begin(process)
    while not pathlib.Path(sys.argv[-2]).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    return popen
context.ForkServerProcess._Popen = staticmethod(midst)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_signal_in_the_midst_of_a_start_leaves_no_process_behind(jobs, tmp_path, nproc):
    (tmp_path / "midst.py").write_text(IN_THE_MIDST)
    waits = [script(tmp_path, WAITS), tmp_path / "begun", tmp_path / "never"]
    jobs.start(tmp_path / "midst.py", TORCHRUN, f"--nproc_per_node={nproc}", *waits).ends_with(143)
    until(lambda: not jobs.alive(), "the end of its fork server", 20)


def test_a_signal_during_an_import_that_hangs_ends_the_job(jobs, tmp_path):
    (tmp_path / "own.py").write_text(
        "import pathlib, time\n"
        "def data(folder):\n"
        "    pathlib.Path(__file__).with_name('begun').touch()\n"
        "    time.sleep(600)\n"
    )
    job = warm(jobs, f"--dataset={tmp_path}/own.py:data")
    until((tmp_path / "begun").exists, "the import")
    job.kill(signal.SIGTERM)
    job.ends_with(143)
    until(lambda: not jobs.alive(), "the end of its fork server", 20)


AS_THEY_MEET = """
import os, signal, torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent's
dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    os._exit(1)
dist.barrier()
"""
CHANGED = """
import os, pathlib
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    pathlib.Path(__file__).write_text("raise SystemExit(3)")
    os.kill(os.getpid(), 9)
"""
OURS = "import own_losses\nfrom common.elastic import Elastic\n"
# {what a script of one's own does: (its text, flags, the exit code, what is told)}
SCRIPTS = {
    "it leaves": ("import os; os._exit(0)", "", 0, ""),
    "one rank exits with a code": ("import os, sys; sys.exit(3 - 3 * int(os.environ['RANK']))", "", 3, ""),
    "spawned, it exits": ("import sys; sys.exit(3)", "--start_method=spawn", 3, ""),
    "it fails": ("raise OSError(5, 'disk')", "--max_restarts=0", 1, "no restart is left"),
    "it is killed": ("import os; os.kill(os.getpid(), 9)", "--max_restarts=0", 1, "no restart is left"),
    "it has a mistake": ("import torch\ntorch.seeed()\n", "", 2, "script.py, line 2: torch.seeed()"),
    "it loses a rank": (AS_THEY_MEET, "--max_restarts=0", 1, "rank 0: another one has gone ("),
    "it is changed meanwhile": (CHANGED, "", 0, ""),
    "it ends at once, always": (
        "raise ConnectionError()",
        "",
        1,
        "3 lives in a row ended at once; their errors",
    ),
    "it is beside another common": (OURS, "--max_restarts=0", 0, ""),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_of_ones_own_ends_the_job_with_its_code_and_its_mistake_told(jobs, tmp_path, what):
    text, flags, code, told = SCRIPTS[what]
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").touch()
    (tmp_path / "own_losses.py").touch()
    place = tmp_path / ("long" * 30)  # of the launcher's own files
    place.mkdir()
    words = ["--nproc_per_node=2", *flags.split(), script(tmp_path, text)]
    said = jobs.start(TORCHRUN, *words, cold=text is OURS, cwd=tmp_path, TMPDIR=str(place)).ends_with(code)
    assert told in said and ("Traceback" in said) == ("Error(" in text), said


def test_forks_draw_different_numbers_as_processes_do_that_are_started_afresh(jobs, tmp_path):
    """Else data drawn without a seed is the same on all ranks, trains, and cannot be resumed."""
    draws = script(
        tmp_path,
        "import os, random, numpy, torch\n"
        "line = f'drawn {torch.rand(()).item()} {numpy.random.rand()} {random.random()}\\n'\n"
        "os.write(1, line.encode())\n",  # at once: print would write it piece by piece, between the other's
    )
    said = jobs.start(TORCHRUN, "--nproc_per_node=2", draws).ends_with(0)
    first, second = (line.split()[1:] for line in said.splitlines() if line.startswith("drawn"))
    assert not {*first} & {*second}


def test_three_lives_on_one_step_end_with_5_the_samples_and_the_first_error(jobs, run, tmp_path):
    deadly = (TESTS / "poisoned.py").read_text().replace("raise OSError", "os.kill(os.getpid(), 9)  #")
    data = script(tmp_path, f"import os\n{deadly}")
    flags = (
        "--model=mlp",
        f"--dataset={data}:data",
        "--workers=0",
        "--no-tensorboard",
        f"--run-dir={run}",
        "--global-batch-size=20",
    )
    said = warm(jobs, *flags).ends_with(5)
    _, word = said.split("error: no progress")
    assert "the first error: " in word
    samples = re.search(r"its samples: ([\d, ]+)", word)[1].split(", ")
    assert "37" in samples and len(samples) == 20


def test_lives_that_end_before_they_can_train_end_with_5(jobs, tmp_path):
    """As where there is too little memory to build the net."""
    (tmp_path / "net.py").write_text("import os\ndef killed(data):\n    os.kill(os.getpid(), 9)\n")
    flags = ("--dataset", "random", "--model", tmp_path / "net.py:killed")
    ours = warm(jobs, *flags, nproc=1).ends_with(5)
    plain = jobs.torchrun(2, "train_ddp.py", *flags, restarts=5).ends_with(1)  # it turns every code into 1
    assert ours.count("lives in a row ended before they could train") == 1, ours
    assert plain.count("lives in a row ended before they could train") == 1, plain


# A row for each flag of torchrun; LOGS stands for a folder, PORT for a port.
FLAGS = (
    "--nnodes=1:1",
    "--nproc-per-node=1",
    "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1",
    "--rdzv-endpoint=localhost:PORT --rdzv-backend=c10d",
    "--rdzv-id=job --rdzv-endpoint=127.0.0.1:0 --rdzv-backend=c10d",
    "--rdzv-conf=last_call_timeout=2",
    "--standalone",
    "--max-restarts=0",
    "--monitor-interval=0.1",
    "--start-method=fork",
    "--event-log-handler=null",
    "--role=trainer",
    "--module",
    "--no-python",
    "--run-path",
    "--log-dir=LOGS",
    "--redirects=3 --log-dir=LOGS",
    "--tee=3 --log-dir=LOGS",
    "--log-line-prefix-template=${rank}: --tee=3",
    "--local-ranks-filter=0 --tee=3",
    "--duplicate-stdout-filters=out --tee=3 --log-dir=LOGS",
    "--duplicate-stderr-filters=err --tee=3 --log-dir=LOGS",
    "--node-rank=0",
    "--master-addr=127.0.0.1",
    "--master-port=PORT",
    "--local-addr=127.0.0.1",
    "--signals-to-handle=SIGTERM",
    "--shutdown-timeout=5",
)
HELLO = """
import os, sys
os.write(1, f"out of {os.environ['RANK']}\\n".encode())
os.write(2, f"err of {os.environ['RANK']}\\n".encode())
"""


@pytest.mark.parametrize("words", FLAGS)
def test_the_launcher_takes_every_flag_of_torchrun_and_its_output_comes_where_torchrun_writes_it(
    jobs, tmp_path, words
):
    flag = words.partition("=")[0]
    hello = script(tmp_path, HELLO)
    what = {"--no-python": [sys.executable, hello], "--module": [hello.stem]}.get(flag, [hello])
    words = words.replace("LOGS", f"{tmp_path}/logs").replace("PORT", str(free_port())).split()
    job = jobs.start(TORCHRUN, "--nproc-per-node=2", *words, *what, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    said = job.ends_with(0)
    for rank in range(1 if flag in ("--nproc-per-node", "--local-ranks-filter") else 2):
        for line, name in ((f"out of {rank}", "stdout"), (f"err of {rank}", "stderr")):
            assert (line in said) == (flag != "--redirects"), said
            if flag in ("--redirects", "--tee"):
                (file,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/{name}.log")
                assert file.read_text() == f"{line}\n"


def test_an_edit_or_a_git_pull_under_a_running_job_changes_nothing_before_its_next_start(jobs, run, tmp_path):
    clone = copied(tmp_path)
    shutil.copy(TESTS / "paced.py", tmp_path / "mine.py")
    flags = ["--model=mine.py:net", "--dataset=mine.py:data", *PACED[2:], "--run-dir", run, "--epochs=999"]
    words = [clone / "launch/torchrun.py", "--nproc_per_node=2", clone / "train_ddp.py", *flags]
    job = jobs.start(*words, cwd=tmp_path)
    pids = wait_for(run, 3, 0, job)["pids"]
    for name in ("launch/torchrun.py", "launch/worker.py", "launch/agent.py", "train_ddp.py", "mine.py"):
        (clone / name).write_text("raise ImportError('of another commit')\n")
    jobs.kill(pids[1])
    wait_for(run, 8, 1, job)
    assert "another commit" not in asked_to_stop(job, run)
    assert audit(run) == CLEAN
