"""The recipes of common/README.md, as they are printed there."""

import re
import textwrap

import torch
from jobs import ROOT, TESTS
from test_readme import COMMON, fenced, section

TEXT = section(COMMON, "Recipes")
(CODE,) = fenced(TEXT, "python")
WRITES, ELSEWHERE = fenced(section(COMMON, "The result"), "python")
DATA = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import paced

def rare():
    train, test = paced.files()
    train = weighted(train, 1.0 + (train.tensors[1] == 2).double())
    train.classes = test.classes
    return train, test
"""


def test_mixup_trains_a_weighted_dataset_and_each_row_of_its_log_is_sent_once(jobs, tmp_path, run):
    file = tmp_path / "my_recipes.py"
    file.write_text(CODE + DATA)
    flags = "--model=mlp --epochs=2 --log-every=5 --workers=0 --no-tensorboard".split()
    own = (f"--dataset={file}:rare", f"--task={file}:mixup", f"--run-dir={run}")
    jobs.python("train_ddp.py", *flags, *own).ends_with(0)
    names = {}
    rows = []
    exec(CODE, names)
    names["send"](run, lambda row, step: rows.append((step, row)))
    steps = [step for step, row in rows if "loss" in row]
    assert steps and steps == sorted(set(steps)) and all("val_acc" in row or "loss" in row for _, row in rows)


def test_the_profiler_of_torch_goes_around_the_loop(jobs, tmp_path):
    (context,) = [line.split("`")[1] for line in TEXT.splitlines() if "torch.profiler" in line]
    script = (ROOT / "train_ddp.py").read_text()
    head, loop, rest = re.match(r"(?s)(.*\n)(        for epoch in .*?\n)(\n\n.*)", script).groups()
    inside = f"        {context}\n{textwrap.indent(loop, '    ')}"
    export = "        profiler.export_chrome_trace('trace.json')\n"
    (tmp_path / "profiled.py").write_text(f"import torch\n{head}{inside}{export}{rest}")
    flags = "--model=mlp --dataset=random --max-steps=3 --no-tensorboard --run-dir=run".split()
    jobs.start(tmp_path / "profiled.py", *flags, cwd=tmp_path, PYTHONPATH=str(ROOT)).ends_with(0)
    assert "aten::" in (tmp_path / "trace.json").read_text()


def test_a_gpt_of_a_run_writes_on(jobs, tmp_path, run):
    (tmp_path / "cats.txt").write_text("the cat sat on the mat. " * 600)
    flags = "--model=gpt:1x2x16 --dataset=text:64 --data-dir=cats.txt --max-steps=2 --no-tensorboard"
    jobs.python("train_ddp.py", *flags.split(), "--run-dir=run", cwd=tmp_path).ends_with(0)
    names = {"torch": torch}
    with torch.no_grad():
        exec(WRITES.replace("runs/wide", f"{run}").replace("range(200)", "range(70)"), names)
    assert names["ids"].shape == (1, 74) and bytes(names["ids"][0, :4].tolist()) == b"the "
