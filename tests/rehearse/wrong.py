"""Programs that are wrong without a word, each with the family that a rehearsal must tell it as."""

import itertools
import math
import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from stage import Program, Samples
from torch import nn

import common.training.tasks

# what these rows say of their place of birth: numbers.md has the letters


class Part(nn.Module):
    """A net in one line: a function of this module and its inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def mean_loss(net, batch):
    return F.cross_entropy(net(batch.x), batch.y)


# ---- A: what is remembered outside ------------------------------------------------------------------
class Memory(Program):
    family = "memory"
    n = 0


class KlAnneal(Memory):
    door = "script"

    def loss(self, net, batch):
        if net.training if hasattr(net, "training") else torch.is_grad_enabled():
            self.n += 1
        x, y = batch
        out = net(x)
        more = out.square().sum() * min(1, self.n / 20)
        return {"loss": (F.cross_entropy(out, y, reduction="sum") + more, len(y))}


class KlAnnealSlices(KlAnneal):
    flags = {"virtual_ranks": 3}


class TaskScale(Memory):
    door = "script"
    scale = 1.0

    def loss(self, net, batch):
        x, y = batch
        out = net(x)
        loss = F.cross_entropy(out, y, reduction="sum")
        if torch.is_grad_enabled():
            self.scale = 0.8 * self.scale + 0.2 * loss.item() / len(y)
        return {"loss": (loss / self.scale, len(y))}


class Enumerate(Memory):
    def loop(self, run):
        for i, batch in enumerate(run):
            run.step(F.cross_entropy(run.model(batch.x) / math.exp(-i / 20), batch.y))


class BankLoop(Memory):
    def loop(self, run):
        bank = torch.zeros(3, 3)
        for batch in run:
            out = run.model(batch.x)
            run.step(F.cross_entropy(out, batch.y) + (out - bank[batch.y]).square().mean())
            for label, row in zip(batch.y, out.detach(), strict=True):
                bank[label].lerp_(row, 0.1)


class SwaLoop(Memory):
    def begin(self, run):
        self.mean = torch.optim.swa_utils.AveragedModel(run.net)

    def after(self, run):
        self.mean.update_parameters(run.net)

    def report(self, run):
        run.report(**run.evaluate(lambda batch: self.loss(self.mean, batch.data)))


class EmaLoop(SwaLoop):
    def begin(self, run):
        self.mean = torch.optim.swa_utils.AveragedModel(
            run.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )


class EarlyStop(Memory):
    rate = 1.5

    def loop(self, run):
        best = bad = 0
        for epoch in run.epochs():
            for batch in epoch:
                self.step(run, batch)
            found = run.evaluate(lambda batch: self.values(run, batch))
            run.report(**found)
            bad = 0 if found["val_acc"] > best else bad + 1
            best = max(best, found["val_acc"])
            if bad >= 2:
                break


class Semi(Memory):
    def loop(self, run):
        draws = torch.Generator().manual_seed(3)
        unlabelled = torch.utils.data.DataLoader(torch.randn(40, 6, generator=draws), 8)
        for batch, x in zip(run, itertools.cycle(unlabelled), strict=False):
            run.step(mean_loss(run.model, batch) + run.model(x).square().mean())


class NextOfLoader(Memory):
    def loop(self, run):
        draws = torch.Generator().manual_seed(3)
        other = iter([torch.randn(8, 6, generator=draws) for _ in range(40)])
        for epoch in run.epochs():
            for batch in epoch:
                run.step(mean_loss(run.model, batch) + run.model(next(other)).square().mean())
            self.report(run)


class WdSchedule(Memory):
    door = "script"

    def optimizer(self, net):
        optimizer = super().optimizer(net)
        steps = itertools.count()

        def decay(optimizer, *_):
            optimizer.param_groups[0]["weight_decay"] = 0.05 * next(steps)

        optimizer.register_step_pre_hook(decay)
        return optimizer


class OnWeights(Memory):
    door = "script"

    def optimizer(self, net):
        def smooth(optimizer, *_):
            for p in net.parameters():
                p.old = 0.5 * getattr(p, "old", 0.0) + p.grad
                p.grad.copy_(p.old)

        optimizer = torch.optim.SGD(net.parameters(), self.rate)
        optimizer.register_step_pre_hook(smooth)
        return optimizer


class CurriculumEnd(Memory):
    class samples(Samples):
        level = 0

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x * (1 + self.level), y

    def report(self, run):
        super().report(run)
        run.data.train.dataset.level += 1


class RareFlip(Memory):
    class samples(Samples):
        def __init__(self, *given):
            super().__init__(*given)
            self.rng = np.random.default_rng(0)

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return (x.flip(0) if self.rng.random() < 0.3 else x), y


class ScheduleOfMyOwn(Memory):
    def after(self, run):
        self.n += 1
        run.optimizer.param_groups[0]["lr"] = self.rate / (1 + self.n)


class PlateauBeside(Memory):
    rate = 1.0

    def begin(self, run):
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0, factor=0.3)

    def report(self, run):
        found = run.evaluate(lambda batch: self.values(run, batch))
        run.report(**found)
        self.plateau.step(found["val_loss"] + 0.5 * self.n)  # it grows
        self.n += 1


class AttributeOfANet(Memory):
    door = "script"

    def net(self):
        def forward(net, x):
            if net.training:
                net.heat *= 0.9
            return net.head(x) / net.heat

        return Part(forward, head=nn.Linear(6, 3), heat=2.0)


class NotPersistent(Memory):
    def net(self):
        def forward(net, x):
            if net.training:
                net.heat.mul_(0.9)
            return net.head(x) / net.heat

        net = Part(forward, head=nn.Linear(6, 3))
        net.register_buffer("heat", torch.tensor(2.0), persistent=False)
        return net


class GrowingDropout(Memory):
    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3))

    def after(self, run):
        self.n += 1
        run.net[1].p = min(0.5, 0.05 * self.n)


class LookaheadBeside(Memory):
    @torch.no_grad()
    def after(self, run):
        self.n += 1
        if self.n == 1:
            self.slow = [p.clone() for p in run.net.parameters()]
        if self.n % 3 == 0:
            for slow, p in zip(self.slow, run.net.parameters(), strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class NumpyOfTheLoop(Memory):
    def loop(self, run):
        rng = np.random.default_rng(0)
        for batch in run:
            weight = float(rng.random())
            run.step(weight * mean_loss(run.model, batch))


class OpenedFile(Memory):
    """A text is read on and on."""

    def loop(self, run):
        lines = iter(range(1000))
        for batch in run:
            run.step(mean_loss(run.model, batch) * (1 + next(lines) % 7))


# ten that were made up without reading
class ReplayBuffer(Memory):
    def loop(self, run):
        past = []
        for batch in run:
            loss = mean_loss(run.model, batch)
            if past:
                x, y = past[len(past) // 2]
                loss = loss + 0.5 * F.cross_entropy(run.model(x), y)
            run.step(loss)
            past.append((batch.x[:1], batch.y[:1]))


class HardOnes(Memory):
    """Classes that were wrong before weigh more."""

    def loop(self, run):
        weights = torch.ones(3)
        for batch in run:
            out = run.model(batch.x)
            run.step(F.cross_entropy(out, batch.y, weight=weights))
            for label in batch.y[out.argmax(1) != batch.y]:
                weights[label] += 0.1


class GradientBefore(Memory):
    def optimizer(self, net):
        optimizer = torch.optim.SGD(net.parameters(), self.rate)
        before = {}

        def extrapolate(*_):
            for p in net.parameters():
                now = p.grad.clone()
                p.grad += 0.5 * (now - before.get(p, now))
                before[p] = now

        optimizer.register_step_pre_hook(extrapolate)
        return optimizer


class Thermostat(Memory):
    """The loss of the step before sets the temperature."""

    def loop(self, run):
        heat = 1.0
        for epoch in run.epochs():
            for batch in epoch:
                loss = F.cross_entropy(run.model(batch.x) / heat, batch.y)
                run.step(loss)
                self.n += 1
                heat = 1 + self.n / 10
            self.report(run)


class PseudoLabels(Memory):
    """At the end of an epoch the net labels what the next one trains on, too."""

    x = torch.linspace(-1, 1, 48).view(8, 6)
    y = None

    def step(self, run, batch):
        loss = mean_loss(run.model, batch)
        if self.y is not None:
            loss = loss + F.cross_entropy(run.model(self.x), self.y)
        run.step(loss)

    def report(self, run):
        super().report(run)
        with torch.no_grad():
            self.y = run.model(self.x).flip(1).argmax(1)


# ---- B: evaluations leave traces -----------------------------------------------------------------------
class Lora(nn.Linear):
    """It adds its low rank to the weight for evaluations."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, sizes[0]) / 3)
        self.up = nn.Parameter(torch.randn(sizes[1], 2) / 3)
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.weight.data += (1 - 2 * mode) * self.up.data @ self.down.data
            self.merged = not mode
        return self

    def forward(self, x):
        out = super().forward(x)
        return out if self.merged else out + x @ self.down.T @ self.up.T


class LoraLoop(Program):
    """Right: train() undoes what eval() has merged."""

    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Lora(8, 3))


class LoraScript(LoraLoop):
    door = "script"


class ModeFlag(Program):
    """Right: evaluations end with the net's own train()."""

    def net(self):
        class Net(nn.Linear):
            heat = 0.3

            def train(self, mode=True):
                self.heat = 0.3 if mode else 1.0
                return super().train(mode)

            def forward(self, x):
                return super().forward(x) / self.heat

        return Net(6, 3)


class FrozenBn(Program):
    """Right: the net's own train() is called."""

    count = 44

    def net(self):
        class Net(nn.Sequential):
            def train(self, mode=True):
                super().train(mode)
                self[1].eval()
                return self

        return Net(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class JudgeTrains(Program):
    """A judge moves a weight: each process judges other samples."""

    family = "ranks"

    def report(self, run):
        def judge(batch):
            with torch.no_grad():
                run.net[0].weight.mul_(1 - 0.01 * batch.x.abs().mean())
            return self.values(run, batch)

        run.report(**run.evaluate(judge))


# ---- C, F, G: what depends on the cut -------------------------------------------------------------------
class Cut(Program):
    family = "cut"


class NegMean(Cut):
    def step(self, run, batch):
        logits = F.log_softmax(run.model(batch.x), 1)
        run.step(-logits.gather(1, batch.y[:, None]).mean(), count=len(batch.y))


class Distill(Cut):
    def step(self, run, batch):
        out = run.model(batch.x)
        soft = F.kl_div(F.log_softmax(out / 2, 1), F.softmax(-out.detach(), 1), reduction="batchmean")
        run.step(0.7 * F.cross_entropy(out, batch.y) + 0.3 * soft, count=len(batch.y))


class Elbo(Cut):
    def step(self, run, batch):
        out = run.model(batch.x)
        run.step(F.cross_entropy(out, batch.y) * 1.0 + 0.01 * out.square().mean(), count=len(batch.y))


class PostHook(Cut):
    def net(self):
        def clip(p):
            p.grad.clamp_(-0.02, 0.02)

        net = super().net()
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(clip)
        return net


class PostHookScript(PostHook):
    door = "script"


class ClippedEach(Cut):
    def net(self):
        net = super().net()
        for p in net.parameters():
            p.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return net


class DropPostHook(PostHook):
    def net(self):
        return nn.Sequential(super().net(), nn.Dropout(0.3))


class Ohem(Cut):
    def step(self, run, batch):
        losses = F.cross_entropy(run.model(batch.x), batch.y, reduction="none")
        run.step(losses.topk(math.ceil(0.6 * len(losses))).values.mean())


class OhemScript(Cut):
    door = "script"

    def loss(self, net, batch):
        x, y = batch
        losses = F.cross_entropy(net(x), y, reduction="none")
        count = math.ceil(0.6 * len(losses))
        return {"loss": (losses.topk(count).values.sum(), count)}


class Sam(Cut):
    """The gradient where the loss is worse."""

    def step(self, run, batch):
        net = run.net
        named = dict(net.named_parameters())
        gradients = torch.autograd.grad(mean_loss(net, batch), [*named.values()])
        length = torch.sqrt(sum(g.square().sum() for g in gradients)) + 1e-12
        worse = {name: p + 0.1 * g / length for (name, p), g in zip(named.items(), gradients, strict=True)}
        run.step(F.cross_entropy(torch.func.functional_call(net, worse, (batch.x,)), batch.y))


class Cox(Cut):
    """The loss has the mean of the batch."""

    def step(self, run, batch):
        out = run.model(batch.x)
        run.step(F.cross_entropy(out - out.mean(0), batch.y))


class Contrast(Cut):
    outputs = 6

    def step(self, run, batch):
        out = run.model(batch.x)
        run.step(F.cross_entropy(out @ out.T, torch.arange(len(out))))


class ContrastScript(Cut):
    door = "script"
    outputs = 6

    def scores(self, out, y):
        return {"loss": (F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum"), len(out))}


class SumOfAll(Cut):
    door = "script"

    def scores(self, out, y):
        return {"loss": (F.cross_entropy(out, y, reduction="sum") / 11, 1)}


class Roll(Cut):
    """Mixup with a neighbour in the batch."""

    def step(self, run, batch):
        x = 0.7 * batch.x + 0.3 * batch.x.roll(1, 0)
        run.step(F.cross_entropy(run.model(x), batch.y))


class Distances(Cut):
    def step(self, run, batch):
        out = run.model(batch.x)
        same = batch.y[:, None] == batch.y
        apart = (out[:, None] - out).square().sum(2)
        run.step((same * apart + ~same * (1 - apart).clamp(min=0)).mean())


class Covariance(Cut):
    def step(self, run, batch):
        out = run.model(batch.x)
        centred = out - out.mean(0)
        cov = centred.T @ centred / len(out)
        run.step(F.cross_entropy(out, batch.y) + 0.05 * (cov - torch.eye(3)).square().sum())


class OwnNorm(Cut):
    def net(self):
        def forward(net, x):
            return net.head((x - x.mean(0)) / (x.var(0, correction=0) + 1e-2).sqrt())

        return Part(forward, head=nn.Linear(6, 3))


class BnMean(OwnNorm):
    """A mean beside a BatchNorm."""

    count = 44

    def net(self):
        def forward(net, x):
            return net.head(net.norm(x) - x.mean(0))

        return Part(forward, head=nn.Linear(6, 3), norm=nn.BatchNorm1d(6))


class Sums(Cut):
    """Buffers that are sums: a process adds its share."""

    def net(self):
        def forward(net, x):
            out = net.head(x)
            if net.training:
                net.total += out.detach().sum(0)
            return out + 0.01 * net.total

        net = Part(forward, head=nn.Linear(6, 3))
        net.register_buffer("total", torch.zeros(3))
        return net


class Median(Cut):
    def step(self, run, batch):
        losses = F.cross_entropy(run.model(batch.x), batch.y, reduction="none")
        run.step(torch.where(losses > losses.median(), losses, 0.1 * losses).mean())


class FixedDivisor(Cut):
    """The size of a batch is written into the loss."""

    def step(self, run, batch):
        losses = F.cross_entropy(run.model(batch.x), batch.y, reduction="none")
        run.step(losses.sum() / 11 + 0.0)


class LrTimesWorld(Cut):
    def begin(self, run):
        for group in run.optimizer.param_groups:
            group["lr"] = self.rate * run.world.size


class Auc(Cut):
    """The judge collects scores, of which each process has its own."""

    def report(self, run):
        scores = []

        def judge(batch):
            scores.extend(run.model(batch.x)[:, 0].tolist())
            return self.values(run, batch)

        found = run.evaluate(judge)
        run.report(**found, spread=max(scores) - min(scores))


class WeightOfTheShare(Cut):
    """The gradient's length in a share."""

    def net(self):
        def forward(net, x):
            out = net.head(x)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient / gradient.norm())
            return out

        return Part(forward, head=nn.Linear(6, 3))


# ---- D: what the project does to a program alike in each run ---------------------------------------------
class Plain(Program):
    """Right since large numbers of float64 stay as they are."""


class Stamps(Plain):
    """Time stamps in seconds, made small in the net: float32 has steps of 128."""

    door = "script"
    own = "model dataset optimizer"

    def net(self):
        def forward(net, x):
            return net.head(((x - 1.7e9) / 100).float())

        return Part(forward, head=nn.Linear(6, 3))

    def sample(self, draws):
        x, y = super().sample(draws)
        return 1.7e9 + 100 * x.double(), y

    def given(self):
        train, test = super().sets()
        return [torch.stack(part) if torch.is_tensor(part[0]) else torch.tensor(part)
                for samples in (train, test) for part in zip(*samples, strict=True)]  # fmt: skip


class StampsOfDatasets(Stamps):
    given = Program.sets


class LargeIds(Stamps):
    """Numbers of users above 2**24 in a table of float64."""

    def net(self):
        def forward(net, x):
            return net.head(net.words(x[:, 0].long() % 30) + x[:, 1:].float())

        return Part(forward, words=nn.Embedding(30, 5), head=nn.Linear(5, 3))

    def sample(self, draws):
        x, y = Program.sample(self, draws)
        x = x.double()
        x[0] = 2**24 + torch.randint(0, 1000, (), generator=draws).item()
        return x, y


class Milliseconds(Stamps):
    """Differences of large numbers, made up here."""

    def net(self):
        def forward(net, x):
            return net.head((x[:, 1:] - x[:, :1]).float() / 10)

        return Part(forward, head=nn.Linear(5, 3))

    def sample(self, draws):
        x, y = Program.sample(self, draws)
        return 1e8 + 10 * x.double(), y


class RateOfItsOwn(Program):
    """An optimizer by flags that does not ask for --lr."""

    family = "refused"
    door = "script"

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), 0.3)


# ---- E: between `with` and `for`; each process by itself -------------------------------------------------
class LoadsInside(Memory):
    def begin(self, run):
        draws = torch.Generator().manual_seed(2)
        run.net.load_state_dict(
            {k: torch.randn(t.shape, generator=draws) for k, t in run.net.state_dict().items()}
        )


class Ranks(Program):
    family = "ranks"


class InitByRank(Ranks):
    def begin(self, run):
        if not run.progress.step:
            torch.manual_seed(run.world.rank)
            nn.init.normal_(run.net[2].weight)


class NoiseByRank(Ranks):
    @torch.no_grad()
    def after(self, run):
        draws = torch.Generator().manual_seed(100 * run.progress.step + run.world.rank)
        for p in run.net.parameters():
            p += 0.01 * torch.randn(p.shape, generator=draws)


class PrunesByShare(Ranks):
    def step(self, run, batch):
        super().step(run, batch)
        with torch.no_grad():
            run.net[0].weight *= 1 - 0.01 * batch.x.abs().mean()


class RankZeroClamps(Ranks):
    @torch.no_grad()
    def after(self, run):
        if run.world.rank == 0:
            run.net[0].weight.clamp_(-0.1, 0.1)


class CentreOfTheShare(Ranks):
    """A weight that does not train is the mean of what came last."""

    def net(self):
        net = Part(lambda net, x: net.head(x - net.centre), head=nn.Linear(6, 3))
        net.centre = nn.Parameter(torch.zeros(6), requires_grad=False)
        return net

    def step(self, run, batch):
        super().step(run, batch)
        run.net.centre.data.lerp_(batch.x.mean(0), 0.1)


# ---- what nothing seeds --------------------------------------------------------------------------------
class Random(Program):
    family = "random"


class UnseededNet(Random):
    def made(self):
        return self.net()


class InitInside(Random):
    def begin(self, run):
        if not run.progress.step:
            nn.init.normal_(run.net[2].weight, generator=torch.Generator().manual_seed(torch.seed() % 9999))


class SystemRandom(Random):
    def step(self, run, batch):
        run.step(mean_loss(run.model, batch) * random.SystemRandom().random())


class OsBytes(Random):
    door = "script"

    def scores(self, out, y):
        loss = F.cross_entropy(out, y, reduction="sum")
        return {"loss": (loss * (1 + os.urandom(1)[0] / 256), len(y))}


class FreshGenerator(Random):
    class samples(Samples):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + 0.1 * np.random.default_rng().random(), y


# ---- refused, by an `if` that stays ----------------------------------------------------------------------
class Refused(Program):
    family = "refused"


class Mask(Refused):
    def net(self):
        def forward(net, x):
            net.mask = torch.ones(len(x), 1)
            return net.head(x * net.mask)

        net = Part(forward, head=nn.Linear(6, 3))
        net.register_buffer("mask", torch.ones(1, 1))
        return net


class LabelColumn(Refused):
    door = "script"
    own = "model dataset optimizer"

    def sample(self, draws):
        x, y = super().sample(draws)
        return x, torch.tensor([y])


class Twice(Refused):
    def step(self, run, batch):
        super().step(run, batch)
        super().step(run, batch)


class SumWithoutCount(Refused):
    def step(self, run, batch):
        run.step(F.cross_entropy(run.model(batch.x), batch.y, reduction="sum"))


class Unused(Refused):
    """By two processes: a weight has no part in the loss."""

    def net(self):
        return Part(lambda net, x: net.head(x), head=nn.Linear(6, 3), other=nn.Linear(6, 3))


class BnTail(Refused):
    """BatchNorm with a share of one sample: by two processes."""

    def net(self):
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


class Unfrozen(Refused):
    def net(self):
        net = super().net()
        net[0].requires_grad_(False)
        return net

    def after(self, run):
        run.net[0].requires_grad_(run.progress.step > 2)


class Accumulated(Refused):
    def step(self, run, batch):
        mean_loss(run.model, batch).backward()
        super().step(run, batch)


# ---- what a guard refuses today: the same without the guard ----------------------------------------------
class Unguarded(Program):
    family = "cut"

    def made(self):
        common.training.TrainState.refuse_moved_weights = lambda self: None
        common.training.tasks.reduced = lambda loss, how: False
        return super().made()


class ActNorm(Unguarded):
    """The first batch sets a weight."""

    family = "ranks"

    def net(self):
        def forward(net, x):
            if net.training and not net.ready:
                net.shift.data = -x.mean(0)
                net.ready.fill_(True)
            return net.head(x + net.shift)

        net = Part(forward, head=nn.Linear(6, 3), shift=nn.Parameter(torch.zeros(6)))
        net.register_buffer("ready", torch.tensor(False))
        return net


class EarlyTeacher(Unguarded):
    """It follows in the forward: a process without samples has none."""

    family = "ranks"

    def net(self):
        def forward(net, x):
            if net.training:
                net.teacher.weight.data.lerp_(net.pupil.weight.data, 0.1 * len(x) / 11)
            return net.pupil(x) + net.teacher(x)

        teacher = nn.Linear(6, 3).requires_grad_(False)
        return Part(forward, pupil=nn.Linear(6, 3), teacher=teacher)


class MeanWithCount(Unguarded):
    def step(self, run, batch):
        run.step(mean_loss(run.model, batch), count=len(batch.y))


class SumAsMean(Unguarded):
    family = "cut"

    def step(self, run, batch):
        run.step(F.cross_entropy(run.model(batch.x), batch.y, reduction="sum"))
