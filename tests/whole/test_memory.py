"""What a loop remembers has a home: kills at any place, turns, orders and evaluations leave no trace of it.

Loops of one's own run in forked ranks; `at` is where a rank is killed: (rank, step, place).
"""

import collections
import math
import signal

import numpy
import pytest
import torch
from jobs import CLEAN, audit, digest, steps_on_disk
from ranks import at_home, fork_ranks
from refusals import refusal
from silent import LowRank
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from common.data import Batch
from common.elastic import Elastic
from common.extras.all_ranks import warn_of_other_reports
from common.extras.memory import flat, same, unflat
from common.extras.own_data import as_input

X = torch.randn(46, 6, generator=torch.Generator().manual_seed(1))  # by 11: the last batch is short
POINTS = TensorDataset(X, (X[:, 0] > 0).long())


def live(world, job, folder, at=None):
    """One life of a job in this rank; what is left at its end."""
    at_home(world)

    def place(run, name):
        if at and (world.rank, run.progress.step, name) == at[:3]:
            for error in at[3:]:
                raise error
            signal.raise_signal(signal.SIGKILL)

    torch.manual_seed(0)
    own = {
        "run_dir": folder,
        "batch_size": 11,
        "epochs": 3,
        "dataset": POINTS,
        "tensorboard": False,
        "progress": "off",
        "log_every": 1,
        "audit": True,
        "device": "cpu",
        "save_seconds": 0,
        "virtual_ranks": 4,
    }
    try:
        return job(place, own)
    except SystemExit as end:
        return end.code


def train(own, net, before=lambda run, batch: None, end=lambda run: None, **more):
    """The usual loop, which may end `before` a step; returns the step that it has reached."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    with Elastic(net=net, optimizer=optimizer, **own | more) as run:
        for epoch in run.epochs():
            for batch in epoch:
                if before(run, batch):
                    return run.progress.step
                run.step(F.cross_entropy(run.model(batch.x), batch.y))
            end(run)
    return run.progress.step


def judge_of(run):
    def judge(batch):
        assert not batch.ids and batch.size == len(batch.y), "ids are of samples to train on"
        return {"acc": ((run.model(batch.x).argmax(1) == batch.y).sum(), batch.size)}

    return judge


# ---- kills leave no trace --------------------------------------------------------------------------
class Odd(torch.optim.SGD):
    """Keeps a list of a tensor and a tuple, and a count on itself."""

    count = None

    @torch.no_grad()
    def step(self, closure=None):
        self.count = (self.count or 0) + 1
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("kept", [torch.zeros_like(p), None])
            kept[0].mul_(0.5).add_(p.grad)
            kept[1] = (self.count, "odd" if self.count % 2 else "even")
            p.sub_(kept[0], alpha=self.param_groups[0]["lr"] * (1 + kept[1][0] % 3))


class Stopper:
    """A few lines of a user's; its centres change as in 2018: behind torch's back, by .data."""

    def __init__(self):
        self.seen = []
        self.centres = torch.zeros(2, 6)

    def move(self, step):
        self.centres.data[step % 2].mul_(0.9).add_(step)

    def look(self, value):
        self.seen.append(value)

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def everything(place, own):
    """A plateau and a stopper in memory, and an odd optimizer."""
    net = nn.Linear(6, 2)
    optimizer = Odd(net.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
    stopper = Stopper()
    kept = {"plateau": plateau, "stopper": stopper}
    with Elastic(net=net, optimizer=optimizer, memory=kept, **own) as run:
        for epoch in run.epochs():
            scale = torch.rand(())
            for batch in epoch:
                place(run, "before")
                loss = F.cross_entropy(run.model(scale * batch.x), batch.y)
                place(run, "forward")
                run.step(loss)
                if run.stepped:
                    place(run, "between")
                    stopper.move(run.progress.step)
                    place(run, "after")
            place(run, "ended")
            found = run.evaluate(judge_of(run))
            plateau.step(found["val_acc"])
            place(run, "end")
            stopper.look(found["val_acc"])
            run.report(**found)
    assert optimizer.count == 15 and len(stopper.seen) == 3
    return stopper.seen, optimizer.param_groups[0]["lr"]


def gan(place, own):
    """Two discriminator's turns and one of the generator for each batch."""
    net = nn.ModuleDict({"g": nn.Linear(3, 6), "d": nn.Linear(6, 1)})
    g, d = (torch.optim.Adam(part.parameters(), 1e-2) for part in net.values())
    with Elastic(net=net, optimizer=[d, d, g], cross_check=4, **own) as run:
        for batch in run:
            place(run, "before")
            fake = net["g"](torch.randn(len(batch.x), 3))
            if run.turn < 2:
                run.step((net["d"](fake.detach()) - net["d"](batch.x)).tanh().mean())
            else:
                run.step(-net["d"](fake).mean())
    return run.progress.step


def in_order(place, own):
    return train(own, nn.Linear(6, 2), lambda run, batch: place(run, "before"), order="given", cross_check=2)


def lora(place, own, layer=LowRank):
    net = layer(6, 2)
    first = net.weight.tolist()

    def judged(run):
        judge = judge_of(run)
        run.report(**run.evaluate(lambda batch: place(run, "judged") or judge(batch)))

    train(own, net, lambda run, batch: place(run, "before"), judged)
    assert first == net.weight.tolist(), "the frozen weight to the bit"


def prunes(place, own):
    """Makes weights less at each epoch's end: twice, or by another draw, would show."""

    def halve(run):
        with torch.no_grad():
            run.net.weight.mul_(torch.rand(()))
        place(run, "end")

    return train(own, nn.Linear(6, 2), end=halve)


LOOPS = {  # name: (loop, kills, steps lost)
    "memory, killed in a step": (everything, [(1, 3, "before"), (0, 6, "forward")], 0),
    "memory, killed after a step": (everything, [(1, 2, "between"), (1, 7, "after")], 0),
    "memory, an error after a step": (everything, [(1, 7, "after", ValueError("no server"))], 0),
    "memory, killed at an epoch's end": (everything, [(0, 5, "ended"), (1, 10, "end")], 0),
    "turns, killed between two": (gan, [(1, 17, "before"), (0, 30, "before")], 0),
    "the order as given": (in_order, [(1, 7, "before")], 0),
    "a LoRA, killed where it is merged": (lora, [(1, 5, "judged"), (0, 10, "before")], 0),
    "weights that change at an epoch's end": (prunes, [(1, 5, "end"), (1, 10, "end")], 5),
}


def run(job, folder, size=1, at=None):
    """(what the job returns, the digest of what it has left)."""
    found = fork_ranks(size, live, job, folder, at, may_die=range(size) if at else ())[0]
    return None if at else (found, digest(folder))


@pytest.mark.parametrize("case", LOOPS)
def test_kills_and_other_worlds_leave_no_trace_in_what_a_loop_does(tmp_path, case):
    job, kills, lost = LOOPS[case]
    for at in kills:
        run(job, tmp_path / "run", 2, at)
    assert run(job, tmp_path / "run", 3) == run(job, tmp_path / "unbroken")
    assert audit(tmp_path / "run") == CLEAN | {"lost": lost, "redone": lost}


def looks_first(place, own):
    """Evaluates before a step, as nanoGPT does, and then begins its loop over batches once more."""
    with Elastic(
        net=(net := nn.Linear(6, 2)), optimizer=torch.optim.SGD(net.parameters(), 0.1), **own
    ) as run:
        for batch in run:
            if run.progress.step == 8:
                run.report(acc=1.0)
                break
            run.step(F.cross_entropy(run.model(batch.x), batch.y))
        for batch in run:
            run.step(F.cross_entropy(run.model(batch.x), batch.y))


def test_the_best_evaluation_has_its_checkpoint_also_if_it_comes_before_a_step(tmp_path):
    run(looks_first, tmp_path / "run", 2)
    assert 8 in steps_on_disk(tmp_path / "run") and audit(tmp_path / "run") == CLEAN


def test_what_is_remembered_comes_back_as_it_was_whatever_its_dicts_and_keys_are():
    one, two, nan = torch.tensor([1.0, 2.0, math.nan]).unbind()
    held = {
        "default": collections.defaultdict(int, a=1),
        "counts": {(0, 1): 3, 1: one, "1": two},
        "block": {"bn.mean": one},
        "numpy": numpy.float32(0.5),
        "block.bn": {"mean": collections.OrderedDict(z=[1, (2, None)], a=nan)},
    }
    found = unflat(flat(held, "held"), held)
    assert same(flat(found, "found"), flat(held, "held"))
    assert found["default"]["new"] == 0 and [*found["block.bn"]["mean"]] == ["z", "a"]


# ---- what a loop is told -----------------------------------------------------------------------------
def mean_after_a_step(place, own):
    def before(run, batch):
        run.step(F.cross_entropy(run.model(batch.x), batch.y))
        run.mean(1.0)

    return train(own, nn.Linear(6, 2), before, virtual_ranks=0)


class Forgets(LowRank):
    def train(self, mode=True):
        self.merged &= not mode  # and the weight stays as it is
        return super().train(mode)


def forgets(place, own):
    return lora(place, own, Forgets)


@pytest.mark.parametrize(
    "job, words",
    [
        (mean_after_a_step, "run.mean after run.step"),
        (forgets, "net.eval() changes weight, and net.train() does not undo it"),
    ],
)
def test_a_mistake_in_a_loop_is_told_before_it_makes_wrong_numbers(tmp_path, capfd, job, words):
    assert fork_ranks(1, live, job, tmp_path / "run", may_die=[0]) == [2]
    assert words in capfd.readouterr().err


def test_a_mean_of_all_ranks_ends_the_loop_on_all(tmp_path):
    def stops(place, own):
        def ends(run, batch):
            return run.mean(float(len(batch.y))) < 3

        return train(own, nn.Linear(6, 2), ends, virtual_ranks=0)

    assert len({*fork_ranks(2, live, stops, tmp_path / "run")}) == 1


def test_numbers_that_differ_between_ranks_are_told_and_a_gather_has_all_rows(tmp_path, capfd):
    rows = []

    def reports(place, own):
        def end(run):
            rows.append(run.gather(torch.arange(2) + 10 * run.world.rank).tolist())
            run.report(auc=0.5 + run.world.rank)

        train(own, nn.Linear(6, 2), end=end)
        return rows

    assert fork_ranks(2, live, reports, tmp_path / "run") == [[[0, 1, 10, 11]] * 3] * 2
    assert capfd.readouterr().err.count("rank 0 reports val_auc 0.5, rank 1 1.5: rank 0's counts") == 1
    row = {"step": 3, "val_acc": math.nan}
    assert not warn_of_other_reports([row, dict(row)]), "a NaN that all report is one number"


# ---- small things ------------------------------------------------------------------------------------
def test_inputs_stay_float64_where_float32_would_make_two_numbers_one():
    stamps = torch.tensor([[1.7e9, 0.1], [1.7e9 + 1, 0.2]], dtype=torch.float64)
    assert as_input(stamps) is stamps
    assert as_input(torch.rand(3, 2, dtype=torch.float64)).dtype == torch.float32


def test_a_batch_that_is_a_dict_says_where_its_data_are():
    with refusal("a batch is a dict(.|\n)*take batch.data"):
        Batch([([1], {"words": torch.zeros(1)})], 1).x  # noqa: B018
