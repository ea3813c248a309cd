"""The documents the project came from: what they promise happens here, with their numbers."""

import os
import re
from pathlib import Path

import pytest
from jobs import ROOT, losses, rows

MNIST = Path(os.environ.get("MNIST_DIR", ROOT.parent / "shared" / "data"))


def flags(words, run):
    return [*words.split(), "--no-tensorboard", f"--run-dir={run}"]


def test_000_the_lstm_learns_the_two_sentences_under_data_parallel_in_ten_epochs(jobs, tmp_path):
    words = "--model=lstm --dataset=sentiment --epochs=10 --log-every=1 --optimizer=adam --lr=0.001"
    out = jobs.python("train_dp.py", "--devices=cpu,cpu", *flags(words, tmp_path)).ends_with(0)
    found = losses(tmp_path)
    assert len(found) == 10 and found == sorted(found, reverse=True)
    assert 0.6 < found[0] < 0.8 and found[-1] < 0.5
    assert "predictions [1 0]  labels [1 0]" in out


@pytest.mark.skipif(not (MNIST / "MNIST/raw/train-images-idx3-ubyte").exists(), reason="no MNIST files")
def test_001_and_002_the_mnist_net_on_two_processes_passes_97_percent_in_two_epochs(jobs, tmp_path):
    words = flags("--dataset=mnist --epochs=2 --max-steps=1300", tmp_path)
    jobs.torchrun(2, "train_ddp.py", f"--data-dir={MNIST}", *words).ends_with(0)
    first, second = (line["val_acc"] for line in rows(tmp_path) if "val_acc" in line)
    assert first > 0.95 and second > 0.97


@pytest.mark.parametrize("name", ["train_dp.py", "train_mp.py"])
def test_002_the_same_net_trains_over_two_devices_of_one_process_with_momentum_and_balance(
    jobs, tmp_path, name
):
    words = flags("--epochs=1 --optimizer=sgd --lr=0.05 --momentum=0.5 --max-steps=120", tmp_path)
    balance = ["--balance=1,1,1,1"] * (name == "train_mp.py")
    out = jobs.python(name, "--devices=cpu,cpu", *balance, *words).ends_with(0)
    found = rows(tmp_path)
    assert found[0]["loss"] > 2.0 and found[-1]["val_acc"] > 0.5
    if name == "train_mp.py":
        assert all(re.search(rf"^cpu: {name}$", out, re.M) for name in ("block1", "block2", "fc1", "fc2"))


def test_003_the_small_perceptron_trains_in_two_processes_with_a_hand_set_environment(jobs, tmp_path):
    words = (
        "--model=mlp --dataset=random:200x10 --epochs=2 --log-every=1 --optimizer=sgd --momentum=0 --lr=0.001"
    )
    ranks = jobs.by_hand(2, "train_ddp.py", *flags(words, tmp_path))
    first, second = (rank.ends_with(0) for rank in ranks)
    assert "world 2 " in first and "model mlp: 67 parameters" in first  # 10*5 + 5 + 5*2 + 2
    assert not [line for line in second.splitlines() if not line.startswith("[W")]  # of torch
    assert [m["step"] for m in rows(tmp_path) if "loss" in m] == list(range(1, 9))  # 4 steps an epoch


@pytest.mark.parametrize("devices, inside", [("cpu", "30 30 30 10"), ("cpu,cpu", "15 15 15 15 15 15 5 5")])
def test_004_show_scatter_prints_the_random_batches_as_in_the_tutorial(jobs, tmp_path, devices, inside):
    words = flags("--dataset=random --model=mlp --epochs=1 --global-batch-size=30 --show-scatter", tmp_path)
    out = jobs.python("train_dp.py", f"--devices={devices}", *words).ends_with(0)
    assert " ".join(re.findall(r"In Model: \D+(\d+)", out)).startswith(inside)
    assert " ".join(re.findall(r"Outside: \D+(\d+)", out)).startswith("30 30 30 10")
