"""launch/torchrun.py on one machine: restarts without imports, exit codes passed on; and the breaker of runs
that come to nothing.
"""
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from jobs import PACED, ROOT, TESTS, audit, children, events, lives, until, wait_for

from common.errors import UserError
from common.ledger import Ledger, summarize
from common.options import environment

TORCHRUN = ROOT / "launch" / "torchrun.py"


def warm(jobs, *arguments, nproc=2, **env):
    return jobs.start(TORCHRUN, f"--nproc_per_node={nproc}", ROOT / "train_ddp.py", *arguments, **env)


def test_a_killed_worker_is_replaced_at_once_and_nothing_is_lost(jobs, tmp_path):
    run = tmp_path / "run"
    job, killed, deaths = warm(jobs, *PACED, "--run-dir", run), [], []
    for life in range(3):
        pid = wait_for(run, 2 + 4 * life, life, job)["pids"][life % 2]
        assert jobs.kill(pid)
        killed.append(time.time())
        deaths.append(f"torchrun: rank {life % 2} (pid {pid}) was killed by SIGKILL, starting again")
    assert job.wait() == 0, job.output
    assert all(death in job.output for death in deaths), job.output
    assert audit(run) == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
    assert [life["restart"] for life in lives(run)] == [0, 1, 2, 3]
    assert all(life["import_s"] < 1.0 for life in lives(run)[1:])  # a cold worker imports torch for seconds
    # And the ledger knows where the time went: the parts of a restart add up to what was seen from outside.
    first_steps, gaps = events(run, "first_step")[1:], [life["gap"] for life in summarize(run)["lives"][1:]]
    for parts, moment, first in zip(gaps, killed, first_steps, strict=True):
        assert {"rescue", "start", "import", "rendezvous", "load", "restore"} <= set(parts) | {"detection"}
        assert abs(sum(parts.values()) - (first["t"] - moment)) < 0.5


NOHUP = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN           # these tests run under nohup


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, pytest.param(
    signal.SIGHUP, marks=pytest.mark.skipif(NOHUP, reason="nohup"))])
def test_a_stop_on_request_leaves_143_and_the_same_command_goes_on_to_0(jobs, tmp_path, number):
    run = tmp_path / "run"
    job = warm(jobs, *PACED, "--run-dir", run)
    wait_for(run, 3, 0, job)
    job.kill(number)
    assert job.wait() == 143, job.output
    again = warm(jobs, *PACED, "--run-dir", run, nproc=3)
    assert again.wait() == 0, again.output
    assert audit(run) == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}
    assert [life["world"] for life in lives(run)] == [2, 3]


def test_a_stop_before_the_first_step_leaves_143_too(jobs, tmp_path):
    job = warm(jobs, *PACED, "--run-dir", tmp_path / "run")
    until(lambda: len(children(job.pid)) > 1, "a worker")
    job.kill(signal.SIGTERM)
    assert job.wait() == 143, job.output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_worker_is_woken_for_the_stop_and_not_waited_for(jobs, tmp_path, rank):
    """The agent's patience is 30 s."""
    job = warm(jobs, *PACED, "--run-dir", tmp_path / "run", PACE="0.02")
    assert jobs.kill(wait_for(tmp_path / "run", 3, 0, job)["pids"][rank], signal.SIGSTOP)
    job.kill(signal.SIGTERM)
    assert job.wait(20) == 143, job.output
    assert warm(jobs, *PACED, "--run-dir", tmp_path / "run").wait() == 0
    assert audit(tmp_path / "run") == {"missed": 0, "repeated": 0, "lost": 0, "redone": 0}


def test_workers_die_with_a_killed_warm_agent(jobs, tmp_path):
    run = tmp_path / "run"
    job = warm(jobs, *PACED, "--run-dir", run)
    wait_for(run, 3, 0, job)
    workers = children(job.pid)
    assert len(workers) == 4  # with the agent, and what prints
    job.kill()
    until(lambda: not set(workers) & set(jobs.alive()), "the workers' end", 10)


def test_a_shell_without_settings_is_told_nothing_of_threads(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "OPENBLAS_"))}
    done = subprocess.run([sys.executable, TORCHRUN, "--nproc_per_node=1", "--max_restarts=0",
                           ROOT / "train_ddp.py", "--model", "resnet999", "--no-tensorboard",
                           "--run-dir", tmp_path],
                           capture_output=True, text=True,
                          timeout=120, env=env)
    assert done.returncode == 2 and "resnet999" in done.stderr and "threads" not in done.stderr


def test_a_wrong_flag_is_said_once_by_the_agent_with_exit_code_2():
    done = subprocess.run([sys.executable, TORCHRUN, "--nproc_per_node=2", ROOT / "train_ddp.py",
                           "--learning-rate", "1"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.count("error:") == 1 and len(done.stderr.splitlines()) <= 3


def test_three_lives_on_one_step_end_with_5_the_samples_and_the_first_error(jobs, tmp_path):
    run = tmp_path / "run"
    flags = ("--model", "mlp", "--dataset", f"{TESTS}/poisoned.py:data", "--workers", "0", "--no-tensorboard",
             "--run-dir", run,
             "--global-batch-size", "20")
    job = warm(jobs, *flags)
    assert job.wait() == 5, job.output
    word = job.output[job.output.index("error: no progress"):]
    assert "OSError: sample 37 cannot be read" in word and job.output.count("error: no progress") == 1
    samples = re.search(r"its samples: ([\d, ]+)", word)[1].split(", ")
    assert "37" in samples and len(samples) == 20
    step = int(re.search(r"on step (\d+)", word)[1])
    starts = [life["step"] for life in lives(run)]
    assert starts == [0] + [step - 1] * 3 if step > 1 else starts == [0] * 3
    assert {e["why"] for e in events(run, "error")} == {"OSError: sample 37 cannot be read"}
    again = warm(jobs, *flags)  # somebody says it is mended: it is tried, and said once more
    assert again.wait() == 5 and len(lives(run)) == len(starts) + 3, again.output


def test_the_cause_of_an_end_is_not_what_another_rank_saw_of_it(tmp_path):
    closed = "RuntimeError: Gloo connectFullMesh failed with Connection closed by peer [::1]"
    for rank, words in enumerate((closed, "DistNetworkError: Connection reset", "OSError: no such\n disk")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "error.json").write_text(json.dumps({"message": {"message": words}}))
    assert environment._why_it_ended(tmp_path) == "the last error: OSError: no such disk"
    (tmp_path / "2" / "error.json").unlink()
    assert environment._why_it_ended(tmp_path) == "no error was noted (killed? out of memory?)"


@pytest.mark.parametrize("agent", ["ours", "torchrun"])
def test_lives_that_end_before_they_can_train_end_with_5(jobs, tmp_path, agent):
    """Nothing of them is in the ledger, as where there is too little memory to build the net."""
    (tmp_path / "net.py").write_text("import os\ndef killed(data):\n    os.kill(os.getpid(), 9)\n")
    flags = ("--dataset", "random", "--model", tmp_path / "net.py:killed")
    job = warm(jobs, *flags, nproc=1) if agent == "ours" else jobs.torchrun(2, "train_ddp.py", *flags,
                                                                            restarts=5)
    assert job.wait() == (5 if agent == "ours" else 1), job.output  # torchrun turns every code into 1
    said = ("error: 5 lives in a row ended before they could train; no error was noted (killed? out of "
            "memory?)")
    assert job.output.count(said) == 1, job.output


def test_a_life_that_was_open_ends_the_count_of_those_before_and_the_cause_is_told(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(environment.time, "sleep", pauses.append)
    for life in range(15):
        folder = tmp_path / f"attempt_{life}" / "0"
        folder.mkdir(parents=True)
        environ = {"TORCHELASTIC_RESTART_COUNT": str(life), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                   "TORCHELASTIC_ERROR_FILE": f"{folder}/error.json"}
        if life == 14:
            with pytest.raises(UserError,
                               match="5 lives in a row .* the last error: OSError: no such disk") as refused:
                environment.begin_life(environ)
            assert refused.value.code == 5
            break
        environment.begin_life(environ)
        (folder / "error.json").write_text('{"message": {"message": "OSError: no such disk"}}')
        if life in (4, 8):
            environment.life_is_open(environ)
            assert pauses == ([0.5, 1, 2] if life == 4 else [0.5, 1, 2, 0.5, 1])


@pytest.mark.parametrize("end, data, counts",
                         [("stop", "old", False), ("error", "old", True), ("error", "new", False)])
def test_lives_that_were_told_to_stop_or_had_other_data_do_not_count_as_failures(tmp_path, end, data, counts):
    from types import SimpleNamespace

    from common.rescue.life import refuse_without_progress
    lines = []
    for k in range(5):
        lines += [{"t": k, "event": "life", "life": str(k), "world": 1, "step": 7, "data": "old"},
                  {"t": k, "event": end, "step": 7, "why": "that"}]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    opts = SimpleNamespace(run_dir=tmp_path, global_batch_size=4, seed=0)
    state = SimpleNamespace(step=7, epoch=0, position=28, finished=False)
    with pytest.raises(UserError, match="5 lives on step 8") if counts else contextlib.nullcontext():
        refuse_without_progress(Ledger(tmp_path), opts, SimpleNamespace(train=range(50), fingerprint=data),
                                state)
