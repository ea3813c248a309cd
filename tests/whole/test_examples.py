"""What the pages show in a few lines, as it is printed there."""

import re
import sys
import textwrap
from contextlib import suppress

import torch
from jobs import ran, rows
from PIL import Image
from test_datasets import write_images
from test_readme import COMMON, README, fenced, section
from torchvision import transforms

from common.extras.datasets import imagefolder
from common.extras.exports import main as checkpoints
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


def trained_alone(code, rank, world, begin, end):
    """What a rank trains on from one position to another, where it is killed; 103 samples, two epochs."""
    trained = []

    def train(x, y, size):
        if names["samples"] == end:
            raise KeyboardInterrupt
        trained.extend(x.tolist())

    names = {
        "ElasticSampler": ElasticSampler,
        "DataLoader": torch.utils.data.DataLoader,
        "dataset": [(i, -i) for i in range(103)],
        "epochs": 2,
        "rank": rank,
        "world": world,
        "samples": begin,
        "train": train,
    }
    with suppress(KeyboardInterrupt):
        exec(code, names)
    assert names["samples"] == end
    return trained


def test_the_order_alone_is_a_batch_sampler_and_one_integer():
    lines = [line for line in ElasticSampler.__doc__.splitlines() if line.startswith("        ")]
    code = textwrap.dedent("\n".join(lines))
    ids = []
    for world, begin, end in ((2, 0, 103 + 64), (4, 103 + 64, 2 * 103)):
        for rank in range(world):
            ids += trained_alone(code, rank, world, begin, end)
    assert sorted(ids) == sorted([*range(103)] * 2)


def test_the_readmes_own_net_and_data_have_the_same_numbers_without_this_project(tmp_path, jobs):
    text = section(README, "The three scripts")
    (tmp_path / "my_own.py").write_text(*fenced(text, "python"))
    (words,) = re.findall(r"`python (train_ddp.py [^`]*)`", text)
    jobs.python(*words.split(), "--max-steps=30", "--no-tensorboard", cwd=tmp_path).ends_with(0)
    accuracy = rows(tmp_path / "runs/wide")[-1]["val_acc"]
    assert accuracy > 0.8
    assert checkpoints([f"{tmp_path}/runs/wide", "--best", "--export", f"{tmp_path}/wide.safetensors"]) == 0
    code = f"import sys; sys.path.append('.')\n{ELSEWHERE}"
    done = ran(sys.executable, "-I", "-c", code, cwd=tmp_path)
    found = float(re.search(r"tensor\(([0-9.]+)", done.stdout)[1])
    assert abs(found - accuracy) < 1e-4, done.stderr


def test_pictures_are_made_for_a_net_as_the_flag_and_the_export_say(tmp_path):
    file = write_images(tmp_path) / "val/cat/0.png"
    Image.effect_noise((70, 50), 90).convert("RGB").save(file)
    words = as_imagefolder(32).replace("0 to 1", "")
    side, crop, *numbers = (float(number) for number in re.findall(r"\d[\d.]*", words))
    steps = [
        transforms.Resize(int(side)),
        transforms.CenterCrop(int(crop)),
        transforms.ToTensor(),
        transforms.Normalize(numbers[:3], numbers[3:]),
    ]
    made = imagefolder(Options(dataset="imagefolder", data_dir=str(tmp_path), image_size=32)).test
    assert torch.allclose(made.dataset[0][0], transforms.Compose(steps)(Image.open(file)))
