"""A loop of one's own (common/elastic.py): the example of common/README.md, through kills and worlds."""

import sys

import pytest
from jobs import CLEAN, ROOT, audit, kill_at, lives, rows, steps_on_disk, weights
from test_readme import COMMON, fenced, section

from common.extras.exports import main as checkpoints

EXAMPLE = fenced(section(COMMON, "A loop of your own"), "python")[0]


@pytest.fixture
def script(tmp_path):
    """The example, with a pause in each step, so that a kill strikes between two of them."""
    path = tmp_path / "my_loop.py"
    loop = "            for batch in epoch:"
    text = EXAMPLE.replace("runs/mine", f"{tmp_path}/run")
    text = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{text}"
    path.write_text(text.replace(loop, f"            import time\n{loop}\n                time.sleep(0.02)"))
    return path


def evaluations(run):
    return {row["step"]: row["val_acc"] for row in rows(run) if "val_acc" in row}


def test_the_example_is_killed_and_its_errors_have_the_exit_codes_of_the_scripts(jobs, script, run):
    job = jobs.torchrun(2, script)
    kill_at(job, run, 10)
    job.ends_with(0)
    assert audit(run) == CLEAN and checkpoints([f"{run}"]) == 0
    assert sorted(evaluations(run)) == [9, 18, 27, 36], "each epoch once, 513 samples by 64"
    for path in (run / "checkpoints").rglob("model.safetensors"):
        path.write_bytes(b"")
    damaged = jobs.start(script).ends_with(3)
    lost = jobs.start(script, RANK="3").ends_with(2)
    assert "error: " in damaged and "WORLD_SIZE is not set" in lost and "Traceback" not in damaged + lost


# ---- twenty users -----------------------------------------------------------------------------------
EPOCHS, BATCHES = "        for epoch in run.epochs():", "            for batch in epoch:"
CALL_EARLY = "run.model(torch.zeros(2, 8))"
STEP = "                run.step(loss)"
REPORT = "run.report(val_acc=test(run, points))"
BEGIN, LOOP, AUDIT = "    points = Points()", "                time.sleep(0.02)", "audit=True"
RANK = "int(__import__('os').environ.get('RANK', 0))"


def change(script, *edits):
    """The script without its pause, and with these (old, new) texts exchanged."""
    text = script.read_text().replace(LOOP, "                pass")
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    script.write_text(text)


def after(line, new, indent="                "):
    return line, f"{line}\n{indent}{new}"


@pytest.mark.parametrize(
    "fact, edit",
    [
        ("a batch was not trained on", (STEP, "                pass")),
        ("has no len()", ("dataset=points", "dataset=iter([])")),
        ("run.step was called twice", after(STEP, STEP.strip())),
        ("or before the first one", (EPOCHS, f"        run.step({CALL_EARLY}.mean())\n{EPOCHS}")),
        ("audit: ignored explicit argument 'yes'", (AUDIT, "audit='yes'")),
        (
            "save_evry cannot take effect in a loop of your own; did you mean save_every?",
            (AUDIT, "save_evry=1"),
        ),
        (
            "micro_batch_size cannot take effect with virtual_ranks: a slice is one forward",
            (AUDIT, "micro_batch_size=8, virtual_ranks=2"),
        ),
        ("ValueError: could not convert", (REPORT, "run.report(val_acc='good')")),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_mistake_in_the_script_is_told_in_three_lines(jobs, script, fact, edit):
    change(script, edit)
    said = jobs.start(script).ends_with(2)
    assert "Traceback" not in said, said
    told = said[said.index("error: ") :].splitlines()
    assert fact in told[0] and len(told) <= 3, told


def test_an_error_of_one_rank_is_told_once_and_ends_the_job(jobs, script, run):
    fails = "raise __import__('common.errors').errors.UserError('a fact')"
    change(script, after(BATCHES, f"if {RANK} and run.state.progress.step == 2: {fails}"))
    said = jobs.torchrun(2, script).ends_with(1)
    assert said.count("error: a fact") == 1, said
    assert len(lives(run)) == 1, "a restart cannot help"


@pytest.mark.parametrize(
    "how, code", [("break", 0), ("sys.exit()", 0), ("sys.exit(3)", 3), ("raise KeyboardInterrupt", 130)]
)
def test_a_script_that_leaves_its_loop_in_any_way_has_saved(jobs, script, run, how, code):
    change(script, after(STEP, f"if run.state.progress.step == 7: {how}"))
    if how == "break":  # of both loops
        change(script, (REPORT, f"if run.progress.step == 7: break\n            {REPORT}"))
    said = jobs.start(script).ends_with(code)
    assert steps_on_disk(run) == [7]
    assert ("\nleft at step 7 of 36: it is saved\n" in said) == (code == 0)


def test_ranks_may_begin_with_other_weights_and_only_one_may_report(jobs, script, run):
    change(
        script,
        ("manual_seed(0)", f"manual_seed({RANK})"),
        (AUDIT, "audit=True, patience=1, amp='bf16', clip_grad_norm=1.0"),
        (REPORT, f"{RANK} or run.report(acc=0.5)"),
        after(STEP, f"run.state.progress.step % 4 or {RANK} or run.report(acc=0.5)"),
    )
    jobs.torchrun(2, script, restarts=0).ends_with(0)
    # patience ends it on both ranks after two of four epochs
    assert evaluations(run) == dict.fromkeys([4, 8, 9, 12, 16, 18], 0.5)
    assert audit(run) == CLEAN


GROUPS = "[{'params': net[0].parameters(), 'lr': 0.0}, {'params': net[2].parameters()}]"
RATES = "assert [group['lr'] > 0 for group in optimizer.param_groups] == [0, 1]"
ODD = {
    "its net comes in evaluation mode, and has it before each epoch": [
        after(BEGIN, "net.eval()", "    "),
        after(EPOCHS, "run.net.eval()", "            "),
        after(STEP, "assert net.training"),
    ],
    "its first group has no rate": [("net.parameters()", GROUPS), after(STEP, RATES)],
    "a second forward moves statistics": [
        ("return 513", "return 512"),
        ("nn.ReLU()", "nn.BatchNorm1d(32)"),
        (AUDIT, "check_every=1"),  # that ranks are alike
        after(STEP, "torch.no_grad()(run.model)(batch.x)"),
    ],
}


@pytest.mark.parametrize("what", ODD)
def test_a_script_that_is_odd_and_right_trains(jobs, script, what):
    change(script, *ODD[what])
    jobs.torchrun(2, script, restarts=0).ends_with(0)


# ---- in a repository of somebody else ---------------------------------------------------------------
MULTIGPU = """
import torch
import torch.nn.functional as F

from common.elastic import Elastic
from common.my_data import MyTrainDataset  # a package `common` of one's own


def judge(batch):
    return {"mse": (F.mse_loss(model(batch.x), batch.y, reduction="sum"), len(batch.y))}


for fold in ("first", "second"):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Elastic(net=torch.compile(model), optimizer=optimizer, dataset=MyTrainDataset(2048), run_dir=fold,
                 batch_size=64, epochs=2, best="-mse") as run:
        for epoch in run.epochs():
            for batch in epoch:
                run.step(F.mse_loss(model(batch.x), batch.y))
            run.report(**run.evaluate(judge))
"""
DATA = """
import torch


class MyTrainDataset(torch.utils.data.Dataset):
    def __init__(self, size):
        draws = torch.Generator().manual_seed(0)  # drawn without a seed, each rank would have other data
        self.data = [(torch.rand(20, generator=draws), torch.rand(1, generator=draws)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is not known")
@pytest.mark.parametrize("launcher", [[], [ROOT / "launch/torchrun.py", "--nproc_per_node=2"]])
def test_two_loops_as_pytorchs_multigpu_example_train_in_a_repository_that_has_a_common_of_its_own(
    jobs, tmp_path, launcher
):
    (tmp_path / "theirs/common").mkdir(parents=True)
    (tmp_path / "theirs/common/__init__.py").touch()
    (tmp_path / "theirs/common/my_data.py").write_text(DATA)
    script = tmp_path / "theirs/multigpu_torchrun.py"
    script.write_text(MULTIGPU)
    where = {"PYTHONPATH": f"{ROOT}:{tmp_path}/theirs", "PYTHONSAFEPATH": "1"}
    job = jobs.start(*launcher, script, cold=True, cwd=tmp_path, **where)
    assert job.ends_with(0).count("done at step 64: val_mse") == 2
    # a compiled net has its own names
    assert {*weights(tmp_path / "second")} == {"weight", "bias"}
