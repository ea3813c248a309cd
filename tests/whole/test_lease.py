"""The one command for a lent GPU, as far as a CPU can run it."""

import json
import sys

import pytest
from jobs import ROOT, ran

ALL = "tests bench pictures saves compile".split()


@pytest.mark.parametrize("parts", [["saves"], pytest.param([], marks=pytest.mark.long)])
def test_without_a_gpu_the_command_runs_dry(tmp_path, parts):
    words = (ROOT / "tests/gpu/lease.sh", tmp_path / "out", *parts)
    done = ran("bash", *words, timeout=570, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out/figures.json").read_text())
    assert {part["part"]: part["outcome"] for part in found["parts"]} == dict.fromkeys(
        ["facts", *(parts or ALL)], "passed"
    ), done.stdout
    assert [row["way"] for row in found["parts"][-1]["figures"]][-1:] == ["torch.save" if parts else "bare"]
