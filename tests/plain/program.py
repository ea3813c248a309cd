"""A program of a user's, the plain loop beside it, and its life through two kills in three worlds."""

import math
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from jobs import rows, weights
from ranks import fork_ranks
from torch import nn
from torch.utils.data import Dataset, default_collate

import common.run
import train_ddp
from common.elastic import Elastic
from common.errors import guarded
from common.options import parse_options
from common.sampler import ElasticSampler
from common.world import world as pinned

FLAGS = Path(__file__).with_name("flags.py")
SAMPLES = 46
BATCH = 11  # the last batch has 2 samples: one of three ranks has none
LIVES = (1, 4), (3, 5), (2, 0)  # (processes, the call of the loss in which the last of them is killed)
ALONE = ((1, 0),)
now = None  # the program that this process runs


class Samples(Dataset):
    """Sample i is a function of i."""

    classes = 3

    def __init__(self, program, first, count):
        self.program = program
        self.numbers = range(first, first + count)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return self.program.sample(torch.Generator().manual_seed(self.numbers[i]))

    def collate(self, samples):
        return self.program.collate(samples)


class Program:
    """A classifier in the usual loop. A subclass is a row, and says what is different."""

    rows = []
    doors = ("script", "loop")
    flags = {}  # of train_ddp.py, and arguments of Elastic
    own = ("model", "dataset", "task", "optimizer")  # given to train_ddp.py as functions
    rate = 0.1
    tolerance = 1e-4
    evaluates = True
    draws = (
        False  # wanted are the numbers of one process that is not killed; to the bit, with --virtual-ranks
    )
    refused = ""  # what the refusal says: a regular expression
    refused_at = (1, 2)  # processes
    right = 0  # the most steps before the refusal
    told = ""  # what a warning says: then the numbers may be others
    red = ""  # the finding that it waits for

    def __init_subclass__(cls):
        Program.rows.append(cls)

    # ---- what a user writes ----
    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def sample(self, draw):
        x = torch.randn(6, generator=draw)
        return x, int(x[:3].argmax())

    collate = staticmethod(default_collate)

    def loss(self, net, batch):
        x, y = batch
        return self.scores(net(x), y)

    def scores(self, out, y):
        right = (out.argmax(1) == y).sum()
        return {"loss": (F.cross_entropy(out, y, reduction="sum"), len(y)), "acc": (right, len(y))}

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), lr=self.rate, momentum=0.9)

    schedule = None

    def after(self, net, optimizer, step):
        """What a loop does after a step."""

    def loop(self, run):
        for batch in run:
            run.step(*self.task(run.model, batch.parts[0][1])["loss"])
            self.after(run.net, run.optimizer, run.state.step)
            if run.epoch_ended:
                run.report(**run.evaluate(self.judge(run)))

    def judge(self, run):
        return lambda batch: self.task(run.model, batch.parts[0][1])

    def check(self, run):
        """What else is wrong with the folder of the run; empty if nothing is."""
        return ""

    # ---- the same at each start ----
    def made(self):
        torch.manual_seed(1)
        return self.net()

    def sets(self):
        return Samples(self, 0, SAMPLES), Samples(self, 1000, 23)

    given = sets  # to train_ddp.py
    calls = 0
    last_call = 0

    def task(self, net, batch):
        """The loss; in its last call this process is killed."""
        if torch.is_grad_enabled():
            self.calls += 1
            if self.calls == self.last_call:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(net, batch)

    # ---- without this project ----
    def plain(self, epochs):
        """{what: number}; `epochs` are the ids of the samples of each batch of each epoch."""
        net = self.made()
        train, test = self.sets()
        optimizer = self.optimizer(net)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled="amp" in self.flags)
        clip = self.flags.get("clip_grad_norm", math.inf)
        decay = self.flags.get("ema_decay", 0.0)
        averages = [p.detach().float().clone() for p in net.parameters()]
        found = {}
        step = 0
        for batches in epochs:
            for ids in batches:
                if self.schedule:
                    for group in optimizer.param_groups:
                        group["lr"] = self.rate * self.schedule(step, len(epochs) * len(batches))
                with autocast:
                    loss, count = self.loss(net, self.collate([train[i] for i in ids]))["loss"]
                (loss / count).backward()
                nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                self.after(net, optimizer, step)
                found[f"step {step}: loss"] = loss / count
                for average, p in zip(averages, net.parameters(), strict=True):
                    average.lerp_(p.detach().float(), 1 - decay)
            if self.evaluates:
                for name, value in self.evaluation(net, test, averages if decay else None, autocast):
                    found[f"step {step}: val_{name}"] = value
        if decay:
            names = [f"optimizer {name}/ema" for name, _ in net.named_parameters()]
            found |= zip(names, averages, strict=True)
        return found | net.state_dict()

    @torch.no_grad()
    def evaluation(self, net, test, averages, autocast):
        modes = [(module, module.training) for module in net.modules()]
        own = [p.clone() for p in net.parameters()]
        for p, average in zip(net.parameters(), averages or own, strict=True):
            p.copy_(average)
        with autocast:
            values = self.loss(net.eval(), self.collate([test[i] for i in range(len(test))]))
        for p, weight in zip(net.parameters(), own, strict=True):
            p.copy_(weight)
        for module, mode in modes:
            module.training = mode
        return [(name, total / count) for name, (total, count) in values.items()]


# ---- the two doors ----------------------------------------------------------------------------------
def script(program, given):
    """As flags of train_ddp.py, through its main."""
    functions = {name: f"{FLAGS}:{name}" for name in program.own}
    if program.schedule:
        functions["lr_schedule"] = f"{FLAGS}:schedule"
    given = given | {"lr": program.rate, "global_batch_size": BATCH} | functions
    words = [f"--{name}={value}" for name, value in given.items()]
    with guarded():
        train_ddp.main(parse_options(None, ["--no-tensorboard", *words], "ddp"))


def loop(program, given):
    """In Elastic."""
    net = program.made()
    train, test = program.sets()
    with Elastic(
        net=net,
        optimizer=program.optimizer(net),
        dataset=train,
        test_set=test,
        batch_size=BATCH,
        schedule=program.schedule,
        tensorboard=False,
        **given,
    ) as run:
        program.loop(run)


# ---- its life ---------------------------------------------------------------------------------------
def live(world, program, door, folder, last_call):
    """One rank of one life, to its end."""
    global now
    now = program
    sys.stdout = sys.stderr = open(folder / f"said by {world.rank} of {world.size}", "w")
    common.run.join = lambda opts: (pinned.pin(opts), world)[1]
    common.run.leave = lambda world: None  # fork_ranks ends them together
    if world.rank == world.size - 1:
        program.last_call = last_call
    try:
        door(
            program,
            {"run_dir": folder / "run", "epochs": 2, "log_every": 1, "save_every": 1, "device": "cpu"}
            | program.flags,
        )
    except Exception:
        traceback.print_exc()
        raise


def lived(program, door, folder, size, last_call=0):
    """(exit codes, what each rank said) of so many processes."""
    folder.mkdir(exist_ok=True)
    codes = fork_ranks(size, live, program, door, folder, last_call, may_die=range(size))
    said = [(folder / f"said by {rank} of {size}").read_text() for rank in range(size)]
    return [code or 0 for code in codes], said


def trained(program, door, folder, lives=LIVES):
    """({what: number}, all that was said) of a run through these lives."""
    all_said = ""
    for size, last_call in lives:
        codes, said = lived(program, door, folder, size, last_call)
        all_said += "\n".join([f"---- {size} processes ended with {codes}", *said])
        wanted = [*[1] * (size - 1), -signal.SIGKILL] if last_call else [0] * size
        assert codes == wanted, all_said
    found = weights(folder / "run")
    for row in rows(folder / "run"):
        found |= {f"step {row['step']}: {name}": row[name] for name in row if name not in ("step", "time")}
    return found, all_said


def order():
    """The ids of each global batch of each epoch."""
    order = ElasticSampler(SAMPLES, BATCH)
    for epoch in range(2):
        order.set_epoch(epoch)
        yield list(order)


def differences(found, wanted, tolerance):
    """A line for each number that is another one, the worst first."""
    there = {value.data_ptr() for name, value in wanted.items() if name in found and torch.is_tensor(value)}
    lines = []
    for what, right in wanted.items():
        right = torch.as_tensor(right)
        if what not in found:
            if right.data_ptr() not in there:  # else it is tied to one that is
                lines.append((math.inf, f"{what} is not there"))
            continue
        number = torch.as_tensor(found[what])
        apart = (number - right).abs().max().item() if number.shape == right.shape else math.inf
        largest = right.abs().max().item()
        if not apart <= tolerance * max(1, largest):
            lines.append((apart, f"{what} is off by {apart:.3g}, the largest wanted is {largest:.3g}"))
    return [line for _, line in sorted(lines, reverse=True)]
