"""Programs that are wrong without a word, each with the family that a rehearsal must tell it as.

What a row keeps in `self` a restart begins anew, as it does a variable of a script.
"""

import itertools
import math
import os
import random

import numpy as np
import silent
import test_programs
import torch
import torch.nn.functional as F
from program import SLICES, headed, mean_loss
from stage import Read, Rehearsed, around, row, wide
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import common.extras.tasks
import common.training.tasks


# ---- A: what is remembered outside ------------------------------------------------------------------
class Memory(Rehearsed):
    family = "memory"


class KlAnneal(Memory):
    doors = "script"

    def of_batch(self, out, y):
        self.n += 1
        return F.cross_entropy(out, y) + out.square().mean() * self.n / 20


row("KlAnnealSlices", KlAnneal, flags=SLICES)
row("KlAnnealLoop", KlAnneal, doors="loop")


class TaskScale(Memory):
    doors = "script"
    scale = 1.0

    def of_batch(self, out, y):
        loss = F.cross_entropy(out, y)
        self.scale = 0.8 * self.scale + 0.2 * loss.item()
        return loss / self.scale


class Enumerate(Memory):
    def loop(self, run):
        for i, batch in enumerate(run):
            run.step(F.cross_entropy(run.model(batch.x) / math.exp(-i / 20), batch.y))


class BankLoop(Memory):
    bank = torch.zeros(3, 3)

    def of_batch(self, out, y):
        loss = F.cross_entropy(out, y) + (out - self.bank[y]).square().mean()
        self.bank[y] = out.detach()
        return loss


class SwaLoop(Memory):
    averages = staticmethod(AveragedModel)

    def begin(self, run):
        self.mean = self.averages(run.net)

    def after(self, net, optimizer, step):
        self.mean.update_parameters(net)

    def judge(self, run, batch):
        return self.loss(self.mean, batch.data)


class EmaLoop(SwaLoop):
    def averages(self, net):
        return AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))


class EarlyStop(Memory):
    rate = 1.5

    def loop(self, run):
        best = bad = 0
        for epoch in run.epochs():
            for batch in epoch:
                self.step(run, batch)
            found = self.report(run)["val_acc"]
            bad = 0 if found > best else bad + 1
            best = max(best, found)
            if bad >= 2:
                break


# each step has a weight: a generator of the script draws it; a text is read on and on
row("Weighted", Memory, factor=np.random.default_rng(0).random)
row("OpenedFile", Memory, factor=itertools.cycle(range(1, 8)).__next__)


class Semi(Memory):
    """Other samples, one after another."""

    def begin(self, run):
        draws = torch.Generator().manual_seed(3)
        self.others = itertools.cycle(torch.randn(40, 6, generator=draws).split(8))

    def step(self, run, batch):
        run.step(mean_loss(run.model, batch) + run.model(next(self.others)).square().mean())


class NextOfLoader(Semi):
    def begin(self, run):
        draws = torch.Generator().manual_seed(3)
        self.others = iter(torch.utils.data.DataLoader(torch.randn(160, 6, generator=draws), 8))


class Hooked(Memory):
    """A hook of the optimizer counts."""

    doors = "script"
    arguments = {}
    seen = {}

    def optimizer(self, net):
        optimizer = super().optimizer(net)
        optimizer.register_step_pre_hook(self.hook)
        return optimizer

    def hook(self, optimizer, *_):
        optimizer.param_groups[0]["weight_decay"] = 0.05 * self.n
        self.n += 1


class OnWeights(Hooked):
    def hook(self, optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            p.old = 0.5 * getattr(p, "old", 0.0) + p.grad
            p.grad.copy_(p.old)


class CurriculumEnd(Memory):
    class samples(Read):
        level = 1

        def read(self, x):
            return x * self.level

    def report(self, run):
        super().report(run)
        run.data.train.dataset.level += 1


class RareFlip(Memory):
    class samples(Read):
        rng = np.random.default_rng(0)

        def read(self, x):
            return x.flip(0) if self.rng.random() < 0.3 else x


class ScheduleOfMyOwn(Memory):
    def after(self, net, optimizer, step):
        self.n += 1
        optimizer.param_groups[0]["lr"] = self.rate / (1 + self.n)


class PlateauBeside(Memory):
    rate = 1.0

    def begin(self, run):
        self.plateau = ReduceLROnPlateau(run.optimizer, patience=0, factor=0.3)

    def report(self, run):
        self.plateau.step(super().report(run)["val_loss"] + 0.5 * self.n)  # it grows
        self.n += 1


def cooling(in_training, heat):
    """A net whose outputs grow with each forward in this mode."""

    def forward(net, x):
        if net.training == in_training:
            net.heat *= 0.9
        return net.head(x) / net.heat

    return headed(forward, heat=heat)


class AttributeOfANet(Memory):
    doors = "script"

    def net(self):
        return cooling(True, 2.0)


class NotPersistent(Memory):
    def net(self):
        net = cooling(True, 2.0)
        del net.heat
        net.register_buffer("heat", torch.tensor(2.0), persistent=False)
        return net


class GrowingDropout(Memory):
    def net(self):
        return around(nn.Dropout(0.0))

    def after(self, net, optimizer, step):
        self.n += 1
        net[1].p = min(0.5, 0.05 * self.n)


class LookaheadBeside(Memory):
    def begin(self, run):
        self.slow = [p.detach().clone() for p in run.net.parameters()]

    @torch.no_grad()
    def after(self, net, optimizer, step):
        if step % 3 == 0:
            for slow, p in zip(self.slow, net.parameters(), strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class ReplayBuffer(Memory):
    past = []

    def step(self, run, batch):
        self.past.append((batch.x[:1], batch.y[:1]))
        x, y = self.past[len(self.past) // 2]
        run.step(mean_loss(run.model, batch) + 0.5 * F.cross_entropy(run.model(x), y))


class HardOnes(Memory):
    """Classes that were wrong before weigh more."""

    weights = torch.ones(3)

    def of_batch(self, out, y):
        weights = self.weights.clone()
        self.weights[y[out.argmax(1) != y]] += 0.1
        return F.cross_entropy(out, y, weight=weights)


class GradientBefore(Hooked):
    doors = "loop"

    def hook(self, optimizer, *_):
        for p in optimizer.param_groups[0]["params"]:
            now = p.grad.clone()
            p.grad += 0.5 * (now - self.seen.get(p, now))
            self.seen[p] = now


class PseudoLabels(Memory):
    """At the end of an epoch the net labels what the next one trains on, too."""

    x = torch.eye(6)
    y = torch.zeros(6).long()

    def step(self, run, batch):
        run.step(mean_loss(run.model, batch) + F.cross_entropy(run.model(self.x), self.y))

    def report(self, run):
        super().report(run)
        self.y = run.model(self.x).flip(1).argmax(1)


# ---- B: evaluations leave traces, in a plain loop ------------------------------------------------------
class Judged(Rehearsed):
    """A buffer that cools down in each evaluation."""

    family = "evaluation"

    def net(self):
        return cooling(False, torch.tensor(2.0))


class Observer(Judged):
    """It sees what is evaluated."""

    net = silent.Qat.net


# ---- C, F, G: what depends on the cut -------------------------------------------------------------------
class Cut(Rehearsed):
    family = "cut"


class MeanOverCount(Cut):
    """A mean, which is divided once more."""

    def step(self, run, batch):
        run.step(self.of_batch(run.model(batch.x), batch.y), count=len(batch.y))


def negative_mean(out, y):
    return -F.log_softmax(out, 1).gather(1, y[:, None]).mean()


def distilled(out, y):
    soft = F.kl_div(F.log_softmax(out / 2, 1), F.softmax(-out.detach(), 1), reduction="batchmean")
    return 0.7 * F.cross_entropy(out, y) + 0.3 * soft


def elbo(out, y):
    return F.cross_entropy(out, y) + 0.01 * out.square().mean()


def hardest(out, y):
    losses = F.cross_entropy(out, y, reduction="none")
    return losses.topk(math.ceil(0.6 * len(losses))).values.mean()


def cox(out, y):
    """It has the mean of the batch."""
    return F.cross_entropy(out - out.mean(0), y)


def contrast(out, y):
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def distances(out, y):
    same = y[:, None] == y
    apart = (out[:, None] - out).square().sum(2)
    return (same * apart + ~same * (1 - apart).clamp(min=0)).mean()


def covariance(out, y):
    centred = out - out.mean(0)
    cov = centred.T @ centred / len(out)
    return F.cross_entropy(out, y) + 0.05 * (cov - torch.eye(3)).square().sum()


def median(out, y):
    losses = F.cross_entropy(out, y, reduction="none")
    return torch.where(losses > losses.median(), losses, 0.1 * losses).mean()


def fixed_divisor(out, y):
    """The size of a batch is written into it."""
    return F.cross_entropy(out, y, reduction="none").sum() / 11


for loss in (negative_mean, distilled, elbo):
    row(loss.__name__, MeanOverCount, of_batch=staticmethod(loss))
for loss in (cox, contrast, distances, covariance, median, fixed_divisor):
    row(loss.__name__, Cut, of_batch=staticmethod(loss))
row("hardest", Cut, of_batch=staticmethod(hardest), net=wide)
row("hardest_by_a_task", Cut, of_batch=staticmethod(hardest), doors="script")


class PostHookScript(Rehearsed, test_programs.PostHook):
    doors = "script"


class DropPostHook(Rehearsed, test_programs.PostHook):
    def net(self):
        return nn.Sequential(super().net(), nn.Dropout(0.3))


class Sam(Cut):
    """The gradient where the loss is worse."""

    def step(self, run, batch):
        named = dict(run.net.named_parameters())
        gradients = torch.autograd.grad(mean_loss(run.net, batch), [*named.values()])
        worse = {name: named[name] + g for name, g in zip(named, gradients, strict=True)}
        run.step(F.cross_entropy(torch.func.functional_call(run.net, worse, (batch.x,)), batch.y))


class Roll(Cut):
    """Mixup with a neighbour in the batch."""

    def step(self, run, batch):
        run.step(F.cross_entropy(run.model(0.7 * batch.x + 0.3 * batch.x.roll(1, 0)), batch.y))


class OwnNorm(Cut):
    def net(self):
        return headed(lambda net, x: net.head((x - x.mean(0)) / (x.var(0, correction=0) + 1e-2).sqrt()))


class BnMean(Cut):
    """A mean beside a BatchNorm."""

    count = 44

    def net(self):
        return headed(lambda net, x: net.head(net.norm(x) - x.mean(0)), norm=nn.BatchNorm1d(6))


class WeightOfTheShare(Cut):
    """The gradient's length in a share."""

    def of_batch(self, out, y):
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient / gradient.norm())
        return F.cross_entropy(out, y)


class LrTimesWorld(Cut):
    def begin(self, run):
        run.optimizer.param_groups[0]["lr"] *= run.world.size


class Auc(Cut):
    """The judge collects scores, of which each process has its own."""

    def report(self, run):
        scores = []

        def judge(batch):
            scores.extend(run.model(batch.x)[:, 0].tolist())
            return self.values(run, batch)

        found = run.evaluate(judge)
        run.report(**found, spread=max(scores) - min(scores))


# ---- D: what the project does to a program alike in each run ---------------------------------------------
class RowsOfThisBatch(Rehearsed):
    """An optimizer that shrinks rows of a sparse gradient alone: here a gradient is dense."""

    family = "plain"
    net = test_programs.SparseSgd.net
    sample = test_programs.SparseSgd.sample
    sparse = True

    class kind(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            words = self.param_groups[0]["params"][0]
            rows = words.grad.coalesce().indices()[0] if words.grad.is_sparse else slice(None)
            words[rows] *= 0.9
            super().step()


# ---- E: between `with` and `for`; each process by itself -------------------------------------------------
class LoadsInside(Memory):
    def begin(self, run):
        draws = torch.Generator().manual_seed(2)
        for p in run.net.parameters():
            p.data.normal_(generator=draws)  # not counted as a change


class Ranks(Rehearsed):
    family = "ranks"


class InitByRank(Ranks):
    def begin(self, run):
        if not run.progress.step:
            torch.manual_seed(run.world.rank)
            run.net[2].weight.data.normal_()


class Moves(Ranks):
    """A process moves its weights after each step."""

    def step(self, run, batch):
        super().step(run, batch)
        with torch.no_grad():
            self.move(run, batch, run.net[0].weight)


class NoiseByRank(Moves):
    def move(self, run, batch, weight):
        draws = torch.Generator().manual_seed(100 * run.progress.step + run.world.rank)
        weight += 0.01 * torch.randn(weight.shape, generator=draws)


class PrunesByShare(Moves):
    def move(self, run, batch, weight):
        weight *= 1 - 0.01 * batch.x.abs().mean()


class RankZeroClamps(Moves):
    def move(self, run, batch, weight):
        if run.world.rank == 0:
            weight.clamp_(-0.1, 0.1)


class CentreOfTheShare(Ranks):
    """A weight that does not train is the mean of what came last."""

    def net(self):
        centre = nn.Parameter(torch.zeros(6), requires_grad=False)
        return headed(lambda net, x: net.head(x - net.centre), centre=centre)

    def step(self, run, batch):
        super().step(run, batch)
        run.net.centre.data.lerp_(batch.x.mean(0), 0.1)


class JudgeTrains(Ranks):
    """A judge moves a weight: each process judges other samples."""

    def judge(self, run, batch):
        run.net[0].weight.data.mul_(1 - 0.01 * batch.x.abs().mean())
        return self.values(run, batch)


# ---- what nothing seeds --------------------------------------------------------------------------------
class Random(Rehearsed):
    family = "random"


class UnseededNet(Random):
    def made(self):
        return self.net()


class InitInside(Random):
    def begin(self, run):
        if not run.progress.step:
            run.net[2].weight.data.normal_(generator=torch.Generator().manual_seed(torch.seed() % 9999))


row("SystemRandom", Random, factor=random.SystemRandom().random)
row("OsBytes", Random, factor=lambda self: 1 + os.urandom(1)[0] / 256, doors="script")


class FreshGenerator(Random):
    class samples(Read):
        def read(self, x):
            return x + 0.1 * np.random.default_rng().random()


# ---- refused, by an `if` that stays ----------------------------------------------------------------------
class Refused(Rehearsed):
    family = "refused"


class RateOfItsOwn(Refused):
    """An optimizer by flags that does not ask for --lr."""

    doors = "script"

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), 0.3)


class Twice(Refused):
    def step(self, run, batch):
        super().step(run, batch)
        super().step(run, batch)


class SumWithoutCount(Refused):
    def of_batch(self, out, y):
        return F.cross_entropy(out, y, reduction="sum")


class Unused(Refused):
    """By two processes: a weight has no part in the loss."""

    def net(self):
        return headed(lambda net, x: net.head(x), other=nn.Linear(6, 3))


class BnTail(Refused):
    """BatchNorm with a share of one sample: by two processes."""

    def net(self):
        return around(nn.BatchNorm1d(8))


# ---- what a guard refuses today: the same without the guard ----------------------------------------------
class Unguarded(Rehearsed):
    family = "cut"

    def made(self):
        common.training.TrainState.refuse_moved_weights = lambda self: None
        common.extras.tasks.reduced = common.training.tasks.reduced = lambda loss, how: False
        return super().made()


class EarlyTeacher(Unguarded, test_programs.EarlyTeacher):
    """A process without samples has no forward, in which the teacher follows."""

    family = "ranks"

    def out(self, net, x):
        if net.training:
            net.teacher.weight.data.lerp_(net.pupil.weight.data, 0.1 * len(x) / 11)
        return test_programs.Teacher.out(self, net, x)


row("MeanWithCount", Unguarded, step=MeanOverCount.step)
row("SumAsMean", Unguarded, of_batch=SumWithoutCount.of_batch)
