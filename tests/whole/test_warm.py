"""launch/torchrun.py on one machine: restarts without imports, exit codes passed on; and the breaker of runs
that come to nothing.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time

import pytest
from jobs import (
    CLEAN,
    PACED,
    ROOT,
    TESTS,
    audit,
    children,
    command,
    events,
    free_port,
    lives,
    until,
    wait_for,
)
from torch.distributed.run import get_args_parser

from common.extras.report import summarize
from common.place import start_of

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


def test_a_killed_worker_is_replaced_at_once_and_nothing_is_lost(jobs, run):
    job = warm(jobs, *PACED, "--run-dir", run, "--epochs=999")  # it must not end before the last kill
    killed = []
    deaths = []
    for life in range(3):
        pid = wait_for(run, 2 + 4 * life, life, job)["pids"][life % 2]
        assert pid in children(fork_server(job))  # a process of its own would import torch for seconds
        assert jobs.kill(pid)
        killed.append(time.time())
        deaths.append(f"rank {life % 2} (pid {pid}) was killed by SIGKILL")
    wait_for(run, 14, 3, job)
    (run / "control/stop").touch()
    job.ends_with(143)
    assert all(f"{death}; step" in job.output for death in deaths), job.output
    assert "torchrun:" not in job.output and "is gone" not in job.output  # a survivor knows how
    assert audit(run) == CLEAN
    assert [life["restart"] for life in lives(run)] == [0, 1, 2, 3]
    # And the ledger knows where the time went: the parts of a restart add up to what was seen from outside.
    buckets = [life["buckets"] for life in summarize(run)["lives"]]
    first_steps = events(run, "first_step")[1:]
    for before, after, moment, first in zip(buckets[:-1], buckets[1:], killed, first_steps, strict=True):
        seconds = first["t"] - moment
        assert abs(before["rescue"] + after["down"] + after["start"] - seconds) < max(0.5, 0.5 * seconds)


def test_a_killed_fork_server_is_replaced_too(jobs, run):
    job = warm(jobs, *PACED, "--run-dir", run, PACE="0.02")
    wait_for(run, 3, 0, job)
    assert jobs.kill(fork_server(job))
    job.ends_with(0)
    assert audit(run) == CLEAN


def test_sigterm_sigint_sigusr1_or_sighup_leaves_143_and_the_same_command_goes_on_to_0(jobs, run):
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1] + [signal.SIGHUP] * (not NOHUP)
    for life, number in enumerate(numbers):
        job = warm(jobs, *PACED, "--run-dir", run)
        wait_for(run, 3 + 4 * life, life, job)
        job.kill(number)
        job.ends_with(143)
    warm(jobs, *PACED, "--run-dir", run, nproc=3).ends_with(0)
    assert audit(run) == CLEAN
    assert [life["world"] for life in lives(run)] == [2] * len(numbers) + [3]


def test_ctrl_c_that_the_launcher_is_not_to_handle_ends_it_as_any_program_and_all_is_saved(jobs, run):
    words = ["--nproc_per_node=2", "--signals-to-handle=SIGTERM", ROOT / "train_ddp.py"]
    job = jobs.start(TORCHRUN, *words, *PACED, "--run-dir", run)
    wait_for(run, 3, 0, job)
    job.kill(signal.SIGINT)
    said = job.ends_with(130)
    assert "stopped on SIGTERM: step" in said and audit(run) == CLEAN, said
    assert not any(map(start_of, lives(run)[0]["pids"]))


def test_a_stop_before_the_first_step_leaves_143_too(jobs, run):
    job = warm(jobs, *PACED, "--run-dir", run)
    until(lambda: any(map(children, children(job.pid))), "a worker")
    job.kill(signal.SIGTERM)
    job.ends_with(143)


@pytest.mark.skipif(NOHUP, reason="a hang-up is ignored")
def test_a_terminal_that_closes_while_the_launcher_imports_leaves_143_and_no_folder(jobs, tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # a longer name is not taken
        job = jobs.start(TORCHRUN, ROOT / "train_ddp.py", *PACED, cold=True, TMPDIR=place)
        until(lambda: "starting" in job.output, "the launcher")
        assert any(name.startswith("torchelastic_") for name in os.listdir(place))
        job.kill(signal.SIGHUP)
        job.ends_with(143)
        assert not any(name.startswith("torchelastic_") for name in os.listdir(place))


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_is_woken_for_the_stop_and_not_waited_for(jobs, run, rank):
    job = warm(jobs, *PACED, "--run-dir", run, PACE="0.02")
    assert jobs.kill(wait_for(run, 3, 0, job)["pids"][rank], signal.SIGSTOP)
    job.kill(signal.SIGTERM)
    job.ends_with(143)
    warm(jobs, *PACED, "--run-dir", run).ends_with(0)
    assert audit(run) == CLEAN


def test_who_does_not_end_is_killed_after_the_time_for_a_save_and_has_not_saved(jobs, tmp_path):
    deaf = [script(tmp_path, DEAF), tmp_path / "begun", tmp_path / "saved"]
    job = jobs.start(TORCHRUN, *deaf, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    until((tmp_path / "begun").exists, "the script")
    job.kill(signal.SIGTERM)
    job.ends_with(1)


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


@pytest.mark.parametrize(
    "text, code, method",
    [
        ("import os; os._exit(0)", 0, "forkserver"),
        ("import sys; sys.exit(3)", 3, "forkserver"),
        ("raise OSError(5, 'disk')", 1, "forkserver"),
        ("import os; os.kill(os.getpid(), 9)", 1, "forkserver"),
        ("import sys; sys.exit(3)", 3, "spawn"),
    ],
)
def test_a_script_of_any_kind_ends_the_job_with_its_own_code(jobs, tmp_path, text, code, method):
    one_fails = script(tmp_path, f"import os\nif os.environ['RANK'] == '0':\n    {text}\n")
    job = jobs.start(TORCHRUN, "--nproc_per=2", "--max_restarts=0", f"--start_method={method}", one_fails)
    said = job.ends_with(code)
    assert ("no restart is left" in said) == (code == 1)


def test_a_mistake_in_a_script_of_ones_own_is_told_and_not_tried_again(jobs, tmp_path):
    mistaken = script(tmp_path, "import torch\ntorch.manual_seeed(0)\n")
    said = jobs.start(TORCHRUN, "--nproc_per_node=2", mistaken).ends_with(2)
    assert said.count("manual_seeed'") in (1, 2), said  # the second rank waits for the agent
    assert "script.py, line 2: torch.manual_seeed(0)" in said and "Traceback" not in said


def test_a_rank_that_loses_another_one_as_they_meet_says_so_in_a_line(jobs, tmp_path):
    meets = script(
        tmp_path,
        "import os, signal, torch.distributed as dist\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent's\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['RANK'] == '1':\n"
        "    os._exit(1)\n"
        "dist.barrier()\n",
    )
    said = jobs.start(TORCHRUN, "--nproc_per_node=2", "--max_restarts=0", meets).ends_with(1)
    assert "rank 0: another one has gone (" in said and "Traceback" not in said, said


def test_a_script_beside_a_package_named_common_finds_ours_and_the_modules_beside_it(jobs, tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").touch()
    (tmp_path / "own_losses.py").touch()
    imports = script(tmp_path, "import own_losses\nfrom common.elastic import Elastic\n")
    jobs.start(TORCHRUN, "--max_restarts=0", imports, cold=True, cwd=tmp_path).ends_with(0)


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
    word = said[said.index("error: no progress") :]
    assert "the first error: " in word and said.count("error: no progress") == 1
    samples = re.search(r"its samples: ([\d, ]+)", word)[1].split(", ")
    assert "37" in samples and len(samples) == 20
    step = int(re.search(r"on step (\d+)", word)[1])
    starts = [life["step"] for life in lives(run)]
    assert starts == [0] + [step - 1] * 3 if step > 1 else starts == [0] * 3
    warm(jobs, *flags).ends_with(5)  # somebody says it is mended: it is tried, and said once more
    assert len(lives(run)) == len(starts) + 3


@pytest.mark.parametrize("agent", ["ours", "torchrun"])
def test_lives_that_end_before_they_can_train_end_with_5(jobs, tmp_path, agent):
    """As where there is too little memory to build the net."""
    (tmp_path / "net.py").write_text("import os\ndef killed(data):\n    os.kill(os.getpid(), 9)\n")
    flags = ("--dataset", "random", "--model", tmp_path / "net.py:killed")
    job = (
        warm(jobs, *flags, nproc=1)
        if agent == "ours"
        else jobs.torchrun(2, "train_ddp.py", *flags, restarts=5)
    )
    said = job.ends_with(5 if agent == "ours" else 1)  # torchrun turns every code into 1
    assert said.count("lives in a row ended before they could train") == 1, said


def test_a_script_that_ends_at_once_ends_the_job_after_three_lives_with_its_first_error_told(jobs, tmp_path):
    """By itself the agent would start it a million times, ten times a second."""
    early = script(tmp_path, "raise ConnectionError('no tracking server')\n")
    said = jobs.start(TORCHRUN, early).ends_with(1)
    assert said.count("ConnectionError: no tracking server") == 3
    assert "3 lives in a row ended at once; their errors are above" in said


# {a flag of torchrun: words with it}; LOGS stands for a folder, PORT for a port
FLAGS = {
    "--nnodes": "--nnodes=1:1",
    "--nproc-per-node": "--nproc-per-node=1",
    "--rdzv-backend": "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1",
    "--rdzv-endpoint": "--rdzv-endpoint=localhost:PORT --rdzv-backend=c10d",
    "--rdzv-id": "--rdzv-id=job --rdzv-endpoint=127.0.0.1:0 --rdzv-backend=c10d",
    "--rdzv-conf": "--rdzv-conf=last_call_timeout=2",
    "--standalone": "--standalone",
    "--max-restarts": "--max-restarts=0",
    "--monitor-interval": "--monitor-interval=0.1",
    "--start-method": "--start-method=fork",
    "--event-log-handler": "--event-log-handler=null",
    "--role": "--role=trainer",
    "--module": "--module",
    "--no-python": "--no-python",
    "--run-path": "--run-path",
    "--log-dir": "--log-dir=LOGS",
    "--redirects": "--redirects=3 --log-dir=LOGS",
    "--tee": "--tee=3 --log-dir=LOGS",
    "--log-line-prefix-template": "--log-line-prefix-template=${rank}: --tee=3",
    "--local-ranks-filter": "--local-ranks-filter=0 --tee=3",
    "--duplicate-stdout-filters": "--duplicate-stdout-filters=out --tee=3 --log-dir=LOGS",
    "--duplicate-stderr-filters": "--duplicate-stderr-filters=err --tee=3 --log-dir=LOGS",
    "--node-rank": "--node-rank=0",
    "--master-addr": "--master-addr=127.0.0.1",
    "--master-port": "--master-port=PORT",
    "--local-addr": "--local-addr=127.0.0.1",
    "--signals-to-handle": "--signals-to-handle=SIGTERM",
    "--shutdown-timeout": "--shutdown-timeout=5",
}
NOT_HERE = {
    "--help",
    "--logs-specs",
    "--numa-binding",
    "--print-completion",
    "--virtual-local-rank",
}  # GPUs, packages
HELLO = """
import os, sys
os.write(1, f"out of {os.environ['RANK']}\\n".encode())
os.write(2, f"err of {os.environ['RANK']}\\n".encode())
"""


@pytest.mark.parametrize("flag", FLAGS)
def test_the_launcher_takes_every_flag_of_torchrun_and_its_output_comes_where_torchrun_writes_it(
    jobs, tmp_path, flag
):
    hello = script(tmp_path, HELLO)
    words = FLAGS[flag].replace("LOGS", f"{tmp_path}/logs").replace("PORT", str(free_port())).split()
    what = {"--no-python": [sys.executable, hello], "--module": [hello.stem]}.get(flag, [hello])
    said = jobs.start(TORCHRUN, "--nproc-per-node=2", *words, *what, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    said = said.ends_with(0)
    ranks = range(1 if flag in ("--nproc-per-node", "--local-ranks-filter") else 2)
    for rank in ranks:
        for line, name in ((f"out of {rank}", "stdout"), (f"err of {rank}", "stderr")):
            assert (line in said) == (flag != "--redirects"), said
            if flag in ("--redirects", "--tee"):
                (file,) = (tmp_path / "logs").glob(f"*/attempt_0/{rank}/{name}.log")
                assert file.read_text() == f"{line}\n"


def test_each_flag_of_torchrun_has_its_row():
    known = {action.option_strings[0] for action in get_args_parser()._actions if action.option_strings}
    short = {"-h": "--help", "-m": "--module", "-r": "--redirects", "-t": "--tee"}
    assert {short.get(name, name) for name in known} - NOT_HERE <= {*FLAGS}


EDITED = """
import pathlib
from torch import nn
NAME = "ACTIVATION"
def net(data):
    path = pathlib.Path(__file__).parent / "made"
    path.open("a").write(f"{NAME}\\n")
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
"""


def copy_of_the_checkout(folder):
    for name in ("common", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train_ddp.py", folder)
    return folder


def test_an_edit_or_a_git_pull_under_a_running_job_changes_nothing_before_its_next_start(jobs, run, tmp_path):
    clone = copy_of_the_checkout(tmp_path)
    (tmp_path / "mine.py").write_text(EDITED.replace("ACTIVATION", "before"))
    flags = [*PACED[1:], f"--model={tmp_path}/mine.py:net", "--run-dir", run, "--epochs=999"]
    job = jobs.start(
        clone / "launch/torchrun.py", "--nproc_per_node=2", clone / "train_ddp.py", *flags, PACE="0.02"
    )
    pids = wait_for(run, 3, 0, job)["pids"]
    (tmp_path / "mine.py").write_text(EDITED.replace("ACTIVATION", "after"))
    for name in ("launch/torchrun.py", "launch/worker.py", "launch/agent.py", "train_ddp.py"):
        (clone / name).write_text("raise ImportError('of another commit')\n")
    jobs.kill(pids[1])
    wait_for(run, 8, 1, job)
    (run / "control/stop").touch()
    said = job.ends_with(143)
    assert "another commit" not in said and {*(tmp_path / "made").read_text().split()} == {"before"}
    assert audit(run) == CLEAN


def test_a_script_of_ones_own_is_read_once_too(jobs, tmp_path):
    once = script(
        tmp_path,
        "import os, pathlib\n"
        "here = pathlib.Path(__file__)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    here.write_text('raise SystemExit(3)')\n"
        "    os.kill(os.getpid(), 9)\n",
    )
    jobs.start(TORCHRUN, once).ends_with(0)
