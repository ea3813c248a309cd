"""The documents the project came from: what they promise happens here, with their numbers."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MNIST = Path(os.environ.get("MNIST_DIR", ROOT.parent / "shared" / "data"))


def script(name, *arguments, launcher=()):
    done = subprocess.run([*(launcher or [sys.executable]), name, *map(str, arguments), "--no-tensorboard"],
                          cwd=ROOT, text=True,
                          capture_output=True, timeout=300, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(count):
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}"]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_000_the_lstm_learns_the_two_sentences_under_data_parallel_in_ten_epochs(tmp_path):
    out = script("train_dp.py", "--model", "lstm", "--dataset", "sentiment", "--epochs", 10, "--log-every", 1,
                 "--optimizer", "adam", "--lr", 0.001, "--run-dir", tmp_path, "--devices", "cpu,cpu")
    losses = [m["loss"] for m in metrics(tmp_path) if "loss" in m]
    assert len(losses) == 10 and 0.6 < losses[0] < 0.8 and losses[-1] < 0.5 and losses == sorted(losses,
                                                                                                 reverse=True)
    assert "predictions [1 0]  labels [1 0]" in out


@pytest.mark.skipif(not (MNIST / "MNIST/raw/train-images-idx3-ubyte").exists(), reason="no MNIST files")
def test_001_and_002_the_mnist_net_on_two_processes_passes_97_percent_in_two_epochs(tmp_path):
    script("train_ddp.py", "--dataset", "mnist", "--data-dir", MNIST, "--epochs", 2, "--run-dir", tmp_path,
           launcher=torchrun(2))
    assert metrics(tmp_path)[-1]["val_acc"] > 0.97


@pytest.mark.parametrize("name", ["train_dp.py", "train_mp.py"])
def test_002_the_same_net_trains_over_two_devices_of_one_process(tmp_path, name):
    out = script(name, "--devices", "cpu,cpu", "--epochs", 1, "--run-dir", tmp_path, "--optimizer", "sgd",
                 "--lr", 0.05,
                 "--momentum", 0.5, "--max-steps", 120)
    found = metrics(tmp_path)
    assert found[0]["loss"] > 2.0 and found[-1]["val_acc"] > 0.5
    if name == "train_mp.py":
        assert all(re.search(rf"^ +{i}  cpu +{name} ", out, re.M) for i,
                   name in enumerate(("block1", "block2", "fc1", "fc2")))


def test_003_the_small_perceptron_trains_in_two_processes_with_a_hand_set_environment(tmp_path):
    env = dict(os.environ, OMP_NUM_THREADS="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
               MASTER_PORT=str(free_port()))
    command = [sys.executable, "train_ddp.py", "--model", "mlp", "--dataset", "random:200x10", "--epochs",
               "2", "--log-every", "1",
               "--run-dir", str(tmp_path), "--no-tensorboard", "--optimizer", "sgd", "--momentum", "0",
               "--lr", "0.001"]
    ranks = [subprocess.Popen(command, cwd=ROOT, env=dict(env, RANK=str(rank)), stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
             for rank in range(2)]
    outs = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outs
    assert "world 2 (gloo)" in outs[0] and "model mlp: 67 parameters" in outs[0]  # 10*5 + 5 + 5*2 + 2
    assert outs[1] == ""
    assert [m["step"] for m in metrics(tmp_path) if "loss" in m] == list(range(1, 9))  # 4 steps an epoch


@pytest.mark.parametrize(("devices", "inside"),
                         [("cpu", [30, 30, 30, 10]), ("cpu,cpu", [15, 15] * 3 + [5, 5])])
def test_004_the_random_batches_are_scattered_as_in_the_tutorial(tmp_path, devices, inside):
    out = script("train_dp.py", "--dataset", "random", "--model", "mlp", "--epochs", 1, "--global-batch-size",
                 30,
                 "--run-dir", tmp_path,
                 "--devices", devices, "--show-scatter")
    lines = [line.split() for line in out.splitlines()]
    sizes = [int(words[4].strip("(,")) for words in lines if words[:2] == ["In", "Model:"]]
    outside = [int(words[3].strip("(,")) for words in lines if words[:1] == ["Outside:"]]
    assert sizes[:len(inside)] == inside
    assert outside[:4] == [30, 30, 30, 10]


def free_port():
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
