"""A row of tests/plain, of wrong.py or right.py on the stage of launch/rehearse.py."""

import contextlib
import io
import tempfile
from pathlib import Path

import program
import torch.nn.functional as F
from jobs import ROOT
from torch import nn

from common.errors import UserError
from launch.rehearse import FAMILIES, rehearse

LOOP = Path(__file__).with_name("loop.py")


class Rehearsed(program.Program):
    """A row says what is different, and as which family it must be told; none if it is right."""

    rows = []
    doors = "loop"
    n = 0

    def factor(self):
        return 1

    def of_batch(self, out, y):
        """The loss, as a mean."""
        return F.cross_entropy(out, y) * self.factor()

    def scores(self, out, y):
        return super().scores(out, y) | {"loss": (self.of_batch(out, y) * len(y), len(y))}

    def step(self, run, batch):
        run.step(self.of_batch(run.model(batch.x), batch.y))

    def judge(self, run, batch):
        return self.values(run, batch)

    def report(self, run):
        found = run.evaluate(lambda batch: self.judge(run, batch))
        run.report(**found)
        return found


def row(name, base, **facts):
    type(name, (base,), facts)


# ---- parts of rows ----
def around(*layers):
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


def wide(self):
    """A tensor of which random sums are kept."""
    return nn.Sequential(nn.Linear(6, 900), nn.Tanh(), nn.Linear(900, 3))


class Read(program.Samples):
    """Inputs that are made anew at each reading."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return self.read(x), y


# ---- what is told of a row ----
def command(row):
    if "loop" in row.doors:
        return [str(LOOP)]
    return [str(ROOT / row.script), *program.flags_of(row, row.flags)]


def rehearsed(kind):
    """(as which family a row is told, all that is told)"""
    program.now = row = kind()
    told = io.StringIO()
    family = ""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(told):
        try:
            rehearse(command(row), Path(folder), row.accept)
        except UserError as error:
            print(error)
            beginnings = {text[:15]: name for name, text in FAMILIES.items()}
            family = beginnings.get(str(error)[:15], "refused")
    return family, told.getvalue()


def wrong_with(row):
    """What is wrong with the verdict on a row, or ""."""
    family, told = rehearsed(row)
    wanted = row.family or "refused" * bool(row.refused)
    if family != wanted or row.notes not in told:
        return f"{row.__name__} is {wanted or 'right'} {row.notes}, and was told as {family}: {told}"
    return ""
