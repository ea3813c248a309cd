"""Tasks of one's own: exact means, the same bits at any world; what cannot be is refused at the start."""

import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import tasks
import torch
from jobs import TESTS
from ranks import fork_ranks
from refusals import refusal
from samples import share_of, state_of

from common.data import batches, load_data
from common.models import build_model
from common.options import Options
from common.pipeline import backward as staged
from common.pipeline import split
from common.sampler import ElasticSampler
from common.training import backward, distribute, evaluate, find_task, prepare
from common.training.progress import Progress
from common.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, (CPU,), "life")


def options(name, **more):
    names = {"task": name, "model": f"{name}_net", "dataset": f"{name}_data"}
    spelled = {kind: f"{TESTS}/tasks.py:{value}" for kind, value in names.items()}
    few = {"workers": 0, "device": "cpu", "log_every": 1, "global_batch_size": 11}
    return Options(**spelled | few | more)


class Life:
    """What a script makes of its options, and its steps."""

    def __init__(self, opts, world=ALONE, double=False, devices=1):
        self.opts = opts
        self.data = load_data(opts)
        self.task = find_task(opts)
        world = World(**(vars(world) | {"devices": (CPU,) * devices})).in_stages(opts.stages or 1)
        self.world = world
        net = build_model(opts, self.data)
        if double:
            net = net.double()
            fetch = type(self.data.train).fetch
            for part in (self.data.train, self.data.test):
                part.fetch = lambda *a, part=part: doubled(fetch(part, *a))
        if opts.script == "mp":
            self.run = staged
            self.model = split(net, opts, world, self.data, self.task)
            net = self.model.net
        else:
            self.run = backward
            net = prepare(net, opts, world, self.data, self.task)
            self.model = distribute(net, opts, world)
        stages = self.model if opts.script == "mp" else None
        n = len(self.data.train)
        self.state = state_of(net, opts, n, task=self.task, stages=stages)
        self.order = ElasticSampler(
            n, opts.global_batch_size, world.replica, world.replicas, opts.seed, slices=opts.virtual_ranks
        )

    def step(self, batch):
        totals = self.world.all_sum(self.run(self.model, batch, self.state, self.world))
        self.state.update(batch.size)
        return self.state.note(totals)

    def epoch(self, most=99):
        self.state.net.train()
        found = batches(self.data.train, self.order, self.opts)
        return [self.step(batch) for batch, _ in zip(found, range(most), strict=False)]

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.state.net.state_dict().items()}

    def evaluation(self):
        model = self.model if self.opts.script != "ddp" else self.state.net
        return evaluate(model, self.data.test, self.state, self.world)


def doubled(tree):
    from common.data import map_tensors

    return map_tensors(lambda x: x.double() if x.is_floating_point() else x, tree)


def sgd(name, **more):
    """Plain descent at rate 1: the weights move by the gradient."""
    return options(name, optimizer="sgd", lr=1.0, momentum=0.0, **more)


def without_dropout(net):
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return net


def one_step(world, name, **more):
    life = Life(sgd(name, **more), world, double=True)
    without_dropout(life.state.net)
    return life.epoch(1)[0]["loss"], life.weights()


def full_batch(name, size, clip=0.0):
    """The weights after one step by hand: the whole batch in one forward, its sum divided by its count."""
    opts = sgd(name, global_batch_size=size)
    data = load_data(opts)
    net = without_dropout(build_model(opts, data).double())
    ids = next(iter(ElasticSampler(len(data.train), size, seed=opts.seed)))
    found = getattr(tasks, name)(net, doubled(data.train.fetch(ids)))
    loss, count = found["loss"]
    (loss / count).backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
    moved = {n: p.detach() - (p.grad if p.grad is not None else 0) for n, p in net.named_parameters()}
    return moved, (loss / count).item()


def assert_exact(found, wanted):
    """Of all that is wanted; there may be more."""
    found = {name: found[name] for name in wanted}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", tasks.NAMES)
def test_every_job_has_the_mean_of_the_full_batch_at_any_world_and_micro_batch(name):
    for world, micro, clip in ((1, 3, 0.0), (5, 1, 0.0), (2, 0, 0.05)):
        wanted, loss = full_batch(name, 11, clip)
        step = partial(one_step, micro_batch_size=micro, clip_grad_norm=clip)
        for found, weights in fork_ranks(world, step, name):
            assert found == pytest.approx(loss, rel=1e-12), (world, micro)
            assert_exact(weights, wanted)


# ---- stages and replicas ------------------------------------------------------------------------------
@pytest.mark.parametrize("name", tasks.IN_STAGES)
def test_in_stages_a_job_has_the_mean_of_the_full_batch_and_its_evaluation(name):
    wanted, loss = full_batch(name, 11)
    ((_, _, metrics),) = fork_ranks(1, one_way, name)
    for world, more in ((4, {"stages": 2, "micro_batch_size": 2}), (1, {"devices": 2})):
        for ours, weights, judged in fork_ranks(world, partial(one_way, script="mp", **more), name):
            assert ours == pytest.approx(loss, rel=1e-12)
            assert judged == pytest.approx(metrics, rel=1e-6)
            assert_exact(wanted, weights)


def one_way(world, name, script="ddp", devices=1, **more):
    life = Life(sgd(name, script=script, **more), world, True, devices)
    return life.epoch(1)[0]["loss"], life.weights(), life.evaluation()


@pytest.mark.parametrize("name", [name for name in tasks.NAMES if name != "padded"])  # its dropout differs
def test_replicas_in_one_process_take_and_give_trees(name):
    ((loss, weights, metrics),) = fork_ranks(1, one_way, name)
    ((found, moved, judged),) = fork_ranks(1, one_way, name, "dp", 2)
    assert found == pytest.approx(loss, rel=1e-12) and judged == pytest.approx(metrics, rel=1e-12)
    assert_exact(moved, weights)


# ---- what GPUs alone have: the scale of fp16 ---------------------------------
def scaled(world, name):
    life = Life(sgd(name, amp="fp16"), world)
    life.state.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    without_dropout(life.state.net)
    life.epoch(1)
    return life.weights()


@pytest.mark.parametrize("world", [1, 2])
def test_with_fp16_a_gradient_loses_its_scale_and_gets_its_count(monkeypatch, world):
    def on_cpus(net, opts, world, data, task):
        task.try_out(net, data, opts, CPU)
        return net

    monkeypatch.setattr(sys.modules[__name__], "prepare", on_cpus)  # which refuses fp16 there
    wanted, _ = full_batch("padded", 11)
    before = build_model(options("padded"), load_data(options("padded"))).state_dict()
    for weights in fork_ranks(world, scaled, "padded"):
        for key, tensor in wanted.items():
            moved = (tensor - before[key]).abs().max()
            torch.testing.assert_close(weights[key].double(), tensor, rtol=0, atol=0.01 * moved + 1e-6)


# ---- what is refused ----
OWN = """
import torch
def loss(net, batch):
    x, y = batch
    out = net(x)
    error = (out.squeeze(1) - y).square()
    first = len(y) == 1
    {body}
{more}
"""


def own_task(tmp_path, body, more="", **given):
    (tmp_path / "own.py").write_text(OWN.format(body=body, more=more))
    return options("regression", **given | {"task": f"{tmp_path}/own.py:loss"})


GOOD = "return {'loss': (error.sum(), len(y))}"


@pytest.mark.parametrize(
    "body, more, given, words",
    [
        # at the start
        ("return error.mean()", "", {}, "wanted each time"),
        ("return {'loss': (error.sum(), len(y)), 'n': torch.ones(2)}", "", {}, "n: numbers without a count"),
        ("return {'loss': (out.summ(), len(y))}", "", {}, "own.py, line 8"),
        (GOOD, "", {"best": "f1"}, "the task has no 'f1'"),
        (GOOD, "def finish(m): return m['f1']", {}, "own.py, line 9"),
        # in a later step
        ("return {'loss': (error.sum(), len(y))} | ({'more': (1, 1)} if first else {})", "", {}, "KeyError"),
        (
            "return {'loss': (error.sum(), len(y)), 'n': torch.ones(2 if first else 1).int()}",
            "",
            {},
            "one shape",
        ),
        ("return {'loss': (error.sum().item(), len(y))}", "", {}, "loss has no gradient, but counts 11"),
        ("return {'loss': (error.sum(), 1.0 if first else float('nan'))}", "", {}, "the loss is nan"),
    ],
)
def test_a_task_that_cannot_work_ends_the_run_in_three_lines(tmp_path, body, more, given, words):
    with refusal(words, code=5 if "nan" in words else 2):
        life = Life(own_task(tmp_path, body, more, **given))
        life.epoch(1)
    assert "nan" not in words or life.state.spoiled, "nothing is kept"


@pytest.mark.parametrize("body", ["out = out + net(x)", "out = net(x.flip(0))", "out = net[0](x)"])
def test_in_stages_a_task_gets_the_output_for_the_inputs_of_the_batch_once_or_is_refused(tmp_path, body):
    life = Life(own_task(tmp_path, f"{body}; {GOOD}"))
    batch = life.data.train.fetch([0, 1])
    with refusal("calls the net once|not subscriptable"):
        life.task.answered(life.state.net(batch[0]), batch, life.state)


# ---- what is shown and kept -----------------------------------------------------------------------------
def test_finish_makes_numbers_of_whole_numbers_and_best_may_be_any_of_them():
    life = Life(options("segmentation", best="iou"))
    record = life.epoch(3)[-1]
    metrics = life.evaluation()
    assert list(record) == ["step", "epoch", "loss", "iou", "lr"] and 0 < metrics["val_iou"] < 1
    life.state.record_evaluation(metrics)
    life.state.record_evaluation(metrics | {"val_iou": metrics["val_iou"] / 2})
    assert life.state.progress.best == {"val_iou": metrics["val_iou"], "loss": metrics["val_loss"], "step": 3}


def test_a_mean_is_found_in_a_sum_and_a_sum_over_many_steps_costs_nothing():
    task = find_task(Options())
    x = torch.ones(3, requires_grad=True)
    task.check_sum(sum(x.sum() for _ in range(5000)))
    with refusal("the loss is a mean"):
        task.check_sum(x.sum() + x.square().mean())


def test_a_count_of_zero_everywhere_moves_nothing_and_is_left_out():
    life = Life(sgd("segmentation", global_batch_size=2))
    before = life.weights()
    x, _ = life.data.train.fetch([0, 1])
    record = life.step(share_of(x, torch.full((2, 6, 6), 255), life.opts))
    assert "loss" not in record and "iou" not in record and life.state.progress.step == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in life.weights().items())


@pytest.mark.parametrize("training", [True, False])
def test_tokens_has_the_mean_over_targets_that_count_and_the_perplexity(training):
    opts = Options(task="tokens")
    task = find_task(opts)
    net = torch.nn.Embedding(7, 7).double().train(training)
    x, y = torch.randint(7, (2, 4, 9))
    y[:, ::2] = -100
    out = net(x[:, 1::2]).flatten(0, 1)
    wanted = y[:, 1::2].flatten()
    loss = torch.nn.functional.cross_entropy(out, wanted).item()
    right = (out.argmax(1) == wanted).double().mean().item()
    for batch in ((x, y), {"input": x, "labels": y}):
        logged = SimpleNamespace(next_is_logged=True)
        values = task(net, batch, SimpleNamespace(net=net, opts=opts, task=task, progress=logged))
        metrics = task.metrics(task.add(task.zeros(CPU), values))
        assert metrics == pytest.approx({"loss": loss, "acc": right, "perplexity": math.exp(loss)}, rel=1e-9)


@pytest.mark.parametrize("name", ["classify", "tokens"])
def test_right_answers_are_counted_in_a_step_that_is_logged_and_in_evaluations(name):
    opts = Options(task=name, log_every=3)
    task = find_task(opts)
    net = torch.nn.Embedding(7, 7)
    x = torch.randint(7, (2, 4))
    y = net(x).argmax(-1)  # all answers are right
    state = SimpleNamespace(net=net, opts=opts, task=task, progress=Progress(opts, 99))
    for training in (True, False):
        net.train(training)
        for state.progress.step in range(6):
            right, count = task(net, (x, y), state)["acc"]
            shown = not training or state.progress.step in (2, 5)
            assert (right, count) == (8 if shown else 0, 8)


@pytest.mark.parametrize("slices", [0, 4])
def test_a_forward_of_which_nothing_counts_may_return_plain_zeros(tmp_path, slices):
    body = "return {'loss': %s if y.sum() > 5 * len(y) else (error.sum(), len(y))}"

    def steps(world, opts):
        life = Life(opts, world, double=True)
        return [record.get("loss") for record in life.epoch(4)], life.weights()

    def asked(zeros):
        return own_task(tmp_path, body % zeros, virtual_ranks=slices, micro_batch_size=0 if slices else 1)

    wanted, weights = fork_ranks(1, steps, asked("(error.sum() * 0, 0)"))[0]
    for world in (1, 2):
        for losses, found in fork_ranks(world, steps, asked("(0, 0)")):
            assert losses == pytest.approx(wanted, rel=1e-12) and losses[0]
            assert_exact(found, weights)
