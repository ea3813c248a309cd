"""What the pages show in a few lines, as it is printed there."""

import os
import re
import sys
import textwrap
from contextlib import suppress

import numpy
import pytest
import torch
from jobs import ran, rows
from PIL import Image
from ranks import fork_ranks
from test_readme import COMMON, README, fenced, section
from torchvision import transforms

from common.checkpoint.__main__ import main as checkpoints
from common.extras.datasets import imagefolder
from common.models import load
from common.options import Options, as_imagefolder
from common.sampler import ElasticSampler

ELSEWHERE = fenced(section(COMMON, "The result"), "python")[1]


def test_a_task_with_a_matrix_trains_and_finish_makes_a_number_of_it(jobs, tmp_path, run):
    (loss,) = fenced(section(COMMON, "Your net, your data, your loss"), "python")
    data = """
def net(data):
    return torch.nn.Linear(3, 1)

def line():
    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(0))
    return x[:64], x[:64, :1], x[64:], x[64:, :1]
"""
    (tmp_path / "my_own.py").write_text(f"import torch\nimport torch.nn.functional as F\n{data}\n{loss}")
    flags = ["--model=my_own.py:net", "--dataset=my_own.py:line", "--task=my_own.py:loss"]
    words = "--lr=0.05 --epochs=30 --best=-mae --run-dir=run --no-tensorboard --log-every=1".split()
    jobs.python("train_ddp.py", *flags, *words, cwd=tmp_path).ends_with(0)
    first, *_, last = rows(run)
    assert 0 < first["right"] <= 1 and last["val_right"] > 0.8 and 0 < last["val_mae"] < 0.5


def trained_alone(code, rank, world, samples, killed_at):
    """(what a rank trains on, the integer it has saved last)."""
    trained = []

    def train(x, y, size):
        if names["samples"] == killed_at:
            raise KeyboardInterrupt
        trained.extend(x.tolist())

    names = {
        "ElasticSampler": ElasticSampler,
        "DataLoader": torch.utils.data.DataLoader,
        "dataset": [(i, -i) for i in range(103)],
        "epochs": 2,
        "rank": rank,
        "world": world,
        "samples": samples,
        "train": train,
    }
    with suppress(KeyboardInterrupt):
        exec(code, names)
    return trained, names["samples"]


@pytest.mark.parametrize("first, second", [(1, 3), (2, 4)])
def test_the_order_alone_is_a_batch_sampler_and_one_integer(first, second):
    lines = [line for line in ElasticSampler.__doc__.splitlines() if line.startswith("        ")]
    code = textwrap.dedent("\n".join(lines))
    begun = [trained_alone(code, rank, first, 0, 103 + 64) for rank in range(first)]
    assert {saved for _, saved in begun} == {103 + 64}
    ended = [trained_alone(code, rank, second, 103 + 64, None) for rank in range(second)]
    assert {saved for _, saved in ended} == {2 * 103}
    ids = [i for trained, _ in begun + ended for i in trained]
    assert sorted(ids) == sorted([*range(103), *range(103)])


def accuracy_in_a_notebook(world, folder, code):
    """In a process of its own: its threads fork badly."""
    names = {}
    exec(code, names)
    os.chdir(folder)
    net = load("runs/wide")
    x, y = names["bright"]()[2:]
    with torch.no_grad():
        return (net(x).argmax(1) == y).double().mean().item()


def test_the_readmes_own_net_and_data_have_the_same_numbers_loaded_and_without_this_project(tmp_path, jobs):
    text = section(README, "The three scripts")
    (code,) = fenced(text, "python")
    (tmp_path / "my_own.py").write_text(code)
    (words,) = re.findall(r"`python (train_ddp.py [^`]*)`", text)
    jobs.python(*words.split(), "--max-steps=30", "--no-tensorboard", cwd=tmp_path).ends_with(0)
    accuracy = rows(tmp_path / "runs/wide")[-1]["val_acc"]
    (loaded,) = fork_ranks(1, accuracy_in_a_notebook, tmp_path, code)
    assert accuracy > 0.8 and abs(loaded - accuracy) < 1e-9
    assert checkpoints([f"{tmp_path}/runs/wide", "--best", "--export", f"{tmp_path}/wide.safetensors"]) == 0
    code = f"import sys; sys.path.append('.')\n{ELSEWHERE}"
    done = ran(sys.executable, "-I", "-c", code, cwd=tmp_path)
    found = float(re.search(r"tensor\(([0-9.]+)", done.stdout)[1])
    assert abs(found - accuracy) < 1e-4, done.stderr


def test_pictures_are_made_for_a_net_as_the_flag_and_the_export_say(tmp_path):
    for name in ("train", "val"):
        (tmp_path / name / "cat").mkdir(parents=True)
        pixels = numpy.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(tmp_path / name / "cat/1.png")
    words = as_imagefolder(32)
    side, crop, *numbers = re.findall(r"\d[\d.]*", words.replace("0 to 1", ""))
    steps = [transforms.Resize(int(side)), transforms.CenterCrop(int(crop)), transforms.ToTensor()]
    picture = transforms.Compose(steps)(Image.open(tmp_path / "val/cat/1.png").convert("RGB"))
    mean, deviation = torch.tensor([float(number) for number in numbers]).view(2, 3, 1, 1)
    opts = Options(dataset="imagefolder", data_dir=str(tmp_path), image_size=32)
    assert torch.allclose(imagefolder(opts).test.dataset[0][0], (picture - mean) / deviation)
