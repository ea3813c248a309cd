"""Programs as users write them, each beside a loop in plain PyTorch (`Program.plain`).

A row is a subclass of Program, which is a classifier in the usual loop; it says what is different:

    class Decay(Program):
        doors = "loop"                      # Elastic; "script" is train_ddp.py

        def after(self, net, optimizer, step):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (step > 2)

Its run is killed twice, in worlds of 1, 3 and 2 processes. It must have the losses, the evaluations and the
weights of the plain loop, or say what is wrong: with `refused`, in three lines before its first step.

More programs: beside their plain loops in tests/examples; with a memory in tests/whole/test_memory.py; wrong
ones in tests/rehearse.
"""

import random

import numpy
import pytest
import silent  # noqa: F401  (its rows)
import torch
import torch.nn.functional as F
from program import (
    SLICES,
    TESTED,
    Part,
    Program,
    Samples,
    Wrong,
    check_numbers,
    check_refusal,
    headed,
    loop,
    replicas,
    script,
    stages,
    trained,
)
from torch import nn
from torch.utils.data import default_collate

from common.errors import UserError


# ---- nets -------------------------------------------------------------------------------------------
class Classifier(Program):
    """As it is."""


class Unusual(Program):
    """Weights that are normalised, tied, complex."""

    def net(self):
        def forward(net, x):
            return net.head((net.first(x).cfloat() @ net.turn).abs())

        norms = nn.utils.parametrizations
        tied = norms.weight_norm(nn.Linear(8, 8))
        head = nn.Sequential(tied, nn.Tanh(), tied, norms.spectral_norm(nn.Linear(8, 3)))
        turn = nn.Parameter(torch.eye(8, dtype=torch.cfloat))
        return Part(forward, first=nn.Linear(6, 8), head=head, turn=turn)


class FrozenNorm(Program):
    """A backbone in evaluation mode."""

    def net(self):
        backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout())
        return nn.Sequential(backbone.eval().requires_grad_(False), nn.Linear(8, 3))


class PartEvaluates(FrozenNorm):
    """The loop puts it there, once."""

    doors = "loop"

    def net(self):
        return super().net().train()

    def plains_optimizer(self, net):
        net[0].eval()
        return self.optimizer(net)

    def begin(self, run):
        run.net[0].eval()


class PartEvaluatesInEpochs(PartEvaluates):
    """At each epoch; and evaluations within one."""

    def loop(self, run):
        for epoch in run.epochs():
            self.begin(run)
            for batch in epoch:
                self.step(run, batch)
                run.evaluate(lambda batch: self.values(run, batch))
            self.report(run)


TINY = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_labels": 3,
    **dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0),
}


class Labels(Program):
    """BERT, with dicts and without a task of one's own."""

    own = "model dataset optimizer"

    def net(self):
        from transformers import BertConfig, BertForSequenceClassification

        return BertForSequenceClassification(BertConfig(**TINY))

    def sample(self, draws):
        words = torch.randint(1, 20, (5,), generator=draws)
        return {"input_ids": words, "attention_mask": words > 2, "labels": words[0] % 3}

    def loss(self, net, batch):
        words = dict(batch)
        y = words.pop("labels")
        return self.scores(net(**words).logits, y)


class CausalTask(Program):
    """GPT-2 under --task tokens, which does not shift the labels."""

    doors = "script"
    own = "model dataset optimizer"
    flags = {"task": "tokens"}
    refused = "shift"

    def net(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_positions=8, **TINY))

    def sample(self, draws):
        words = torch.randint(20, (6,), generator=draws)
        return {"input_ids": words, "labels": words}


class AmpOutput(Labels):
    """A ModelOutput; the loss is float32 in a plain loop."""

    doors = "loop"
    flags = {"amp": "bf16"}
    tolerance = 2e-3


# ---- optimizers -------------------------------------------------------------------------------------
class MuonAndAdamW(Program):
    """An optimizer of two, one of them in a tuple."""

    class kind(torch.optim.Optimizer):
        def __init__(self, weights, rate, **_):
            super().__init__(weights, {"lr": rate})
            weights = self.param_groups[0]["params"]
            self.muon = torch.optim.Muon(weights[::2], rate)
            self.others = (torch.optim.AdamW(weights[1::2], rate),)
            self.param_groups = self.muon.param_groups + self.others[0].param_groups

        def step(self):
            self.muon.step()
            self.others[0].step()


class Clipped(Program):
    """In a hook of the optimizer, which sees the gradient of the whole net."""

    doors = "script stages loop"

    def optimizer(self, net):
        def clip(*_):
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)

        optimizer = super().optimizer(net)
        optimizer.register_step_pre_hook(clip)
        return optimizer


class PostHook(Program):
    """Hooks of the weights, which see the gradient of a share."""

    family = "cut"

    def net(self):
        def clamp(p):
            p.grad.clamp_(-0.02, 0.02)

        net = super().net()
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(clamp)
        return net


class Langevin(Program):
    """An optimizer that draws."""

    draws = True
    doors = "script stages"
    flags = SLICES

    class kind(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            super().step()
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)


class SparseSgd(Program):
    doors = "script"
    own = "model dataset task"
    only_script = {"optimizer": "sgd", "momentum": 0}
    arguments = {}
    sparse = True

    def net(self):
        return nn.Sequential(nn.EmbeddingBag(20, 6, sparse=self.sparse), nn.Linear(6, 3))

    def sample(self, draws):
        words = torch.randint(20, (4,), generator=draws)
        return words, words[0] % 3


class SparseAdam(SparseSgd):
    """Torch has none for sparse gradients: the numbers are those of dense ones."""

    only_script = {"optimizer": "adam"}
    kind = torch.optim.Adam

    def plain(self, epochs):
        self.sparse = False
        return super().plain(epochs)


# ---- losses -----------------------------------------------------------------------------------------
class OtherDraws(Program):
    """Draws of random and numpy."""

    accept = "cut"  # these draws a rehearsal cannot silence
    draws = True
    flags = SLICES
    doors = "script stages"

    def net(self):
        def forward(net, x):
            return net.inner(x) * random.random() + numpy.random.rand()

        return nn.Sequential(Part(forward, inner=nn.Linear(6, 8)), Part(forward, inner=nn.Linear(8, 3)))


class Arcface(Program):
    """The loss has weights of its own."""

    refused = "part of the net"

    def net(self):
        self.centers = nn.Parameter(torch.eye(3))
        return super().net()

    def optimizer(self, net):
        return torch.optim.SGD([*net.parameters(), self.centers], self.rate)

    def scores(self, out, y):
        return super().scores(out @ self.centers, y)


class Slope(Program):
    """A gradient of a gradient, in the evaluation too; and a part of the net is called by itself."""

    def net(self):
        return headed(lambda net, x: net.head(x))

    @torch.enable_grad()
    def loss(self, net, batch):
        x, y = batch
        loss, count = self.scores(net(x.requires_grad_()), y)["loss"]
        slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        return {"loss": (loss + slope.square().sum() + net.head(x.flip(1)).square().sum(), count)}


class Boxes(Program):
    """Targets are dicts with any number of boxes."""

    outputs = 6

    def sample(self, draws):
        x, count = super().sample(draws)
        return x, {"boxes": x.expand(3, 6)[:count]}

    def collate(self, samples):
        return [*zip(*samples, strict=True)]

    def loss(self, net, batch):
        x, targets = batch
        errors = [row - y["boxes"] for row, y in zip(net(torch.stack(x)), targets, strict=True)]
        return {"loss": (torch.cat(errors).abs().sum(), sum(map(len, errors)))}


class FewBoxes(Program):
    """Samples with nothing to learn: the loss of a share of them has no gradient."""

    flags = {"micro_batch_size": 1}

    def scores(self, out, y):
        rows = [F.cross_entropy(out[i], y[i], reduction="sum") for i in y.nonzero()[:, 0]]
        return {"loss": (sum(rows, torch.zeros(())), len(rows))}


class FewBoxesSlices(FewBoxes):
    flags = {"virtual_ranks": 11}


class Column(Program):
    """Regression of [N, 1]; samples count what they weigh."""

    doors = "script stages replicas loop"
    outputs = 1

    def sample(self, draws):
        x, _ = super().sample(draws)
        return x, x[:1] + 5

    def scores(self, out, y):
        weight = y.sigmoid()
        return {"loss": ((weight * (out - y).square()).sum(), weight.sum())}


class ColumnPieces(Column):
    doors = "script"
    flags = {"micro_batch_size": 2}


class Autoencoder(Program):
    """Samples are one tensor, without a target."""

    doors = Column.doors

    def net(self):
        return nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))

    def sample(self, draws):
        return super().sample(draws)[0]

    def loss(self, net, batch):
        return {"loss": (F.mse_loss(net(batch), batch, reduction="sum"), len(batch))}


class LabelColumn(Program):
    """Labels of [N, 1] under the default task."""

    doors = "script"
    own = "model dataset optimizer"
    refused = "shape"

    def sample(self, draws):
        x, y = super().sample(draws)
        return x, torch.tensor([y])


class Adversarial(Program):
    """A backward to the inputs comes first."""

    doors = "script"

    @torch.enable_grad()
    def loss(self, net, batch):
        x, y = batch
        F.cross_entropy(net(x.requires_grad_()), y).backward()
        net.zero_grad()
        return self.scores(net((x + 0.1 * x.grad.sign()).detach()), y)


class AdversarialSlices(Adversarial):
    flags = SLICES
    refused = "backward|in two parts"


class RareExpert(Program):
    """An expert without a sample has no gradient: torch leaves it as it is."""

    kind = torch.optim.AdamW
    arguments = {"weight_decay": 0.5}
    refused = "rare"
    refused_at = (2,)
    right = 9

    def net(self):
        def forward(net, x):
            rare = x[:, :1] > 1.2
            return net.usual(x) + (rare * net.rare(x) if rare.any() else 0)

        return Part(forward, usual=nn.Linear(6, 3), rare=nn.Linear(6, 3))


class RareSlices(RareExpert):
    doors = "script"
    flags = SLICES
    refused = ""


# ---- what a net remembers ---------------------------------------------------------------------------
class Sums(Program):
    """A buffer that is a sum."""

    family = "cut"

    def net(self):
        def forward(net, x):
            out = net.head(x)
            if net.training:
                net.total += out.detach().sum(0)
            return out + net.total

        return headed(forward, total=torch.zeros(3))


class Mask(Program):
    """A buffer of the size of the batch."""

    refused = "mask"
    first = torch.ones(1, 1)

    def net(self):
        def forward(net, x):
            net.mask = self.next(net.mask, x)
            return net.head(x * net.mask)

        return headed(forward, mask=self.first)

    def next(self, mask, x):
        return torch.ones(len(x), 1)


class Counted(Mask):
    """A counter that becomes a fraction: a checkpoint would round it."""

    first = torch.tensor(1)

    def next(self, mask, x):
        return mask + 0.5


class Annealed(Program):
    """A buffer that the loop changes after a step."""

    doors = "loop"

    def net(self):
        return headed(lambda net, x: net.head(x) / net.heat, heat=torch.tensor(2.0))

    def after(self, net, optimizer, step):
        net.heat *= 0.9


class AnnealedBreaks(Annealed):
    """The loop over batches is left at the end of each epoch."""

    flags = SLICES
    breaks = True
    report = evaluation = Program.nothing


class Observed(Program):
    """A running mean that begins at infinity, as observers of quantization do."""

    accept = "cut"  # each slice has a largest number of its own
    draws = True
    flags = SLICES
    top = torch.inf

    def net(self):
        def forward(net, x):
            top = x.abs().amax()
            if net.training:
                net.top = torch.where(net.top.isfinite(), net.top.lerp(top, 0.1), top)
            return net.head(x / net.top)

        return headed(forward, top=torch.tensor(self.top))

    def scores(self, out, y):
        return {"loss": super().scores(out, y)["loss"]}


class ObservedFromNan(Observed):
    top = torch.nan


class Teacher(Program):
    """It follows the net after each step."""

    doors = "loop"

    def net(self):
        teacher = nn.Linear(6, 3).requires_grad_(False)
        return Part(lambda net, x: self.out(net, x), pupil=nn.Linear(6, 3), teacher=teacher)

    def out(self, net, x):
        return net.pupil(x) + net.teacher(x)

    @torch.no_grad()
    def after(self, net, optimizer, step):
        net.teacher.weight.lerp_(net.pupil.weight, 0.5)


class EarlyTeacher(Teacher):
    """It follows in the forward."""

    doors = Program.doors
    refused = "teacher.weight is changed by a forward"
    after = Program.after

    def out(self, net, x):
        if net.training:
            Teacher.after(self, net, None, 0)
        return super().out(net, x)


# ---- precision --------------------------------------------------------------------------------------
class Amp(Program):
    flags = {"amp": "bf16"}
    tolerance = 2e-3


class Bf16(Program):
    tolerance = 3e-2

    def net(self):
        return super().net().bfloat16()

    def loss(self, net, batch):
        x, y = batch
        return self.scores(net(x.bfloat16()).float(), y)


# ---- data, flags ------------------------------------------------------------------------------------
class CollateFn(Program):
    """A collate by its usual name."""

    @staticmethod
    def collate(samples):
        x, y = default_collate(samples)
        return 2 * x, y

    def given(self):
        sets = super().sets()
        for samples in sets:
            samples.collate_fn = vars(samples).pop("collate")
        return sets

    sets = given


class Levels(Samples):
    level = 1

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x * self.level, y


class Curriculum(Program):
    """A dataset with set_epoch."""

    class samples(Levels):
        def set_epoch(self, epoch):
            self.level = 1 + epoch

    def plain(self, epochs):
        train, test = self.sets()
        self.sets = lambda: (train, test)
        self.after = lambda net, optimizer, step: vars(train).update(level=1 + step // len(epochs[0]))
        return super().plain(epochs)


class CurriculumAtEnd(Curriculum):
    """The loop raises the level at the end of an epoch, and `memory` keeps it."""

    doors = "loop"

    class samples(Levels):
        def state_dict(self):
            return {"level": self.level}

        def load_state_dict(self, state):
            self.level = state["level"]

    def memory(self, net, train):
        self.train = train
        return {"data": train}

    def report(self, run):
        super().report(run)
        self.train.level += 1


class Skips(Program):
    """Samples that cannot be read, to train on and to test on."""

    flags = {"bad_samples": "skip"}

    class samples(Samples):
        def __getitem__(self, i):
            if i % 5 == 3:
                raise ValueError("unreadable")
            return super().__getitem__(i)

    def read(self, ids):
        return [i for i in ids if i % 5 != 3]

    def plain(self, epochs):
        return super().plain([map(self.read, batches) for batches in epochs])

    def evaluation(self, net, test):
        return super().evaluation(net, [test[i] for i in self.read(range(TESTED))])


class LittleMemory(Program):
    """A forward of more than eleven samples does not fit; and forwards of three."""

    own = "model dataset optimizer"
    flags = {"micro_batch_size": 3}

    def net(self):
        def forward(net, x):
            if len(x) > 11:
                raise MemoryError
            return net.head(x)

        return headed(forward)


# ---- loops ------------------------------------------------------------------------------------------


class Reported(Program):
    """A report saves before the loop has changed its weights."""

    doors = "loop"
    flags = {"best": "score"}
    report = evaluation = Program.nothing

    def step(self, run, batch):
        super().step(run, batch)
        run.report(score=run.progress.step)

    @torch.no_grad()
    def after(self, net, optimizer, step):
        for p in net.parameters():
            p.clamp_(-0.2, 0.2)


class Decay(Program):
    doors = "loop"

    def after(self, net, optimizer, step):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * (step > 2)


class Unfrozen(Program):
    doors = "loop"
    refused = "which weights train"
    right = 3

    def net(self):
        net = super().net()
        net[0].requires_grad_(False)
        return net

    def after(self, net, optimizer, step):
        net[0].requires_grad_(step > 2)


class Accumulated(Program):
    """A backward of its own before that of run.step."""

    doors = "loop"
    refused = "gradient"

    def step(self, run, batch):
        self.values(run, batch)["loss"][0].backward()
        super().step(run, batch)


class Nested(Program):
    """Two loops over one run."""

    doors = "loop"
    refused = "loops"
    right = 2

    def step(self, run, batch):
        super().step(run, batch)
        super().step(run, next(iter(run)))


class EvaluatesFirst(Program):
    """An evaluation of the averages between a forward and its step."""

    doors = "loop"
    flags = {"ema_decay": 0.9}
    report = evaluation = Program.nothing

    def step(self, run, batch):
        loss, count = self.values(run, batch)["loss"]
        run.evaluate(lambda batch: self.values(run, batch))
        run.step(loss, count)


class Peeks(Program):
    """It evaluates after each piece of a batch, of which ranks have different numbers."""

    doors = "loop"
    flags = {"micro_batch_size": 3}
    refused = "between two pieces"

    def loop(self, run):
        for batch in run:
            self.step(run, batch)
            run.evaluate(lambda batch: self.values(run, batch))


class Left(Observed):
    """The first life leaves its loop between two pieces of step 4."""

    doors = "loop"
    lives = (1, 0), (1, 0)

    def loop(self, run):
        goes_on = run.progress.step
        for epoch in run.epochs():
            for pieces, batch in enumerate(epoch, 1):
                self.step(run, batch)
                if pieces == 4 * 3 + 2 and not goes_on:
                    return
            self.report(run)


def rows_by(*doors):
    """A test's parameters: each program by each of these doors that it may take."""
    return [
        pytest.param(row(), door, id=f"{row.__name__.lower()}-{door.__name__}")
        for row in Program.rows
        for door in doors
        if door.__name__ in row.doors and (not row.family or {size for size, _ in row.lives} == {1})
    ]


@pytest.mark.parametrize("program, door", rows_by(script, stages, replicas, loop))
def test_a_program_has_the_numbers_of_a_plain_loop_or_is_refused(program, door, tmp_path):
    check(program, door, tmp_path)


def check(program, door, tmp_path):
    program.net()  # imports what it needs: here once, not in each rank
    sizes = program.refused_at if program.refused else ()
    try:
        for size in sizes:
            check_refusal(program, door, tmp_path / f"{size} processes", size)
        if 1 not in sizes:
            check_numbers(program, door, tmp_path)
    except (Wrong, UserError) as wrong:
        raise pytest.fail.Exception(str(wrong), pytrace=False) from None


def test_a_schedule_whose_end_moves_or_does_not_come_is_said(tmp_path):
    program = Classifier()
    for epochs in (1, 2):
        program.flags = {"epochs": epochs, "lr_schedule": "cosine", "max_steps": 7}
        _, said = trained(program, script, tmp_path, ((1, 0),))
    assert "--epochs was 1, now the rate's schedule is that of 2" in said
    assert "the rate's schedule is that of 2 epochs, --max-steps ends before it does" in said
