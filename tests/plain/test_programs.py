"""Programs as users write them, each beside a loop in plain PyTorch (`Program.plain`).

A row is a subclass of Program, which is a classifier in the usual loop; it says what is different:

    class Clamped(Program):
        doors = "loop"                      # Elastic; "script" is train_ddp.py

        def after(self, net, optimizer, step):
            net[0].weight.data.clamp_(-0.2, 0.2)

Its run is killed twice, in worlds of 1, 3 and 2 processes. It must have the losses, the evaluations and the
weights of the plain loop, or say what is wrong: with `refused` in three lines before its first step, with
`told` in a warning. `red` marks a row that is not mended yet, with the number of the finding.
"""

import random
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import silent  # noqa: F401  (its rows)
import torch
import torch.nn.functional as F
from jobs import weights
from program import (
    SLICES,
    TESTED,
    Part,
    Program,
    Samples,
    Wrong,
    check_numbers,
    check_refusal,
    lived,
    loop,
    order,
    replicas,
    script,
    stages,
    trained,
)
from torch import nn
from torch.utils.data import default_collate

from common.errors import UserError
from common.extras.chosen import weights_of

RED = partial(pytest.mark.xfail, strict=True, raises=pytest.fail.Exception)


# ---- nets -------------------------------------------------------------------------------------------
class Classifier(Program):
    """As it is."""


class Unusual(Program):
    """An LSTM; weights that are normalised, tied, complex."""

    def net(self):
        def forward(net, x):
            return net.head((net.lstm(x[None])[0][0].cfloat() @ net.turn).abs())

        norms = nn.utils.parametrizations
        tied = norms.weight_norm(nn.Linear(8, 8))
        head = nn.Sequential(tied, nn.Tanh(), tied, norms.spectral_norm(nn.Linear(8, 3)))
        turn = nn.Parameter(torch.eye(8, dtype=torch.cfloat))
        return Part(forward, lstm=nn.LSTM(6, 8), head=head, turn=turn)


class FrozenNorm(Program):
    """A backbone in evaluation mode."""

    def net(self):
        backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout())
        return nn.Sequential(backbone.eval().requires_grad_(False), nn.Linear(8, 3))


class HeadTrains(Program):
    """A net in evaluation mode, of which a part is put into training mode."""

    doors = "loop"
    lives = ((2, 0),)

    def net(self):
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3)).eval()
        net[2].train()
        return net


class Lazy(Program):
    doors = "script"

    def net(self):
        norm = nn.LazyInstanceNorm1d(affine=True)  # it begins with ones, not with draws
        return nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten(), nn.Linear(6, 3))


class ActNorm(Program):
    """The first batch sets a weight, by its .data, which torch does not count as a change."""

    family = "ranks"

    def net(self):
        def forward(net, x):
            if net.training and not net.ready:
                net.shift.data = -x.mean(0)
                net.ready.fill_(True)
            return net.head(x + net.shift)

        shift = nn.Parameter(torch.zeros(6))
        return Part(forward, head=nn.Linear(6, 3), shift=shift, ready=torch.tensor(False))


class MaxNorm(Program):
    """Embeddings that a forward shortens once they are long: each rank those that it has seen."""

    refused = "changed by a forward"

    def net(self):
        words = nn.EmbeddingBag(20, 6, max_norm=3)
        words.weight.data.mul_(0.1)
        return nn.Sequential(words, nn.Linear(6, 3))

    def sample(self, draws):
        words = torch.randint(20, (4,), generator=draws)
        return words, words[0] % 3


TINY = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_labels": 3,
    **dict.fromkeys(["hidden_dropout_prob", "attention_probs_dropout_prob"], 0),
    **dict.fromkeys(["attn_pdrop", "embd_pdrop", "resid_pdrop"], 0),
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


class Pooler(Labels):
    """BERT with a pooler that is not used."""

    own = Program.own
    refused = "pooler"
    refused_at = (2,)

    def net(self):
        from transformers import BertConfig, BertModel

        def forward(net, **words):
            return SimpleNamespace(logits=net.head(net.bert(**words).last_hidden_state[:, 0]))

        return Part(forward, bert=BertModel(BertConfig(**TINY)), head=nn.Linear(8, 3))


class CausalWords(Program):
    """GPT-2 with its own loss, which shifts the labels: a dict, as common/README takes Hugging Face's."""

    def net(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(n_positions=8, **TINY))

    def sample(self, draws):
        words = torch.randint(20, (6,), generator=draws)
        return {"input_ids": words, "labels": words}

    def loss(self, net, batch):
        count = batch["labels"][:, 1:].numel()
        return {"loss": (net(**batch).loss * count, count)}


class CausalTask(CausalWords):
    """The same under --task tokens, which does not shift."""

    doors = "script"
    own = "model dataset optimizer"
    flags = {"task": "tokens"}
    refused = "shift"


class CausalWindows(CausalTask):
    """The data shifts."""

    flags = CausalTask.flags | SLICES
    refused = ""

    def sample(self, draws):
        words = super().sample(draws)["labels"]
        return {"input_ids": words[:-1], "labels": words[1:]}

    def loss(self, net, batch):
        return self.scores(net(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())


class AmpOutput(Labels):
    """A ModelOutput; the loss is float32 in a plain loop."""

    doors = "loop"
    flags = {"amp": "bf16"}
    tolerance = 2e-3


# ---- optimizers -------------------------------------------------------------------------------------
class MuonAndAdamW(Program):
    class kind(torch.optim.Optimizer):
        def __init__(self, weights, rate, **_):
            super().__init__(weights, {"lr": rate})
            weights = self.param_groups[0]["params"]
            self.muon = torch.optim.Muon(weights[::2], rate)
            self.adamw = torch.optim.AdamW(weights[1::2], rate)
            self.param_groups = self.muon.param_groups + self.adamw.param_groups

        def step(self):
            self.muon.step()
            self.adamw.step()


class HeldInTuple(MuonAndAdamW):
    """Its parts give each weight a gradient, as Muon's first versions do."""

    class kind(MuonAndAdamW.kind):
        def __init__(self, *given, **_):
            super().__init__(*given)
            self.parts = (vars(self).pop("muon"), vars(self).pop("adamw"))

        def step(self):
            for part in self.parts:
                for p in part.param_groups[0]["params"] if part.param_groups else ():
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                part.step()


class Clipped(Program):
    """In a hook of the optimizer, which sees the gradient of the whole net."""

    doors = "script stages loop"

    def optimizer(self, net):
        def clip(*_):
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)

        optimizer = super().optimizer(net)
        optimizer.register_step_pre_hook(clip)
        return optimizer


class LayerDecay(Program):
    """Each weight has its own rate, by its place in the net."""

    doors = "script stages"

    def optimizer(self, net):
        groups = [{"params": [p], "scale": 0.3**i} for i, p in enumerate(net.parameters())]
        return torch.optim.SGD(groups, self.rate)

    def plains_optimizer(self, net):
        optimizer = self.optimizer(net)
        for group in optimizer.param_groups:
            group["lr"] = self.rate * group["scale"]
        return optimizer


class ClippedEach(Program):
    """In hooks of the weights, which see the gradient of a share."""

    family = "cut"

    def net(self):
        net = super().net()
        for p in net.parameters():
            self.hook(p)
        return net

    def hook(self, p):
        p.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


class PostHook(ClippedEach):
    def hook(self, p):
        def clamp(p):
            p.grad.clamp_(-0.02, 0.02)

        p.register_post_accumulate_grad_hook(clamp)


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


class SparseSlices(SparseAdam):
    only_script = {"optimizer": "adagrad", "virtual_ranks": 4}
    kind = torch.optim.Adagrad


# ---- losses -----------------------------------------------------------------------------------------
class Diffusion(Program):
    """The loss draws time and noise."""

    draws = True
    flags = SLICES
    outputs = 6

    def loss(self, net, batch):
        x, _ = batch
        noise = torch.randn_like(x)
        error = net(x + torch.rand_like(x[:, :1]) * noise) - noise
        return {"loss": (error.square().sum(), len(x))}


class Vae(Diffusion):
    """The net draws."""

    rate = 0.01

    def net(self):
        def forward(net, x):
            mean = net.encoder(x)
            return mean, net.decoder(mean + torch.randn_like(mean))

        return Part(forward, encoder=nn.Linear(6, 2), decoder=nn.Linear(2, 6))

    def loss(self, net, batch):
        x, _ = batch
        mean, out = net(x)
        return {"loss": ((out - x).square().sum() + mean.square().sum() / 2, len(x))}


class OtherDraws(Diffusion):
    """Draws of random and numpy."""

    accept = "cut"  # these draws a rehearsal cannot silence
    doors = "script stages"

    def net(self):
        def forward(net, x):
            return net.inner(x) * random.random() + numpy.random.rand()

        return nn.Sequential(Part(forward, inner=nn.Linear(6, 8)), Part(forward, inner=nn.Linear(8, 3)))

    loss = Program.loss


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
    """A gradient of a gradient, in the evaluation too; and two forwards."""

    @torch.enable_grad()
    def loss(self, net, batch):
        x, y = batch
        loss, count = self.scores(net(x.requires_grad_()), y)["loss"]
        slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        return {"loss": (loss + slope.square().sum() + net(x.flip(1)).square().sum(), count)}


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


class Parts(Program):
    """A part of the net is called by itself, too."""

    doors = "script"

    def net(self):
        return Part(lambda net, x: net.head(x), head=nn.Linear(6, 3))

    def scores(self, out, y):
        return super().scores(out, y) | {"apart": (out.abs().sum(), len(y))}

    def loss(self, net, batch):
        x, y = batch
        return self.scores(net(x) + net.head(x.flip(1)), y)


class LabelColumn(Program):
    """Labels of [N, 1] under the default task."""

    doors = "script"
    own = "model dataset optimizer"
    refused = "shape"

    def sample(self, draws):
        x, y = super().sample(draws)
        return x, torch.tensor([y])


class Means(Program):
    """A sum of means, as nets for detection return it."""

    doors = "loop"

    def scores(self, out, y):
        return {"loss": ((F.cross_entropy(out, y) + out.square().mean()) * len(y), len(y))}

    def step(self, run, batch):
        loss, count = self.values(run, batch)["loss"]
        run.step(loss / count)


class Contrast(Program):
    """Each sample against the others of the batch."""

    doors = "script"
    family = "cut"
    outputs = 6

    def scores(self, out, y):
        loss = F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum")
        return {"loss": (loss, len(out))}


class SumOfAll(Contrast):
    """A sum that nothing divides."""

    def scores(self, out, y):
        return {"loss": (F.cross_entropy(out, y, reduction="sum"), 1)}


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


class PerClass(Program):
    """A number for each of a thousand classes."""

    doors = "script"

    def scores(self, out, y):
        return super().scores(out, y) | {
            f"recall of class {i}": (out[:, i % 3].sum(), len(y)) for i in range(1000)
        }


# ---- what a net remembers ---------------------------------------------------------------------------
class Sums(Program):
    """Buffers that are a count, a sum, and a table with a row for each word."""

    family = "cut"

    def net(self):
        def forward(net, x):
            out = net.head(x)
            if net.training:
                net.seen += len(x)
                net.total += out.detach().sum(0)
                net.bank[(x[:, 0] * 9).long() % 20] = out.detach()
            return out + net.bank.mean(0)

        buffers = {"seen": torch.tensor(0), "total": torch.zeros(3), "bank": torch.zeros(20, 3)}
        return Part(forward, head=nn.Linear(6, 3), **buffers)


class Mask(Program):
    """A buffer of the size of the batch."""

    refused = "mask"

    def net(self):
        def forward(net, x):
            net.mask = torch.ones(len(x), 1)
            return net.head(x * net.mask)

        return Part(forward, head=nn.Linear(6, 3), mask=torch.ones(1, 1))


class Counted(Program):
    """A counter that becomes a fraction: a checkpoint would round it."""

    refused = "count"

    def net(self):
        def forward(net, x):
            if net.training:
                net.count = net.count + 0.5
            return net.head(x) / net.count

        return Part(forward, head=nn.Linear(6, 3), count=torch.tensor(1))


class Annealed(Program):
    """A buffer that the loop changes after a step."""

    doors = "loop"

    def net(self):
        return Part(lambda net, x: net.head(x) / net.heat, head=nn.Linear(6, 3), heat=torch.tensor(2.0))

    def after(self, net, optimizer, step):
        net.heat *= 0.9


class AnnealedLate(Annealed):
    """A rank dies once it has done that, while another one waits for it."""

    late = True


class AnnealedBreaks(Annealed):
    """The loop over batches is left at the end of each epoch."""

    flags = SLICES
    breaks = True
    report = evaluation = Program.nothing


class AnnealedByHook(Annealed):
    doors = Program.doors
    after = Program.after

    def optimizer(self, net):
        optimizer = super().optimizer(net)
        optimizer.register_step_post_hook(lambda *_: net.heat.mul_(0.9))
        return optimizer


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

        return Part(forward, head=nn.Linear(6, 3), top=torch.tensor(self.top))

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


class Unreported(Teacher):
    """A life dies in an evaluation, and the next one begins with its report."""

    def values(self, run, batch):
        if self.last_call and run.state.progress.step == 5 and not run.net.training:
            self.die()
        return super().values(run, batch)


class UnreportedBreaks(Unreported):
    """The report that was due is followed by a break, too."""

    breaks = True


class BufferTeacher(Teacher):
    def net(self):
        net = super().net()
        weight = net.teacher.weight.detach()
        del net.teacher.weight
        net.teacher.register_buffer("weight", weight)
        return net


class EarlyTeacher(Teacher):
    """It follows in the forward."""

    doors = Program.doors
    refused = "teacher.weight is changed by a forward"
    after = Program.after

    def out(self, net, x):
        if net.training:
            Teacher.after(self, net, None, 0)
        return super().out(net, x)


class LateTeacher(EarlyTeacher):
    """It follows from the net's second forward on: the first one is like any other."""

    right = 1  # steps
    calls = 0

    def out(self, net, x):
        self.calls += net.training
        follows = net.training and self.calls > 1
        return (EarlyTeacher if follows else Teacher).out(self, net, x)


# ---- precision --------------------------------------------------------------------------------------
class Amp(Program):
    flags = {"amp": "bf16"}
    tolerance = 2e-3


class Bf16(Program):
    kind_of_weight = torch.bfloat16
    tolerance = 3e-2

    def net(self):
        return super().net().to(self.kind_of_weight)

    def loss(self, net, batch):
        x, y = batch
        return self.scores(net(x.to(self.kind_of_weight)).float(), y)


class Fp16(Bf16):
    kind_of_weight = torch.float16


class SlowAverages(Bf16):
    """A step of an average is less than half a unit of 16 bits."""

    flags = {"ema_decay": 0.999}
    evaluation = Program.nothing

    def check(self, run):
        if (weights(run)["optimizer 2.bias/ema"] == self.made()[2].bias).all():
            raise Wrong("the averages did not move")


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


class Curriculum(Program):
    """A dataset with set_epoch."""

    class samples(Samples):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x * (1 + self.epoch), y

    def plain(self, epochs):
        train, test = self.sets()
        self.sets = lambda: (train, test)
        self.after = lambda net, optimizer, step: train.set_epoch(step // len(epochs[0]))
        return super().plain(epochs)


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


class SkipsSlices(Skips):
    flags = Skips.flags | SLICES


class LittleMemory(Program):
    """A forward of more than eleven samples does not fit; and forwards of three."""

    own = "model dataset optimizer"
    flags = {"micro_batch_size": 3}

    def net(self):
        def forward(net, x):
            if len(x) > 11:
                raise MemoryError
            return net.head(x)

        return Part(forward, head=nn.Linear(6, 3))


class CutSchedule(Program):
    """--max-steps ends before the schedule does."""

    doors = "script"
    flags = {"max_steps": 7, "lr_schedule": "cosine"}
    told = "max.steps.*schedule|schedule.*max.steps"


# ---- loops ------------------------------------------------------------------------------------------
class Clamped(Program):
    doors = "loop"

    @torch.no_grad()
    def after(self, net, optimizer, step):
        for p in net.parameters():
            p.clamp_(-0.2, 0.2)


class Reported(Clamped):
    """A report saves before the loop has changed its weights."""

    flags = {"best": "score"}

    report = evaluation = Program.nothing

    def step(self, run, batch):
        super().step(run, batch)
        run.report(score=run.progress.step)


class Scheduler(Program):
    """A scheduler of torch."""

    doors = "loop"

    def optimizer(self, net):
        optimizer = super().optimizer(net)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return optimizer

    def after(self, net, optimizer, step):
        self.scheduler.step()


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


class AddedGroup(Unfrozen):
    def optimizer(self, net):
        return torch.optim.SGD(net[2].parameters(), self.rate)

    def after(self, net, optimizer, step):
        if step == 3:
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters()})


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


class MidEpoch(Program):
    """The best evaluation is one in the midst of an epoch."""

    doors = "loop"
    flags = {"best": "score", "save_every": 500}
    report = evaluation = Program.nothing

    def step(self, run, batch):
        super().step(run, batch)
        run.report(score=-abs(run.progress.step - 3))

    def check(self, run):
        if weights_of(run, "best")[1]["step"] != 3:
            raise Wrong("step 3 is not the best")


class EvaluatesFirst(Program):
    """An evaluation of the averages between a forward and its step."""

    doors = "loop"
    flags = {"ema_decay": 0.9}
    report = evaluation = Program.nothing

    def step(self, run, batch):
        loss, count = self.values(run, batch)["loss"]
        run.evaluate(lambda batch: self.values(run, batch))
        run.step(loss, count)


class Collects(Program):
    """The judge keeps what it sees."""

    doors = "loop"
    seen = 0

    def values(self, run, batch):
        self.seen = 0 if run.net.training else self.seen + len(batch.y)
        assert self.seen <= TESTED
        return super().values(run, batch)


class Peeks(Program):
    """It evaluates after each piece of a batch, of which ranks have different numbers."""

    doors = "loop"
    flags = {"micro_batch_size": 3}
    refused = "between two pieces"

    def loop(self, run):
        for batch in run:
            self.step(run, batch)
            run.evaluate(lambda batch: self.values(run, batch))


class Ids(Program):
    """The loop looks up the samples of a batch, of which each piece has its own."""

    doors = "loop"
    flags = {"micro_batch_size": 3}

    def values(self, run, batch):
        if batch.ids:
            train, _ = self.sets()
            x, _ = self.collate([train[i] for i in batch.ids])
            assert torch.equal(batch.x.cpu(), x)
        return super().values(run, batch)


def rows_by(*doors):
    """A test's parameters: each program by each of these doors that it may take."""
    return [
        pytest.param(row(), door, id=f"{row.__name__.lower()}-{door.__name__}", marks=marks(row))
        for row in Program.rows
        for door in doors
        if door.__name__ in row.doors and (not row.family or {size for size, _ in row.lives} == {1})
    ]


def marks(row):
    return [RED(reason=row.red)] * bool(row.red)


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


def test_a_loop_that_is_left_between_two_pieces_has_saved_the_step_before(tmp_path):
    class Left(Observed):
        flags = Observed.flags | {"save_every": 500}
        leaves = True
        pieces = 0

        def loop(self, run):
            for batch in run:
                self.step(run, batch)
                self.pieces += 1
                if self.leaves and self.pieces == 4 * 3 + 2:
                    break

    left = Left()
    alone = ((1, 0),)
    trained(left, loop, tmp_path / "left", alone)
    left.leaves = False
    found, _ = trained(left, loop, tmp_path / "left", alone)
    wanted, _ = trained(left, loop, tmp_path / "whole", alone)
    assert {name for name, value in wanted.items() if torch.as_tensor(found[name] != value).any()} == set()


@pytest.mark.parametrize("flags", [{}, {"virtual_ranks": 4}], ids=["replica", "slices"])
def test_a_batch_of_which_no_sample_can_be_read_moves_no_statistics(flags, tmp_path, run):
    class Unreadable(Program):
        class samples(Samples):
            def __getitem__(self, i):
                if len(self) > TESTED and i in order(0)[0]:
                    raise ValueError("unreadable")
                return super().__getitem__(i)

        def net(self):
            return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    program = Unreadable()
    program.flags = flags | {"bad_samples": "skip", "keep": 9, "max_steps": 4}
    codes, said, _ = lived(program, loop, tmp_path, 1)
    assert codes == [0], said
    saved, _ = weights_of(run, 1)
    assert not saved["0.running_mean"].any() and not saved["0.num_batches_tracked"], saved


def test_epochs_that_are_raised_under_a_schedule_are_said(tmp_path):
    program = Classifier()
    for epochs in (1, 2):
        program.flags = {"epochs": epochs, "lr_schedule": "cosine"}
        codes, said, _ = lived(program, script, tmp_path, 1)
        assert codes == [0], said
    assert "--epochs was 1, now the rate's schedule is that of 2" in said
