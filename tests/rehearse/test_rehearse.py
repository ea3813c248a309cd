"""launch/rehearse.py tells wrong programs, each as what it is, and says of right ones that they are right.

python -m pytest tests/rehearse -m long         # all of wrong.py, right.py and tests/plain
"""

import pytest
import right  # noqa: F401  (its rows)
import stage
import test_programs
import torch._dynamo  # noqa: F401
import wrong
from jobs import ROOT
from stage import LOOP, rehearsed, wrong_with

import common.elastic  # noqa: F401  (what each process of a rehearsal is forked with)
import common.models  # noqa: F401
import launch.rehearsed  # noqa: F401
from launch.command import read_command
from launch.rehearse import script_of

# no programs, but what several have in common
KINDS = "Rehearsed Right Memory Cut MeanOverCount Ranks Moves Random Refused Unguarded".split()
ROWS = [row for row in stage.Rehearsed.rows + test_programs.Program.rows if row.__name__ not in KINDS]
# one of each family, one that is refused, and two that are right
FAST = "UnseededNet KlAnneal RowsOfThisBatch Judged PrunesByShare hardest Mask Classifier Drop".split()


def rows(fast):
    return [pytest.param(row, id=row.__name__) for row in ROWS if (row.__name__ in FAST) == fast]


@pytest.mark.parametrize("row", rows(fast=True))
def test_a_wrong_program_is_told_as_what_it_is_and_a_right_one_is_right(row):
    assert not wrong_with(row)


@pytest.mark.long
@pytest.mark.parametrize("row", rows(fast=False))
def test_each_program_is_told_as_what_it_is(row):
    assert not wrong_with(row)


def test_an_alarm_has_three_lines_fact_cause_way_out():
    _, told = rehearsed(wrong.Enumerate)
    fact, cause, way_out = told.splitlines()
    assert fact.startswith("killed and resumed, step 6 is another one: 0.weight is off by 0.0029 of 0.4")
    assert "outside of net and optimizer" in cause and "run.progress.step" in way_out


def test_the_command_says_what_came_and_a_run_of_that_code_no_longer_asks_for_it(jobs, tmp_path):
    loop = tmp_path / "loop.py"
    loop.write_text(PROGRAM)
    asks = "this program was not rehearsed: python launch/rehearse.py ..."
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    rehearsal = ROOT / "launch/rehearse.py"
    assert asks in jobs.python(loop, **home).ends_with(0)
    said = jobs.start(rehearsal, "python", loop, **home).ends_with(0)
    assert said.startswith("rehearsed: 20 steps, 4 evaluations; killed three times with the same bits"), said
    assert asks not in jobs.python(loop, "--again", **home).ends_with(0)
    loop.write_text(PROGRAM.replace("batch.y)", "batch.y) * next(count)"))
    said = jobs.start(rehearsal, "python", loop, **home).ends_with(1)
    assert said.startswith("error: killed and resumed, step 6 is another one: "), said
    loop.write_text("")
    assert "error: the script made no step" in jobs.start(rehearsal, "python", loop, **home).ends_with(2)


PROGRAM = """
import itertools, sys
import torch
from torch import nn
from common.elastic import Elastic

torch.manual_seed(0)
net = nn.Linear(5, 3)
samples = [(torch.randn(5), i % 3) for i in range(46)]
count = itertools.count()
with Elastic(net=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), dataset=samples, epochs=1,
             run_dir="again" if sys.argv[1:] else "first") as run:
    for epoch in run.epochs():
        for batch in epoch:
            run.step(nn.functional.cross_entropy(run.model(batch.x), batch.y))
        run.report(**run.evaluate(lambda batch: {"n": (len(batch.y), 1)}))
"""


TRAIN = f"{ROOT}/train_ddp.py"
COMMANDS = {  # as one types them: the script, and its flags
    f"torchrun --nproc_per_node=2 {LOOP} --width 3": f"{LOOP} --width 3",
    f"python -u {LOOP}": str(LOOP),
    f"launch/local.sh {LOOP}": str(LOOP),
    "launch/local.sh --nproc 4 --epochs 3": f"{TRAIN} --epochs 3",
    "launch/local.sh --epochs 3 --nproc=4": f"{TRAIN} --epochs 3",
    f"{ROOT}/launch/torchrun.py --nproc_per_node=2 {TRAIN}": TRAIN,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_taken_as_one_types_it(command):
    args = read_command("", ["--accept", "cut", *command.split()], accept=("", ""))
    assert args.accept == "cut"
    assert script_of(args.command) == COMMANDS[command].split()
