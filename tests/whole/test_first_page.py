"""The first screen of README, typed as it stands, in a clone that has made nothing yet."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from jobs import ROOT, wait_for
from test_readme import README, fenced

RUN = "runs/net-digits"


def block(language):
    part = README.partition("\n## Watch it survive")[2].partition("\n## ")[0]
    return fenced(part, language)[-1].splitlines()


def shape(line):
    return re.sub(r"[\d,]*\d", "N", re.sub(r", after .*", "", line))


def copied(folder):
    """What of the checkout a training needs, in this folder."""
    for name in ("common", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train_ddp.py", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_the_first_screen_is_typed_in_two_terminals_and_prints_what_it_shows(jobs, tmp_path, monkeypatch):
    if not Path(sys.prefix, "bin/python").exists():
        pytest.skip("the tests run in no environment")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    clone = copied(tmp_path)
    env = {"VIRTUAL_ENV": sys.prefix, "PIP_NO_INDEX": "1", "CUDA_VISIBLE_DEVICES": ""}

    def typed(line):
        return jobs.start("-c", line, cold=True, program="bash", cwd=clone, **env)

    commands = [line for line in block("sh") if not line.startswith("#")]
    assert commands[0].count("--epochs 20") == commands[2].count("--epochs 20") == 1
    first, kill, again, audit = (line.replace("--epochs 20", "--epochs 4") for line in commands)
    terminal = typed(first)
    wait_for(clone / RUN, 20, job=terminal)
    assert typed(kill).ends_with(0) == ""
    wait_for(clone / RUN, 40, life=1, job=terminal)
    os.killpg(terminal.pid, signal.SIGINT)  # Ctrl-C
    printed = terminal.ends_with(143) + typed(again).ends_with(0)
    assert "Traceback" not in printed, printed
    said = typed(audit).ends_with(0)
    assert said.strip() == block("")[-1]
    assert {shape(line) for line in block("")} <= {shape(line) for line in (printed + said).splitlines()}
    assert typed(kill).wait() != 0  # nothing has that number any more
    page = re.search(r"`(launch/local\.sh -m .* --html run\.html)`", README)[1]
    typed(page).ends_with(0)
    assert (clone / "run.html").stat().st_size > 10_000
