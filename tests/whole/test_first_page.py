"""The first screen of README, typed as it stands, in a clone that has made nothing yet."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT, wait_for

README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN = "runs/net-digits"


def block(heading, language):
    part = README.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    return dict(blocks)[language].splitlines()


def shape(line):
    return re.sub(r"[\d,]*\d", "N", re.sub(r", after .*", "", line))


@pytest.fixture
def clone(tmp_path):
    for name in ("common", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train_ddp.py", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_first_screen_is_typed_in_two_terminals_and_prints_what_it_shows(clone):
    if not Path(sys.prefix, "bin/python").exists():
        pytest.skip("the tests run in no environment")
    env = {name: value for name, value in os.environ.items() if name != "CONDA_PREFIX"}
    env |= {"VIRTUAL_ENV": sys.prefix, "PIP_NO_INDEX": "1", "CUDA_VISIBLE_DEVICES": ""}

    def typed(line):
        return subprocess.run(
            ["bash", "-c", line], cwd=clone, env=env, text=True, capture_output=True, timeout=300
        )

    commands = [line for line in block("Watch it survive", "sh") if not line.startswith("#")]
    assert commands[0].count("--epochs 20") == commands[2].count("--epochs 20") == 1
    first, kill, again, audit = (line.replace("--epochs 20", "--epochs 4") for line in commands)
    with subprocess.Popen(
        ["bash", "-c", first],
        cwd=clone,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as terminal:
        wait_for(clone / RUN, 20)
        done = typed(kill)
        assert (done.returncode, done.stderr) == (0, "")
        wait_for(clone / RUN, 40, life=1)
        os.killpg(terminal.pid, signal.SIGINT)  # Ctrl-C
        printed = terminal.stdout.read()
    assert terminal.returncode == 143, printed
    done = typed(again)
    printed += done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in printed, printed
    done = typed(audit)
    printed += done.stdout
    assert done.returncode == 0 and done.stdout.strip() == block("Watch it survive", "")[-1]
    assert {shape(line) for line in block("Watch it survive", "")} <= {
        shape(line) for line in printed.splitlines()
    }
    assert typed(kill).returncode != 0  # nothing has that number any more
    page = re.search(r"`(launch/local\.sh -m .* --html run\.html)`", README)[1]
    assert typed(page).returncode == 0 and (clone / "run.html").stat().st_size > 10_000
    assert (ROOT / ".github/run.png").stat().st_size <= 100_000
