"""The one command for a lent GPU, as far as a CPU can run it."""

import json
import sys

import pytest
from jobs import ROOT, ran
from lease import TESTS, Lease, Part

SLEEP = '__import__("time").sleep(99)'
CHILD = '__import__("subprocess").Popen(["sleep","98"],start_new_session=True)'


SIZE = r"size:(?P<size>\d)"
ALL = "locks tests bench pictures saves compile loops".split()


def test_a_part_that_fails_is_late_or_shows_no_figure_stops_no_other(tmp_path):
    rows = [  # name, what it runs, seconds, pattern of its figures, needs, what is said of it
        ("facts", 'print("card:X");print("missing:numpy")', 60, r"(?P<name>\w+):(?P<value>.+)", "", "passed"),
        ("bad", 'print("size:1");raise(KeyError("why"))', 60, SIZE, "", "failed, code 1"),
        ("tested", 'print("=","5","passed,","7","skipped","in","1s","=")', 60, TESTS, "", "passed"),
        ("without", "print(3)", 60, SIZE, "numpy", "skipped: numpy not there"),
        ("late", f'print("size:2");{CHILD};{SLEEP}', 1, SIZE, "", "late"),
        ("good", 'print("size:4")', 60, SIZE, "", "passed"),
    ]
    lease = Lease(tmp_path)
    for name, code, seconds, figure, needs, _ in rows:
        lease.run(Part(name, seconds, figure, f"-c {code}", f"-c {code}", needs))
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [part["outcome"] for part in found["parts"]] == [row[-1] for row in rows]
    assert found["card"] == "X" and found["parts"][-1]["figures"] == [{"size": 4}]
    assert found["parts"][2]["figures"] == [{"passed": 5, "skipped": 7}]
    assert "  > KeyError: 'why'" in (tmp_path / "summary.txt").read_text()


def test_after_the_last_second_no_part_begins(tmp_path):
    lease = Lease(tmp_path, seconds=5)
    lease.run(Part("any", 60, "", "-c print(1)", "-c print(1)"))
    assert lease.done[0]["outcome"] == "skipped: no time left"


@pytest.mark.parametrize("parts", [["locks"], pytest.param([], marks=pytest.mark.long)])
def test_without_a_gpu_the_command_runs_dry(tmp_path, parts):
    words = (ROOT / "tests/gpu/lease.sh", tmp_path / "out", *parts)
    done = ran("bash", *words, timeout=570, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out/figures.json").read_text())
    assert {part["part"]: part["outcome"] for part in found["parts"]} == dict.fromkeys(
        ["facts", *(parts or ALL)], "passed"
    ), done.stdout
    assert [row["outcome"] for row in found["parts"][1]["figures"]] == ["rescued", "HANGS"], (
        "an instrument that cannot hang is none"
    )
