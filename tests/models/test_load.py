"""`load(RUN)`: the net of a run in one line, as a notebook has it."""

import os
import sys
from pathlib import Path

import pytest
import torch
from jobs import ROOT, weights
from refusals import refusal
from test_bitwise import run

from common.data import load_data
from common.extras.own_files import load_file
from common.models import load
from common.options import Options, bytes_of, find_function

OWN = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.words, self.head, self.drop = nn.Linear(4, 4, False), nn.Linear(4, 4, False), nn.Dropout()
        self.last, self.head.weight = nn.Linear(4, classes), self.words.weight

    def forward(self, x):
        return self.last(self.drop(self.head(self.words(x))))

def net(opts, data):
    return Tied(data.classes)
"""
ROWS = {"dataset": "random:64x4", "virtual_ranks": 2, "global_batch_size": 16, "save_every": 0, "keep": 9}


def loss_of(net):
    """On the test set, by hand."""
    data = load_data(Options(dataset="random:64x4")).test
    x, y = data.fetch(range(len(data)))
    return torch.nn.functional.cross_entropy(net(x).double(), y).item()


@pytest.mark.parametrize("more", [{}, {"ema_decay": 0.5}])
def test_the_best_net_of_a_run_the_newest_and_that_of_a_step_evaluate_as_the_run_said(tmp_path, more):
    (tmp_path / "own.py").write_text(OWN)
    given = ROWS | more | {"model": f"{tmp_path}/own.py:net", "epochs": 3, "lr": 0.1, "best": "loss"}
    rows = [eval(row) for row in run(tmp_path / "run", 2, given)[1].splitlines()]
    said = {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    best = min(said, key=said.get)
    assert len(said) == 3
    for which, step in (("best", best), ("newest", max(said)), (min(said), min(said))):
        net = load(tmp_path / "run", which)
        assert not net.training and net.head.weight is net.words.weight
        assert loss_of(net) == pytest.approx(said[step], rel=1e-5)


def test_load_finds_the_file_of_the_training_from_any_folder_and_asks_for_one_that_is_gone(
    tmp_path, monkeypatch
):
    """It runs no file that lies beside a run: both may come from a stranger."""
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    Path("own.py").write_text(OWN)
    run(Path("runs/own"), 1, ROWS | {"model": "own.py:net", "epochs": 1})
    monkeypatch.chdir("/")
    assert load(there / "runs/own").last.out_features == 2
    here = there.rename(tmp_path / "here")
    monkeypatch.chdir(here)
    load_file.cache_clear()
    bytes_of.cache_clear()
    with refusal(f"{there}/own.py:net: FileNotFoundError"):
        load("runs/own")
    assert load("runs/own", model="own.py:net").last.out_features == 2


LOOP = """
import torch
from common.elastic import Elastic

def net():
    return torch.nn.Linear(4, 1)

if __name__ == "__main__":
    rows = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8, 1))
    mine = net()
    with Elastic(net=mine, optimizer=torch.optim.SGD(mine.parameters(), 0.1), dataset=rows, run_dir="run",
                 batch_size=8, epochs=1) as run:
        for batch in run:
            run.step(torch.nn.functional.mse_loss(run.model(batch.x), batch.y))
"""


def test_the_net_of_a_loop_of_ones_own_is_loaded_if_its_function_is_named(jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(LOOP)
    jobs.python(tmp_path / "loop.py", cwd=tmp_path, PYTHONPATH=str(ROOT)).ends_with(0)
    with refusal("trained by a script of its own.*\n.*model='PATH/file.py:function'"):
        load("run", "newest")
    net = load("run", "newest", model="loop.py:net")
    assert torch.equal(net.weight, weights("run")["weight"]) and not net.training


def test_a_net_is_built_with_the_neighbours_of_its_own_file_or_not_at_all(tmp_path):
    """Two versions of a net in one notebook: each has a parts.py of its own."""
    for version in ("1", "2"):
        folder = tmp_path / version
        folder.mkdir()
        (folder / "parts.py").write_text(f"def version(): return {version}\n")
        (folder / "net.py").write_text("import random, torch\nfrom parts import version\n")
    assert find_function(f"{tmp_path}/1/net.py:version")() == 1
    with refusal(rf"2/net.py imports parts, for which {tmp_path}/1/parts.py was taken\nto have the one"):
        find_function(f"{tmp_path}/2/net.py:version")
    (tmp_path / "common").mkdir()
    (tmp_path / "common/__init__.py").touch()
    (tmp_path / "net.py").write_text("from common.text import words\n")
    with refusal(rf"net.py imports common, for which {ROOT}/common/__init__.py was taken\n"):
        find_function(f"{tmp_path}/net.py:words")
    del sys.modules["parts"]


@pytest.mark.parametrize("whose", ["of the run's own folder", "of another user"])
def test_a_file_that_the_caller_does_not_know_runs_only_if_it_is_named(tmp_path, monkeypatch, whose):
    """A run folder may come from a stranger, and its options.json may name anything."""
    folder = tmp_path / ("run" if "own" in whose else "code")
    folder.mkdir(0o700, exist_ok=True)
    monkeypatch.chdir(folder)
    Path("own.py").write_text(OWN + f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    run(tmp_path / "run", 1, ROWS | {"model": "own.py:net", "epochs": 1})
    (tmp_path / "ran").unlink()
    load_file.cache_clear()
    if "user" in whose:
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        if not uid:
            os.chown("own.py", uid + 2, -1)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run")
    for path in (link, os.path.relpath(tmp_path / "run")):
        with refusal(r"would run .*own.py:net: a file in that folder(.|\n)*name it yourself: --model "):
            load(path)
    assert not (tmp_path / "ran").exists()
    assert load(link, model="own.py:net") and (tmp_path / "ran").exists()


def test_a_run_without_a_whole_checkpoint_or_such_a_step_says_what_lists_them(tmp_path):
    run(tmp_path / "run", 1, ROWS | {"model": "mlp", "epochs": 1})
    for folder, which, code in ((tmp_path / "none", "best", 2), (tmp_path / "run", 77, 3)):
        with refusal("python -m common.checkpoint", code):
            load(folder, which)
