"""A job of this folder beside its plain loop: in one process; in two, of which one is killed, and then three.

A job is a file, and says what differs from the USUAL one: `net`, `optimizer`, `memory`, what else Elastic is
given (`options`, of the nets of the runs before), and its loops: `plain` as everybody writes it, `mine` over
`run`; they get what the loop remembers, by name. A job that draws, or normalises batches, is BITWISE: a kill
and other worlds change no bit of its run; its plain loop is that of one process.
"""

import importlib
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


# ---- for jobs ---------------------------------------------------------------------------------------
def numbers(count, *shape):
    """The same ones each time."""
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


def labelled(count, *shape):
    """[(x, which of its first three numbers is the largest)]"""
    return [(x, x.flatten()[:3].argmax()) for x in numbers(count, *shape)]


NUMBERS = [*numbers(48, 6)]
LABELLED = labelled(48, 6)
TEST = labelled(20, 6)
WHOLE_TEST = default_collate(TEST)  # as one batch


def classifier():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def critic_and_generator():
    critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    return nn.ModuleDict({"critic": critic, "generator": nn.Linear(2, 6)})


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


# ---- the usual loops --------------------------------------------------------------------------------
def plain(net, optimizer, epochs, job):
    for epoch in epochs:
        for batch in epoch:
            loss = job.loss_of(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def mine(run, job):
    for batch in run:
        loss = job.loss_of(run.model, batch.data)
        run.step(loss)


def evaluated(run, job):
    for epoch in run.epochs():
        for batch in epoch:
            loss = job.loss_of(run.model, batch.data)
            run.step(loss)
        run.report(**run.evaluate(lambda batch: job.judge(run, batch)))


def plain_turns(net, optimizer, epochs, job):
    for epoch in epochs:
        for x in epoch:
            noise = torch.randn(len(x), 2)
            for turn, of_turn in enumerate(optimizer):
                loss = job.loss_of(net, x, noise, turn)
                net.zero_grad()
                loss.backward()
                of_turn.step()
                job.after(net)


def my_turns(run, job):
    for batch in run:
        noise = torch.randn(len(batch.data), 2)  # the same in each turn
        loss = job.loss_of(run.net, batch.data, noise, run.turn)
        run.step(loss)
        if run.stepped:
            job.after(run.net)


# ---- what a job may leave out -----------------------------------------------------------------------
def optimizer(net):
    return torch.optim.Adam(net.parameters(), 0.01)


def class_loss(net, batch):
    x, y = batch
    return F.cross_entropy(net(x), y)


def judge(run, batch):
    return {"finite": (run.model(batch.x).isfinite().sum(), len(batch.x))}


def nothing(*_):
    return {}


USUAL = {"net": classifier, "optimizer": optimizer, "memory": nothing, "OPTIONS": {}, "options": nothing}
USUAL |= {"plain": plain, "mine": mine, "loss_of": class_loss, "after": nothing, "judge": judge}
USUAL |= {"seen": nothing, "RUNS": 1, "BITWISE": False}
GIVEN = {"dataset": LABELLED, "batch_size": 16, "epochs": 2, "tensorboard": False}


# ---- the plain loop's data --------------------------------------------------------------------------
def epochs_of(dataset, batch_size, epochs, optimizer, order="shuffled", **_):
    """Batches in the order of a run, with its draws: in place of a DataLoader."""
    steps = itertools.count(0, len(optimizer) if isinstance(optimizer, list) else 1)
    batches = ElasticSampler(dataset, batch_size, seed=0 if order == "shuffled" else None)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        yield (batch_of(dataset, epoch, ids, next(steps)) for ids in batches)


def batch_of(dataset, epoch, ids, step):
    samples = []
    for i in ids:
        with seeded(0, epoch, i):
            samples.append(dataset[i])
    seed(0, "step", step, 0)
    return getattr(dataset, "collate", default_collate)(samples)


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
        self.code = code = importlib.import_module(name)
        for what, usual in USUAL.items():
            vars(code).setdefault(what, usual)
        self.flags = {}
        loops = code.plain, code.mine
        self.loops = [partial(loop, job=code) if loop.__module__ == __name__ else loop for loop in loops]

    def made(self, nets):
        torch.manual_seed(1)
        code = self.code
        net = code.net()
        optimizer = code.optimizer(net)
        own = {"net": net, "optimizer": optimizer, "memory": code.memory(net, optimizer)}
        return GIVEN | code.OPTIONS | code.options(nets) | own

    def plain(self):
        nets = []
        for _ in range(self.code.RUNS):  # one after another
            given = self.made(nets)
            net, optimizer = given["net"], given["optimizer"]
            nets.append(net)
            self.loops[0](net, optimizer, epochs_of(**given), **given["memory"])
        return self.code.seen(net, optimizer) | net.state_dict()

    def mine(self, given):
        nets = []
        Dies.last_call = self.last_call
        for number in reversed(range(self.code.RUNS)):
            own = self.made(nets)
            folder = given["run_dir"] if number == 0 else f"{given['run_dir']} {number}"
            with Dies(**given | own | self.flags | {"run_dir": folder}) as run:
                self.loops[1](run, **own["memory"])
            own["net"].load_state_dict(weights_of(Path(folder), "newest")[0])  # a complete run loads nothing
            nets.append(own["net"])

    def check(self, folder):
        """Wrong, if a number differs."""
        bitwise = self.code.BITWISE
        tolerance = 1e-4
        wanted = self.plain()
        differences(wanted, trained(self, Job.mine, folder / "one", [(1, 0)])[0], tolerance)
        if bitwise:
            self.flags = SLICES
            wanted, _ = trained(self, Job.mine, folder / "slices", [(1, 0)])
            tolerance = 0
        killed, _ = trained(self, Job.mine, folder / "killed", [(2, 9 if bitwise else 5), (3, 0)])
        differences(wanted, killed, tolerance)
