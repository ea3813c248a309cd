"""A job of this folder beside its plain loop: in one process; in two, of which one is killed, and then three.

A job is a file. `made` returns what Elastic is given; `plain` is the loop as everybody writes it, `mine` the
same over `run`: those here, of a `loss_of` and, if it evaluates, of a `judge`; or its own. They get what the
loop remembers, by name. A job that draws, or normalises batches, is BITWISE: a kill and other worlds change
no bit of its run; its plain loop is that of one process.
"""

import difflib
import importlib
import inspect
import itertools
import signal
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from program import SLICES, Part, differences, trained
from torch import nn
from torch.utils.data import default_collate

from common.elastic import Elastic
from common.extras.chosen import weights_of
from common.sampler import ElasticSampler, seed, seeded

GIVEN = {"batch_size": 16, "epochs": 2, "tensorboard": False}


# ---- for jobs ---------------------------------------------------------------------------------------
def numbers(count, *shape):
    """The same ones each time."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


def labelled(count, *shape):
    """[(x, which of its first three numbers is the largest)]"""
    return [(x, x.flatten()[:3].argmax()) for x in numbers(count, *shape)]


def classifier():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def actor_and_critic():
    """(logarithms of what to do, what it is worth) of the state of a pole."""

    def forward(net, state):
        seen = net.body(state).tanh()
        return net.actor(seen).log_softmax(1), net.critic(seen)[:, 0]

    return Part(forward, body=nn.Linear(4, 8), actor=nn.Linear(8, 2), critic=nn.Linear(8, 1))


def pole(state, action):
    """The next states of some poles on carts: place, speed, angle, spin."""
    x, speed, angle, spin = state.unbind(-1)
    push = action * 2.0 - 1
    return torch.stack([x + speed / 9, speed + push / 9, angle + spin / 9, spin + angle / 3 - push / 5], -1)


# ---- the usual loop, and in Elastic -----------------------------------------------------------------
def plain(net, optimizer, epochs, loss_of):
    for epoch in epochs:
        for batch in epoch:
            loss = loss_of(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def mine(run, loss_of):
    for batch in run:
        loss = loss_of(run.model, batch.data)
        run.step(loss)


def evaluated(run, loss_of, judge):
    for epoch in run.epochs():
        for batch in epoch:
            loss = loss_of(run.model, batch.data)
            run.step(loss)
        run.report(**run.evaluate(lambda batch: judge(run, batch)))


def class_loss(net, batch):
    x, y = batch
    return F.cross_entropy(net(x), y)


def accuracy(run, batch):
    return {"acc": ((run.model(batch.x).argmax(1) == batch.y).sum(), len(batch.y))}


# ---- the plain loop's data --------------------------------------------------------------------------
def epochs_of(dataset, batch_size, epochs, optimizer, order="shuffled", **_):
    """Batches in the order of a run, with its draws: in place of a DataLoader."""
    turns = len(optimizer) if isinstance(optimizer, list) else 1
    steps = itertools.count(0, turns)
    for epoch in range(epochs):
        yield batches_of(dataset, batch_size, epoch, order, steps)


def batches_of(dataset, size, epoch, order, steps):
    shuffled = ElasticSampler(dataset, size)
    shuffled.set_epoch(epoch)
    in_order = (range(start, start + size) for start in range(0, len(dataset), size))  # all are full
    for ids in shuffled if order == "shuffled" else in_order:
        samples = []
        for i in ids:
            with seeded(0, epoch, i):
                samples.append(dataset[i])
        seed(0, "step", next(steps), 0)
        yield getattr(dataset, "collate", default_collate)(samples)


# ---- a job ------------------------------------------------------------------------------------------
class Dies(Elastic):
    """The process dies in one of its calls of run.step."""

    calls = 0
    last_call = 0

    def step(self, *given):
        Dies.calls += 1
        if Dies.calls == Dies.last_call:
            signal.raise_signal(signal.SIGKILL)
        super().step(*given)


class Job:
    device = "cpu"
    last_call = 0

    def __init__(self, name):
        self.code = importlib.import_module(name)
        loss_of = getattr(self.code, "loss_of", class_loss)
        judge = getattr(self.code, "judge", None)
        usual = partial(evaluated, judge=judge) if judge else mine
        self.plain_loop = getattr(self.code, "plain", partial(plain, loss_of=loss_of))
        self.my_loop = getattr(self.code, "mine", partial(usual, loss_of=loss_of))
        self.runs = getattr(self.code, "RUNS", 1)  # one after another
        self.flags = {}

    def made(self, nets):
        torch.manual_seed(1)
        return GIVEN | (self.code.made(nets) if self.runs > 1 else self.code.made())

    def plain(self):
        nets = []
        found = {}
        for _ in range(self.runs):
            given = self.made(nets)
            net, optimizer = given["net"], given["optimizer"]
            nets.append(net)
            found |= self.plain_loop(net, optimizer, epochs_of(**given), **given.get("memory", {})) or {}
        return found | net.state_dict()

    def mine(self, given):
        nets = []
        Dies.last_call = self.last_call
        for number in range(self.runs):
            own = self.made(nets)
            folder = given["run_dir"] if number == self.runs - 1 else f"{given['run_dir']} {number}"
            with Dies(**given | own | self.flags | {"run_dir": folder}) as run:
                self.my_loop(run, **own.get("memory", {}))
            own["net"].load_state_dict(weights_of(Path(folder), "newest")[0])  # a complete run loads nothing
            nets.append(own["net"])

    def check(self, folder):
        """Wrong, if a number differs."""
        bitwise = getattr(self.code, "BITWISE", False)
        tolerance = 1e-4
        wanted = self.plain()
        differences(wanted, trained(self, Job.mine, folder / "one", [(1, 0)])[0], tolerance)
        if bitwise:
            self.flags = SLICES
            wanted, _ = trained(self, Job.mine, folder / "slices", [(1, 0)])
            tolerance = 0
        killed, _ = trained(self, Job.mine, folder / "killed", [(2, 9 if bitwise else 5), (3, 0)])
        differences(wanted, killed, tolerance)

    def row(self):
        """For tests/README.md."""
        loops = [getattr(loop, "func", loop) for loop in (self.plain_loop, self.my_loop)]
        sources = [inspect.getsource(loop).replace("  ", "").split("\n") for loop in loops]
        lines = list(difflib.ndiff(*sources))
        came, went = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        same = "bits" if getattr(self.code, "BITWISE", False) else "rounding"
        return f"| {self.code.__name__}: {self.code.__doc__.rstrip('.')} | +{came} -{went} | {same} |"
