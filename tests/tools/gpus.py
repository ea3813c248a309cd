"""GPUs for the children of a test.

    pytestmark = needs(2)                           # skipped where fewer are visible
    train(jobs, run, "train_ddp.py", ...)           # a script to its end; its output
    TESTS_GPUS=fake                                 # the same tests with CPUs for GPUs, where they can run

pytest's own process sees none, because its forks could not use them.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, events, until

CHECKS = ROOT / "tests/gpu/checks.py"
SMALL = ("--epochs=1", "--max-steps=40")
TEXT = ("--model=gpt", "--dataset=text:64", f"--data-dir={ROOT / 'README.md'}")
ASK = (
    "import json, torch; n = torch.cuda.device_count(); "
    "print(json.dumps([n, list(torch.cuda.nccl.version()) if n else []]))"
)


def fake():
    return os.environ["TESTS_GPUS"] == "fake"


@functools.cache
def seen():
    """(number of GPUs, NCCL's version)."""
    if not Path("/dev/nvidiactl").exists() and not shutil.which("nvidia-smi"):
        return 0, []
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if os.environ["TESTS_GPUS"] != "all":
        env["CUDA_VISIBLE_DEVICES"] = os.environ["TESTS_GPUS"]
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else (0, [])


def needs(count):
    here = 8 if fake() else seen()[0]
    return pytest.mark.skipif(here < count, reason=f"needs {count} GPUs, {here} are visible")


def visible(count=None):
    """What CUDA_VISIBLE_DEVICES is for a child: the first `count` of them."""
    chosen = os.environ["TESTS_GPUS"]
    if chosen == "fake":
        return ""
    numbers = map(str, range(seen()[0])) if chosen == "all" else chosen.split(",")
    return ",".join([*numbers][:count])


def devices(*numbers):
    return "--devices=" + ",".join("cpu" if fake() else f"cuda:{n}" for n in numbers)


def begin(jobs, script, *flags, world=0, gpus=None, **env):
    """A script, or "-m" and a module, as a process; under the launcher if `world` says how many."""
    launcher = [ROOT / "launch/torchrun.py", f"--nproc_per_node={world}", "--max_restarts=5"] if world else []
    script = script if script == "-m" else ROOT / script
    return jobs.start(
        *launcher,
        script,
        *flags,
        cold=not fake(),
        CUDA_VISIBLE_DEVICES=visible(gpus),
        PYTHONPATH=str(ROOT),
        **env,
    )


def end(job, code=0):
    assert job.wait(600) == code, job.output
    return job.output


def train(jobs, run, script, *flags, code=0, check=(), **how):
    """A script, or a function of gpu/checks.py that trains, to its end."""
    return end(begin(jobs, script, *check, f"--run-dir={run}", "--no-tensorboard", *flags, **how), code)


def pids(run, life=0):
    """Of its ranks, once one of them has made a step."""
    until(lambda: len(events(run, "first_step")) > life, f"life {life}")
    return events(run, "life")[life]["pids"]
