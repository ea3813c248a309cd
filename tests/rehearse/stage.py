"""A program of a user on the stage of launch/rehearse.py: a loop of one's own, or flags of a script."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from jobs import ROOT
from torch import nn
from torch.utils.data import default_collate

import common.elastic
from launch.rehearse import rehearse

HERE = Path(__file__).parent
SAMPLES = 46
BATCH = 11  # the last batch has 2 samples: one of three ranks has none
TESTED = 23
now = None  # the program that this process runs


class Samples(list):
    """A dataset that may have a collate."""


class Program:
    """A classifier in the usual loop. A row is a subclass: it says what is different, and how it is told."""

    rows = []
    family = ""  # of the alarm; "refused"; "" if the program is right
    door = "loop"  # or "script"
    script = "train_ddp.py"
    flags = {}
    own = "model dataset task optimizer"  # functions of functions.py, by the door of a script
    accept = ""
    notes = ""  # what a note says
    rate = 0.1
    outputs = 3  # of the net
    count = SAMPLES

    def __init_subclass__(cls):
        Program.rows.append(cls)

    # ---- what a user writes ----
    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, self.outputs))

    def sample(self, draws):
        x = torch.randn(6, generator=draws)
        return x, int(x[:3].argmax())

    samples = Samples
    collate = staticmethod(default_collate)

    def loss(self, net, batch):
        x, y = batch
        return self.scores(net(x), y)

    def scores(self, out, y):
        right = (out.argmax(1) == y).sum()
        return {"loss": (F.cross_entropy(out, y, reduction="sum"), len(y)), "acc": (right, len(y))}

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), self.rate, momentum=0.9)

    def memory(self, net):
        return {}

    def begin(self, run):
        """Between `with` and `for`."""

    def loop(self, run):
        self.begin(run)
        for epoch in run.epochs():
            for batch in epoch:
                self.step(run, batch)
                if run.stepped:
                    self.after(run)
            self.report(run)

    def step(self, run, batch):
        run.step(self.values(run, batch))

    def after(self, run):
        """What the loop does after a step."""

    def values(self, run, batch):
        return self.loss(run.model, batch.data)

    def report(self, run):
        run.report(**run.evaluate(lambda batch: self.values(run, batch)))

    # ---- the same at each start ----
    def made(self):
        torch.manual_seed(1)
        return self.net()

    def sets(self):
        draws = torch.Generator().manual_seed(1)
        sets = [self.samples(self.sample(draws) for _ in range(count)) for count in (self.count, TESTED)]
        for samples in sets:
            samples.collate = self.collate
        return sets

    given = sets  # to a script

    def main(self):
        net = self.made()
        train, test = self.sets()
        optimizer = self.optimizer(net)
        kept = self.memory(net)
        with common.elastic.Elastic(
            net=net,
            optimizer=optimizer,
            dataset=train,
            test_set=test,
            run_dir="runs/mine",
            batch_size=BATCH,
            epochs=9,
            memory=kept,
            **self.flags,
        ) as run:
            self.loop(run)

    def command(self):
        if self.door == "loop":
            return [str(HERE / "loop.py")]
        flags = {"lr": self.rate, "global_batch_size": BATCH} | self.flags
        flags |= {flag: f"{HERE / 'functions.py'}:{flag}" for flag in self.own.split()}
        return [str(ROOT / self.script), *(f"--{flag}={value}".rstrip("=") for flag, value in flags.items())]


def rehearsed(row):
    """({family: what is told}, notes, key) of a row."""
    global now
    now = row()
    with tempfile.TemporaryDirectory() as folder:
        return rehearse(now.command(), Path(folder), row.accept)


def wrong_with(row):
    """What is wrong with the verdict on a row, or ""."""
    alarms, notes, _ = rehearsed(row)
    if row.family and row.family not in alarms or not row.family and alarms:
        return f"{row.__name__} is {row.family or 'right'}, and was told as {alarms}"
    if row.notes not in " ".join(notes):
        return f"{row.__name__} has no note {row.notes!r}: {notes}"
    return ""
