"""Tasks of one's own: exact means, the same bits at any world; what cannot be is refused at the start."""

import pytest
import torch
from jobs import TESTS
from ranks import fork_ranks
from refusals import refusal
from samples import ALONE, Steps

from common.data import Batch, batches, load_data, map_tensors
from common.extras.fp16 import Scaler
from common.extras.tasks import loss_of
from common.models import build_model
from common.options import Options
from common.sampler import ElasticSampler
from common.training import evaluate, find_task


def options(name, **more):
    names = {"task": name, "model": f"{name}_net", "dataset": f"{name}_data"}
    spelled = {kind: f"{TESTS}/tasks.py:{value}" for kind, value in names.items()}
    few = {"workers": 0, "device": "cpu", "log_every": 1, "global_batch_size": 11}
    return Options(**spelled | few | more)


class Life:
    """What a script makes of its options, and its steps."""

    def __init__(self, opts, world=ALONE, double=False):
        self.opts = opts
        self.data = load_data(opts)
        self.task = find_task(opts)
        self.world = world
        net = build_model(opts, self.data)
        if double:
            net = net.double()
            fetch = type(self.data.train).fetch
            for part in (self.data.train, self.data.test):
                part.fetch = lambda *a, part=part: doubled(fetch(part, *a))
        n = len(self.data.train)
        self.steps = Steps(net, opts, world, split=self.data.train, samples=n, task=self.task)
        self.state = self.steps.state
        self.order = ElasticSampler(
            n, opts.global_batch_size, world.rank, world.size, opts.seed, slices=opts.virtual_ranks
        )

    def step(self, batch):
        return self.state.note(self.world.all_sum(self.steps.step(batch)))

    def epoch(self, most=99):
        self.state.net.train()
        found = batches(self.data.train, self.order, self.opts)
        return [self.step(batch) for batch, _ in zip(found, range(most), strict=False)]

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.state.net.state_dict().items()}

    def evaluation(self):
        return evaluate(self.steps.model, self.data.test, self.state, self.world, self.task)


def doubled(tree):
    return map_tensors(lambda x: x.double() if x.is_floating_point() else x, tree)


def sgd(name, **more):
    """Plain descent at rate 1: the weights move by the gradient."""
    return options(name, optimizer="sgd", lr=1.0, momentum=0.0, **more)


def without_dropout(net):
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return net


def assert_exact(found, wanted):
    """Of all that is wanted; there may be more."""
    found = {name: found[name] for name in wanted}
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# ---- what GPUs alone have: the scale of fp16 ---------------------------------
def one_epoch(world, scale):
    life = Life(sgd("padded", amp="fp16" if scale else "off"), world)
    if scale:
        life.state.scaler = Scaler("cpu", init_scale=1024.0)
    without_dropout(life.state.net)
    life.epoch(1)
    return life.weights()


@pytest.mark.parametrize("world", [1, 2])
def test_with_fp16_a_gradient_loses_its_scale_and_gets_its_count(world):
    before = build_model(options("padded"), load_data(options("padded"))).state_dict()
    (wanted,) = fork_ranks(1, one_epoch, False)
    for weights in fork_ranks(world, one_epoch, True):
        for name, tensor in wanted.items():
            moved = (tensor - before[name]).abs().max()
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0.01 * moved + 1e-6)


# ---- what is refused ----
OWN = """
import torch
def loss(net, batch):
    x, y = batch
    out = net(x)
    error = (out.squeeze(1) - y).square()
    last = len(y) == 8
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
        # in the first step
        ("return error.mean()", "", {}, "wanted each time"),
        ("return {'loss': (error.sum(), len(y)), 'n': torch.ones(2)}", "", {}, "n: numbers without a count"),
        ("return {'loss': (out.summ(), len(y))}", "", {}, "own.py, line 8"),
        (GOOD, "", {"best": "f1"}, "the task has no 'f1'"),
        (GOOD, "def finish(m): return m['f1']", {}, "own.py, line 9"),
        # in a later step
        ("return {'loss': (error.sum(), len(y))} | ({} if last else {'more': (1, 1)})", "", {}, "KeyError"),
        (
            "return {'loss': (error.sum(), len(y)), 'n': torch.ones(2 if last else 1).int()}",
            "",
            {},
            "one shape",
        ),
        ("return {'loss': (error.sum().item(), len(y))}", "", {}, "loss has no gradient, but counts 11"),
        ("return {'loss': (error.sum(), float('nan') if last else 1.0)}", "", {}, "the loss is nan"),
    ],
)
def test_a_task_that_cannot_work_ends_the_run_in_three_lines(tmp_path, body, more, given, words):
    with refusal(words, code=5 if "nan" in words else 2):
        life = Life(own_task(tmp_path, body, more, **given))
        life.epoch()
    assert "nan" not in words or life.state.invalid, "nothing is kept"


# ---- what is shown and kept -----------------------------------------------------------------------------
def test_a_mean_with_a_count_and_a_sum_without_one_are_refused():
    task = find_task(Options())
    x = torch.ones(3, requires_grad=True)
    with refusal("the loss is a mean"):
        task.minimised({"loss": (x.square().mean(), 3)})
    with refusal("the loss is a sum, of how many things"):
        loss_of(x.square().sum(), None, 3)
    assert loss_of(x.mean(), None, 3)[0] == 3 and loss_of(x.sum(), 3, 7) == (x.sum(), 3)


def test_a_count_of_zero_everywhere_moves_nothing_and_is_left_out():
    life = Life(sgd("padded"))
    before = life.weights()
    batch = life.data.train.fetch([0, 1])
    batch["y"].fill_(-100)
    record = life.step(Batch([([0, 1], batch)], 2))
    assert "loss" not in record and "acc" not in record and life.state.progress.step == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in life.weights().items())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["classify", "tokens"])
def test_sequences_have_the_mean_over_their_targets_or_over_those_that_count(name, training):
    opts = Options(task=name)
    task = find_task(opts)
    net = torch.nn.Embedding(7, 7).double().train(training)
    x, y = torch.randint(7, (2, 4, 9))
    counting = slice(None)
    if name == "tokens":
        y[:, ::2] = -100
        counting = slice(1, None, 2)
    out = net(x[:, counting]).flatten(0, 1)
    targets = y[:, counting].flatten()
    loss = torch.nn.functional.cross_entropy(out, targets).item()
    wanted = {"loss": loss, "acc": (out.argmax(1) == targets).double().mean().item()}
    for batch in ((x, y), {"input": x, "labels": y}):
        with torch.set_grad_enabled(training):
            values = task(net, batch)
        values.pop("predictions", None)
        assert task.metrics(task.counted(values)) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", ["classify", "tokens"])
def test_right_answers_are_counted_in_a_step_and_in_evaluations(name):
    task = find_task(Options(task=name))
    net = torch.nn.Embedding(7, 7)
    x = torch.randint(7, (2, 4))
    y = net(x).argmax(-1)  # all answers are right
    for training in (True, False):
        with torch.set_grad_enabled(training):
            assert task(net, (x, y))["acc"] == (8, 8)


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


def test_a_net_that_does_not_fit_the_data_is_a_mistake_and_no_crash():
    task = find_task(Options())
    samples = (torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64))
    with refusal("the net, on these samples: RuntimeError: mat1 and mat2 shapes"):
        task(torch.nn.Linear(7, 2), samples)
