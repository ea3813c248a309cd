"""The checks for GPUs, as far as CPUs can run them: a check that nobody runs is wrong when it is needed."""
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def checks(gpus, *chosen):
    return subprocess.run([sys.executable, "-m", "pytest", *chosen], cwd=ROOT, capture_output=True, text=True,
                          timeout=300, env=dict(os.environ, TESTS_GPUS=gpus))


def test_without_a_gpu_all_checks_are_found_and_skipped():
    done = checks("", "tests/gpu")
    assert done.returncode in (0, 5) and not {"passed", "error"} & set(done.stdout.split()), done.stdout
    assert int(done.stdout.split(" skipped")[0].split()[-1]) > 20


def test_with_cpus_for_gpus_a_check_of_each_kind_passes():
    done = checks("fake", "tests/gpu/test_one_gpu.py", "tests/gpu/test_more_gpus.py", "-k",
                  "averages or flags1 and of_the_whole_net or stands_still")
    assert done.returncode == 0 and "passed" in done.stdout and "skipped" not in done.stdout, done.stdout


def test_the_bench_of_a_gpu_measures_all_it_promises(tmp_path):
    done = subprocess.run([sys.executable, "tests/bench/gpu.py", "--device", "cpu", "--tiny", "--json",
                           tmp_path / "found.json"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["net"] for row in found["steps"]] == ["resnet50", "gpt:medium", "net"]
    assert all(row["ours_ms"] > 0 < row["bare_ms"] for row in found["steps"])
    assert found["save"]["save_ms"] > 0
