"""What a loop remembers has a home: kills at any place, turns, orders and evaluations leave no trace of it.

Loops of one's own run in forked ranks; `at` is where a rank is killed: (rank, step, place).
"""

import collections
import json
import math
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from jobs import CLEAN, audit
from ranks import fork_ranks
from refusals import refusal
from torch import nn
from torch.nn import functional as F

import common.elastic as house
from common.data import Batch
from common.elastic import Elastic
from common.extras.all_ranks import warn_of_other_reports
from common.extras.batch_norm import warn_of_one_sample
from common.extras.memory import flat, same, unflat
from common.extras.own_data import as_input
from common.options import Options
from common.training import find_task
from common.world import world as pinned


class Points(torch.utils.data.Dataset):
    """46 samples by 11: the last batch is short."""

    def __len__(self):
        return 46

    def __getitem__(self, i):
        x = torch.randn(6, generator=torch.Generator().manual_seed(i))
        return x, int(x[0] > 0)


class Stopper:
    """Five lines of a user's."""

    def __init__(self):
        self.best = 0.0
        self.bad = 0
        self.seen = []

    def look(self, value):
        self.bad = 0 if value > self.best else self.bad + 1
        self.best = max(self.best, value)
        self.seen.append(value)

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


class Centres(Stopper):
    """Class centres, changed as people did in 2018: behind torch's back, by .data."""

    def __init__(self):
        self.values = torch.zeros(2, 6)

    def look(self, step):
        self.values.data[step % 2].mul_(0.9).add_(step)


class Odd(torch.optim.SGD):
    """A slow weight made at the first step, lists, numbers and None in its state, a count on itself."""

    def __init__(self, params, **more):
        super().__init__(params, **more)
        self.k = 0
        self.word = "none yet"

    @torch.no_grad()
    def step(self, closure=None):
        self.k += 1
        self.word = f"step {self.k}"
        for group in self.param_groups:
            group["times"] = group.get("times", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(slow=p.clone(), n=0, last=None, two=[torch.zeros_like(p), 0.5])
                state["n"] += 1
                state["last"] = (state["n"], "odd" if self.k % 2 else "even")
                state["two"][0].mul_(state["two"][1]).add_(p.grad)
                p.add_(state["two"][0], alpha=-group["lr"] * (1 + 0.1 * (state["n"] % 3)))
                if self.k % 3 == 0:
                    p.lerp_(state["slow"], 0.5)
                    state["slow"].copy_(p)


def live(world, job, folder, at=None, **given):
    """One life of a job in this rank; what is left at its end."""
    world = replace(world, devices=(torch.device("cpu"),))
    house.join = lambda opts, placed: (pinned.pin(opts), world)[1]
    house.leave = lambda world: None

    def place(run, name):
        if at and (world.rank, run.progress.step, name) == tuple(at):
            signal.raise_signal(signal.SIGKILL)

    torch.manual_seed(0)
    own = {
        "run_dir": folder,
        "batch_size": 11,
        "epochs": 3,
        "dataset": Points(),
        "tensorboard": False,
        "progress": "off",
        "log_every": 1,
        "audit": True,
        "device": "cpu",
        "save_seconds": 0,
    }
    try:
        return job(place, own | given)
    except SystemExit as end:
        return end.code


def left_by(folder):
    newest = max((folder / "checkpoints").glob("step-*"))
    return json.loads((newest / "manifest.json").read_text())["digest"]


def run(job, folder, size=1, at=None):
    return fork_ranks(size, live, job, folder, at, may_die=range(size) if at else ())[0]


# ---- memory: kills at five places ------------------------------------------------------------------
def everything(place, own):
    """BatchNorm, dropout, averages, a plateau, a stopper and centres in memory, and an odd optimizer."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = Odd(net.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
    average = torch.optim.swa_utils.AveragedModel(net)
    stopper = Stopper()
    centres = Centres()
    kept = {"plateau": plateau, "average": average, "stopper": stopper, "centres": centres}
    with Elastic(
        net=net, optimizer=optimizer, memory=kept, virtual_ranks=2, **own | {"batch_size": 12}
    ) as run:
        for epoch in run.epochs():
            for batch in epoch:
                place(run, "before")
                loss = F.cross_entropy(run.model(batch.x), batch.y)
                place(run, "forward")
                run.step(loss)
                if run.stepped:
                    average.update_parameters(net)
                    place(run, "between")
                    centres.look(run.progress.step)
                    place(run, "after")
            place(run, "ended")
            found = run.evaluate(lambda batch: right(run.model(batch.x), batch.y))
            plateau.step(found["val_acc"])
            place(run, "end")
            stopper.look(found["val_acc"])
            run.report(**found)
    return [
        optimizer.k,
        optimizer.word,
        stopper.seen,
        optimizer.param_groups[0]["lr"],
        int(average.n_averaged),
    ]


def right(out, y):
    return {"acc": ((out.argmax(1) == y).sum(), len(y))}


def test_a_judge_has_the_size_of_its_batch_and_no_ids_which_are_of_training(tmp_path):
    def job(place, own):
        net = nn.Linear(6, 2)
        seen = []

        def judge(batch):
            seen.extend(batch.ids)
            return {"one": (len(batch.y), batch.size)}

        with Elastic(net=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), **own) as run:
            return run.evaluate(judge), seen

    assert run(job, tmp_path / "run") == ({"val_one": 1.0}, [])


PLACES = [
    [(1, 3, "before"), (0, 6, "forward")],
    [(1, 2, "between"), (1, 7, "after")],
    [(0, 4, "ended"), (1, 8, "end")],
]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory") / "unbroken"
    return run(everything, folder), left_by(folder)


@pytest.mark.parametrize("kills", PLACES, ids=["in a step", "after it", "at an epoch's end"])
def test_all_that_a_loop_remembers_goes_through_kills_and_other_worlds(tmp_path, unbroken, kills):
    for at in kills:
        run(everything, tmp_path / "run", 2, at)
    found = run(everything, tmp_path / "run", 2)
    assert (found, left_by(tmp_path / "run")) == unbroken
    assert unbroken[0][:2] == [12, "step 12"] and len(unbroken[0][2]) == 3
    assert audit(tmp_path / "run") == CLEAN


# ---- turns -----------------------------------------------------------------------------------------
def gan(place, own):
    """Two discriminator's turns and one of the generator for each batch."""
    generator = nn.Linear(3, 6)
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    net = nn.ModuleDict({"g": generator, "d": critic})
    d = torch.optim.Adam(critic.parameters(), 1e-2)
    g = torch.optim.Adam(generator.parameters(), 1e-2)
    with Elastic(net=net, optimizer=[d, d, g], virtual_ranks=4, cross_check=4, **own) as run:
        for batch in run:
            place(run, "before")
            fake = generator(torch.randn(len(batch.x), 3))
            if run.turn < 2:
                loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(batch.x)).mean()
            else:
                loss = F.softplus(-critic(fake)).mean()
            run.step(loss)
    return run.progress.step


def test_turns_go_through_a_kill_between_them_with_cross_checks_and_a_clean_audit(tmp_path):
    assert run(gan, tmp_path / "unbroken") == 45
    run(gan, tmp_path / "run", 2, (1, 17, "before"))
    run(gan, tmp_path / "run", 2, (0, 30, "before"))
    assert run(gan, tmp_path / "run", 3) == 45
    assert left_by(tmp_path / "run") == left_by(tmp_path / "unbroken")
    assert audit(tmp_path / "run") == CLEAN


def again(place, own):
    """The last steps of a run with turns once more, from its checkpoint in the midst of a batch."""
    source = own["run_dir"].with_name("run")
    (folder,) = (source / "checkpoints").glob("step-*17")
    return gan(place, own | {"resume": str(folder), "max_steps": 30})


def test_a_segment_of_a_run_with_turns_is_made_again_bit_for_bit(tmp_path):
    def short(place, own):
        return gan(place, own | {"keep_every": 17, "max_steps": 30, "keep": 9})

    run(short, tmp_path / "run", 2)
    run(again, tmp_path / "again")
    assert left_by(tmp_path / "again") == left_by(tmp_path / "run")


# ---- the order as given ------------------------------------------------------------------------------
def in_order(place, own):
    seen = []
    net = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with Elastic(net=net, optimizer=optimizer, order="given", virtual_ranks=4, cross_check=2, **own) as run:
        for batch in run:
            place(run, "before")
            seen += run.gradient.ids
            run.step(F.cross_entropy(run.model(batch.x), batch.y))
    return seen


def test_the_given_order_is_kept_by_every_promise(tmp_path):
    assert run(in_order, tmp_path / "unbroken") == [*range(46)] * 3
    run(in_order, tmp_path / "run", 2, (1, 7, "before"))
    run(in_order, tmp_path / "run", 3)
    assert left_by(tmp_path / "run") == left_by(tmp_path / "unbroken")
    assert audit(tmp_path / "run") == CLEAN


def test_what_is_remembered_comes_back_as_it_was_whatever_its_dicts_and_keys_are():
    one, two, nan = torch.tensor([1.0, 2.0, math.nan]).unbind()
    held = {
        "default": collections.defaultdict(int, a=1),
        "counts": {(0, 1): 3, 1: one, "1": two},
        "block": {"bn.mean": one},
        "block.bn": {"mean": two},
        "ordered": collections.OrderedDict(z=[1, (2, None)], a=nan),
    }
    found = unflat(flat(held, "held"), held)
    assert same(flat(found, "found"), flat(held, "held"))
    assert found["default"]["new"] == 0 and [*found["ordered"]] == ["z", "a"]


# ---- what ranks say to each other --------------------------------------------------------------------
def plain(place, own, inside=lambda run, batch: None, end=lambda run: None):
    net = nn.Linear(6, 2)
    with Elastic(net=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), **own) as run:
        for epoch in run.epochs():
            for batch in epoch:
                loss = F.cross_entropy(run.model(batch.x), batch.y)
                if inside(run, batch):
                    return run.progress.step
                run.step(loss)
            end(run)
    return run.progress.step


def test_a_loop_that_is_left_at_another_step_is_told(tmp_path, capfd):
    def leaves(place, own):
        return plain(place, own, lambda run, batch: run.world.rank == 1 and run.progress.step == 4)

    fork_ranks(2, live, leaves, tmp_path / "run", may_die=range(2))
    said = capfd.readouterr().err
    assert "rank 1 has left the loop at step 4, rank 0 goes on: all leave it at one step" in said


def test_a_mean_of_all_ranks_ends_the_loop_on_all_and_outside_of_its_place_it_is_refused(tmp_path, capfd):
    def stops(place, own):
        return plain(place, own, lambda run, batch: run.mean(float(len(batch.y))) < 3)

    assert len({*fork_ranks(2, live, stops, tmp_path / "run")}) == 1

    def late(place, own):
        net = nn.Linear(6, 2)
        with Elastic(net=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), **own) as run:
            for batch in run:
                run.step(F.cross_entropy(run.model(batch.x), batch.y))
                run.mean(1.0)

    assert fork_ranks(1, live, late, tmp_path / "late", may_die=[0]) == [2]
    assert "run.mean after run.step" in capfd.readouterr().err


def test_numbers_that_differ_between_ranks_are_told_and_a_gather_has_all_rows(tmp_path, capfd):
    rows = []

    def reports(place, own):
        def end(run):
            rows.append(run.gather(torch.arange(2) + 10 * run.world.rank).tolist())
            run.report(auc=0.5 + run.world.rank)

        plain(place, own, end=end)
        return rows

    assert fork_ranks(2, live, reports, tmp_path / "run") == [[[0, 1, 10, 11]] * 3] * 2
    assert capfd.readouterr().err.count("rank 0 reports val_auc 0.5, rank 1 1.5: rank 0's counts") == 1


def test_a_nan_that_all_ranks_report_is_one_number(capsys):
    row = {"step": 3, "val_acc": math.nan}
    assert not warn_of_other_reports([row, dict(row)]) and warn_of_other_reports(
        [row, row | {"val_acc": 0.5}]
    )


# ---- evaluations -----------------------------------------------------------------------------------
class Lora(nn.Module):
    """As Microsoft's loralib: eval() merges into the frozen weight, train() takes it out."""

    def __init__(self, forgets=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6), requires_grad=False)
        self.a = nn.Parameter(torch.randn(2, 6) * 0.1)
        self.b = nn.Parameter(torch.randn(2, 2) * 0.1)
        self.drop = nn.BatchNorm1d(6)
        self.merged = False
        self.forgets = forgets

    def train(self, mode=True):
        super().train(mode)
        self.drop.eval()
        if mode and self.merged and not self.forgets:
            self.weight.data -= self.b @ self.a
        if not mode and not self.merged:
            self.weight.data += self.b @ self.a
        self.merged = not mode
        return self

    def forward(self, x):
        own = 0 if self.merged else self.drop(x) @ (self.b @ self.a).T
        return x @ self.weight.T + own


def lora(place, own, forgets=False):
    net = Lora(forgets)
    first = net.weight.tolist()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    with Elastic(net=net, optimizer=optimizer, virtual_ranks=2, **own) as run:
        for epoch in run.epochs():
            for batch in epoch:
                place(run, "before")
                run.step(F.cross_entropy(run.model(batch.x), batch.y))
            found = run.evaluate(lambda batch: place(run, "judged") or right(run.model(batch.x), batch.y))
            run.report(**found)
    return first == net.weight.tolist(), net.drop.running_mean.tolist()


def test_a_lora_that_merges_trains_on_and_no_checkpoint_has_it_merged(tmp_path):
    whole = run(lora, tmp_path / "unbroken")
    assert whole == (True, [0.0] * 6), "the frozen weight to the bit; BatchNorm frozen by an override"
    run(lora, tmp_path / "run", 2, (1, 5, "judged"))
    run(lora, tmp_path / "run", 2, (0, 10, "before"))
    assert run(lora, tmp_path / "run", 2) == whole
    assert left_by(tmp_path / "run") == left_by(tmp_path / "unbroken")


def test_an_eval_whose_changes_train_does_not_undo_is_refused(tmp_path, capfd):
    def forgets(place, own):
        return lora(place, own, True)

    assert fork_ranks(1, live, forgets, tmp_path / "run", may_die=[0]) == [2]
    assert "net.eval() changes weight, and net.train() does not undo it" in capfd.readouterr().err


# ---- the end of an epoch, and before the loop ----------------------------------------------------------
def prunes(place, own):
    """Halves weights at each epoch's end: twice would show."""
    net = nn.Linear(6, 2)
    with Elastic(net=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), virtual_ranks=2, **own) as run:
        for epoch in run.epochs():
            for batch in epoch:
                run.step(F.cross_entropy(run.model(batch.x), batch.y))
            with torch.no_grad():
                net.weight.mul_(0.5)
            place(run, "end")
    return run.progress.step


@pytest.mark.parametrize("step", [5, 10])
def test_weights_that_change_at_the_end_of_an_epoch_change_once(tmp_path, step):
    run(prunes, tmp_path / "unbroken")
    run(prunes, tmp_path / "run", 2, (1, step, "end"))
    run(prunes, tmp_path / "run", 2)
    assert left_by(tmp_path / "run") == left_by(tmp_path / "unbroken")


def test_weights_that_are_written_between_with_and_the_loop_are_seen(tmp_path, capfd):
    def writes(place, own):
        net = nn.Linear(6, 2)
        with Elastic(net=net, optimizer=torch.optim.SGD(net.parameters(), 0.1), **own) as run:
            nn.init.normal_(net.weight)
            for batch in run:
                run.step(F.cross_entropy(run.model(batch.x), batch.y))

    assert fork_ranks(1, live, writes, tmp_path / "run", may_die=[0]) == [2]
    assert "weight is changed by a forward, or before it" in capfd.readouterr().err


# ---- small things ------------------------------------------------------------------------------------
def test_a_task_may_take_the_progress_as_its_third_argument(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def loss(net, batch, progress): return {'loss': (progress.step, len(batch[0]))}\n")
    task = find_task(Options(task=f"{path}:loss"))
    model = SimpleNamespace(progress=SimpleNamespace(step=7))
    assert task(model, (torch.zeros(3, 1), torch.zeros(3))) == {"loss": (7, 3)}


def test_inputs_stay_float64_where_float32_would_make_two_numbers_one():
    stamps = torch.tensor([[1.7e9, 0.1], [1.7e9 + 1, 0.2]], dtype=torch.float64)
    assert as_input(stamps) is stamps
    assert as_input(torch.rand(3, 2, dtype=torch.float64)).dtype == torch.float32


def test_a_batch_that_is_a_dict_says_where_its_data_are():
    with refusal("a batch is a dict(.|\n)*take batch.data"):
        Batch([([1], {"words": torch.zeros(1)})], 1).x  # noqa: B018


@pytest.mark.parametrize("size, told", [(1, 0), (2, 1)])
def test_a_share_of_one_sample_under_batch_norm_is_told_at_the_start(capsys, size, told):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    opts = Options(global_batch_size=12)
    warn_of_one_sample(net, opts, 50, SimpleNamespace(size=size))
    assert capsys.readouterr().err.count("a forward gets one sample, on which the BatchNorm 1") == told
