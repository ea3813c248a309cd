"""A program of a user's; the plain loop beside it; its run through two kills in three worlds."""

import copy
import math
import os
import re
import runpy
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jobs import ROOT, rows, weights
from ranks import at_home, fork_ranks
from torch import nn
from torch.utils.data import default_collate

from common import elastic
from common.sampler import ElasticSampler

FLAGS = Path(__file__).with_name("flags.py")
SLICES = {"virtual_ranks": 4}
SAMPLES = 46
BATCH = 11  # the last batch has 2 samples: one of three ranks has none
TESTED = 23
DEVICES = {"devices": "cpu,cpu", "workers": 0}  # processes that load are tried by `script`
now = None  # the program that this process runs


class Wrong(Exception):
    """What is wrong with a row."""


class Samples(list):
    """A dataset that may have a collate."""


class Part(nn.Module):
    """A net in one line: a function of this module and its inputs; tensors are buffers."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if type(part) is torch.Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


def headed(forward, **parts):
    """A net of a function of it and x."""
    return Part(forward, head=nn.Linear(6, 3), **parts)


class Held(dict):
    """A loop's own numbers and tensors: what it remembers."""

    def state_dict(self):
        return dict(self)

    load_state_dict = dict.update


class Program:
    """A classifier in the usual loop. A row is a subclass, and says what is different."""

    rows = []
    doors = "script loop"  # train_ddp.py, and Elastic
    flags = {}  # of both
    only_script = {}
    own = "model dataset task optimizer"  # functions of flags.py
    rate = 0.1
    tolerance = 1e-4
    draws = False  # wanted is an unbroken run of one process: to the bit, with --virtual-ranks
    refused = ""  # what the refusal says: a regular expression
    refused_at = (1, 2)  # processes
    right = 0  # steps that may come before the refusal
    lives = (1, 4), (3, 5), (2, 0)  # (processes, the call of the net in which the last of them is killed)
    device = "cpu"
    outputs = 3  # of the net
    breaks = False  # the loop over batches is left at the end of each epoch
    family = ""  # as which launch/rehearse.py tells it; then numbers are compared in one process at most
    notes = ""  # what the rehearsal notes
    accept = ""
    script = "train_ddp.py"
    count = SAMPLES

    def __init_subclass__(cls):
        cls.rows.append(cls)

    # ---- what a user writes -------------------------------------------------------------------------
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

    kind = torch.optim.SGD
    arguments = {"momentum": 0.9}

    def optimizer(self, net):
        return self.kind(net.parameters(), self.rate, **self.arguments)

    def plains_optimizer(self, net):
        return self.optimizer(net)

    def memory(self, net, train):
        """What the loop remembers, by name."""
        return {}

    def after(self, net, optimizer, step):
        """What the loop does after a step."""

    def begin(self, run):
        """Between `with` and `for`."""

    def loop(self, run):
        self.begin(run)
        for epoch in run.epochs():
            for batch in epoch:
                self.step(run, batch)
                if run.stepped:
                    self.after(run.net, run.optimizer, run.progress.step)
                if self.breaks and run.progress.epoch_over:
                    break
            self.report(run)

    def step(self, run, batch):
        run.step(*self.values(run, batch)["loss"])

    def report(self, run):
        run.report(**run.evaluate(lambda batch: self.values(run, batch)))

    def values(self, run, batch):
        return self.loss(run.model, batch.data)

    # ---- the same at each start ---------------------------------------------------------------------
    calls = 0
    last_call = 0

    def made(self):
        """The net; in the last call of its training this process is killed."""

        def count(*_):
            self.calls += net.training and torch.is_grad_enabled()
            if self.calls == self.last_call:
                signal.raise_signal(signal.SIGKILL)

        torch.manual_seed(1)
        net = self.net()
        if self.last_call:  # Stages wants no hook of the whole net
            part = net[0] if isinstance(net, nn.Sequential) else net
            part.register_forward_pre_hook(count)
        return net

    def sets(self):
        draws = torch.Generator().manual_seed(1)
        sets = [self.samples(self.sample(draws) for _ in range(count)) for count in (self.count, TESTED)]
        for samples in sets:
            samples.collate = self.collate
        return sets

    given = sets  # to a script

    # ---- without this project -----------------------------------------------------------------------
    def plain(self, epochs):
        """{what: number}; `epochs` are the ids of the samples of each batch of each epoch."""
        net = self.made()
        train, test = self.sets()
        optimizer = self.plains_optimizer(net)
        self.memory(net, train)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled="amp" in self.flags)
        found = {}
        step = 0
        for batches in epochs:
            for ids in batches:
                with autocast:
                    loss, count = self.loss(net, self.collate([train[i] for i in ids]))["loss"]
                (loss / count).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                self.after(net, optimizer, step)
                found[f"step {step}: loss"] = loss / count
            with torch.no_grad(), autocast:
                for name, value in self.evaluation(copy.deepcopy(net).eval(), test):
                    found[f"step {step}: val_{name}"] = value
        saved = net.state_dict()
        buffers = {name: buffer for name, buffer in net.named_buffers() if name in saved}
        return found | buffers | dict(net.named_parameters())

    def evaluation(self, net, test):
        sums = {}
        for sample in test:
            for name, pair in self.loss(net, self.collate([sample])).items():
                sums[name] = sums.get(name, 0) + torch.tensor(pair, dtype=torch.float64)
        return [(name, total / count) for name, (total, count) in sums.items()]

    def nothing(self, *_):
        return []


def mean_loss(net, batch):
    return F.cross_entropy(net(batch.x), batch.y)


# ---- the doors --------------------------------------------------------------------------------------
def flags_of(program, given):
    """As a person types them."""
    flags = given | {"lr": program.rate, "global_batch_size": BATCH} | program.only_script
    flags |= {flag: f"{FLAGS}:{flag}" for flag in program.own.split()}
    return [f"--{flag}={value}".rstrip("=") for flag, value in flags.items()]


def script(program, given, name="train_ddp.py"):
    sys.argv = [name, "--no-tensorboard", *flags_of(program, given)]
    runpy.run_path(str(ROOT / name), run_name="__main__")


def stages(program, given):
    script(program, given | DEVICES, "train_mp.py")


def replicas(program, given):
    script(program, given | DEVICES, "train_dp.py")


def loop(program, given):
    """In Elastic."""
    net = program.made()
    train, test = program.sets()
    given = given | {"net": net, "optimizer": program.optimizer(net), "dataset": train, "test_set": test}
    given["memory"] = program.memory(net, train)
    with elastic.Elastic(**given, batch_size=BATCH, tensorboard=False) as run:
        program.loop(run)


# ---- its life ---------------------------------------------------------------------------------------
def live(world, program, door, folder, last_call):
    """One rank of one life, to its end."""
    global now
    now = program
    sys.stdout = sys.stderr = open(folder / f"rank {world.rank}", "w")
    world = replace(world, devices=(torch.device(program.device),))
    at_home(world)
    elastic.leave = leave
    program.last_call = last_call * (world.rank == world.size - 1)
    given = {"run_dir": folder / "run", "epochs": 2, "log_every": 1}
    given["device"] = world.device.type
    given["save_every"] = 1 if world.size == 1 else 500  # else a survivor saves
    code = 0
    try:
        door(program, given | program.flags)
    except SystemExit as end:
        code = end.code
    except Exception:
        traceback.print_exc()
        code = 1
    if code:
        sys.stdout.flush()
        os._exit(code)


def leave(world):
    """fork_ranks ends them together; another run may follow."""
    world.barrier()
    if world.store and world.rank == 0:
        world.store.delete_key("lifelines")
    world.barrier()


def lived(program, door, folder, size, last_call=0):
    """(exit codes, what was said, the log) of so many processes."""
    folder.mkdir(exist_ok=True)
    codes = fork_ranks(size, live, program, door, folder, last_call, may_die=range(size))
    said = "".join((folder / f"rank {rank}").read_text() for rank in range(size))
    codes = [code or 0 for code in codes]
    log = rows(folder / "run") if (folder / "run/metrics.jsonl").exists() else []
    return codes, f"{size} processes ended with {codes}\n{said}", log


def trained(program, door, folder, plan):
    """({what: number}, what was said) of a run through these lives."""
    all_said = ""
    for size, last_call in plan:
        codes, said, log = lived(program, door, folder, size, last_call)
        all_said += said
        if codes != ([1] * (size - 1) + [-signal.SIGKILL] if last_call else [0] * size):
            raise Wrong(all_said)
    found = weights(folder / "run")
    for row in log:
        found |= {f"step {row['step']}: {name}": row[name] for name in row if name not in ("step", "time")}
    return found, all_said


def check_refusal(program, door, folder, size):
    codes, said, log = lived(program, door, folder, size)
    errors = re.findall(r"^error: .*(?:\n       .*)*", said, re.MULTILINE)
    if (
        2 not in codes
        or {*codes} - {1, 2}
        or not any(re.search(program.refused, error) for error in errors)
        or any(error.count("\n") > 2 for error in errors)
        or "Traceback" in said
        or log[program.right :]
    ):
        raise Wrong(f"wanted is a refusal before step {program.right + 1}: {program.refused}\n{said}")


def check_numbers(program, door, folder):
    alone = ((1, 0),)
    plan = alone if program.refused or door is replicas else program.lives
    found, _ = trained(program, door, folder / "killed", plan)
    tolerance = program.tolerance
    if program.draws:
        wanted, _ = trained(program, script, folder / "alone", alone)
        tolerance = 0
    else:
        wanted = program.plain([order(epoch) for epoch in range(2)])
    differences(wanted, found, tolerance)


def differences(wanted, found, tolerance):
    """Wrong, with the first ones."""
    lines = []
    for what, value in wanted.items():
        value = torch.as_tensor(value)
        number = torch.as_tensor(found.get(what, math.nan))
        apart = (number - value).abs().max().item() if number.shape == value.shape else math.inf
        largest = value.abs().max().item()
        if not apart <= tolerance * max(1, largest):
            lines.append(f"{what} is off by {apart:.3g}, the largest wanted is {largest:.3g}")
    if lines:
        raise Wrong("\n".join(lines[:8]))


def order(epoch):
    """The ids of the samples of each batch."""
    order = ElasticSampler(SAMPLES, BATCH)
    order.set_epoch(epoch)
    return list(order)
