"""Rows of programs that once went wrong in silence, and are right now.

What a loop remembers has a home in `memory`; an evaluation leaves nothing behind; a loss is the mean that
people write; an optimizer keeps what it likes.
"""

import torch
import torch.nn.functional as F
from program import SLICES, TESTED, Held, Part, Program, Samples
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim.swa_utils import AveragedModel


class Mean:
    """The loop gives the mean."""

    doors = "loop"

    def step(self, run, batch):
        loss, count = self.values(run, batch)["loss"]
        run.step(loss / count)


# ---- losses that are means --------------------------------------------------------------------------
class Distill(Mean, Program):
    def net(self):
        self.teacher = nn.Linear(6, 3, dtype=torch.bfloat16)
        return super().net()

    def loss(self, net, batch):
        x, y = batch
        out = net(x)
        soft = (self.teacher(x.bfloat16()).float() / 2).softmax(1)
        apart = F.kl_div((out / 2).log_softmax(1), soft, reduction="batchmean")
        return {"loss": ((0.7 * F.cross_entropy(out, y) + 0.3 * 4 * apart) * len(y), len(y))}


class NegativeMean(Mean, Program):
    def scores(self, out, y):
        return {"loss": (-out.log_softmax(1).gather(1, y[:, None]).mean() * len(y), len(y))}


# ---- memory -----------------------------------------------------------------------------------------
class Annealing(Program):
    """A term that grows with the step."""

    only_script = {"task": f"{__file__.replace('silent', 'flags')}:annealed"}
    own = "model dataset optimizer"
    at = 0

    def scores(self, out, y):
        values = super().scores(out, y)
        loss, count = values["loss"]
        return values | {"loss": (loss + 0.1 * self.at * out.square().sum(), count)}

    def values(self, run, batch):
        self.at = run.progress.step
        return super().values(run, batch)

    def plain(self, epochs):
        self.after = lambda net, optimizer, step: setattr(self, "at", step)
        return super().plain(epochs)


class Averages(Program):
    """Torch's average beside the net, which is evaluated."""

    doors = "loop"

    def memory(self, net, train):
        self.average = AveragedModel(net)
        return {"average": self.average}

    def after(self, net, optimizer, step):
        self.average.update_parameters(net)

    def loss(self, net, batch):
        return super().loss(net if torch.is_grad_enabled() else self.average.module, batch)


class Remembers(Program):
    """A loop's counter."""

    doors = "loop"

    def memory(self, net, train):
        self.held = Held(count=0, bank=torch.zeros(3, 3))
        return {"held": self.held}

    def after(self, net, optimizer, step):
        self.held["count"] += 1


class Unlabelled(Remembers):
    """Other samples, one after another, for a term of the loss."""

    def loss(self, net, batch):
        values = super().loss(net, batch)
        if torch.is_grad_enabled():
            loss, count = values["loss"]
            at = self.held["count"]
            values["loss"] = (loss + net(torch.eye(6)[at % 6 : at % 6 + 1]).square().mean() * count, count)
        return values


class UnlabelledLate(Unlabelled):
    """A rank dies where it has counted, while another one waits for it."""

    late = True


class Bank(Remembers):
    """Centres of the classes, in one process."""

    family = "ranks"

    lives = (1, 4), (1, 0)

    def scores(self, out, y):
        values = super().scores(out, y)
        if torch.is_grad_enabled():
            loss, count = values["loss"]
            values["loss"] = (loss + (out - self.held["bank"][y]).square().sum(), count)
            self.seen = out.detach(), y
        return values

    def after(self, net, optimizer, step):
        self.held["bank"][self.seen[1]] = self.seen[0]


class DecaySchedule(Remembers):
    """A hook of the optimizer counts, and sets the weight decay."""

    after = Program.after

    def optimizer(self, net):
        optimizer = super().optimizer(net)
        optimizer.register_step_pre_hook(self.decay)
        return optimizer

    def decay(self, optimizer, *_):
        self.held["count"] += 1
        optimizer.param_groups[0]["weight_decay"] = 0.05 * self.held["count"]


class CurriculumAtEnd(Program):
    """The dataset has a level, which the loop raises at the end of an epoch."""

    doors = "loop"

    class samples(Samples):
        level = 1

        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x * self.level, y

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

    def evaluation(self, net, test):
        yield from super().evaluation(net, test)
        self.train.level += 1


# ---- evaluations ------------------------------------------------------------------------------------
class LowRank(nn.Linear):
    """As loralib has it: eval() adds what was learnt to the frozen weight, train() takes it out."""

    merged = False

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, sizes[0]))
        self.b = nn.Parameter(torch.zeros(sizes[1], 2))

    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.b.detach() @ self.a.detach()
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        out = super().forward(x)
        return out if self.merged else out + x @ self.a.T @ self.b.T


class Lora(Program):
    def net(self):
        return nn.Sequential(LowRank(6, 8), nn.Tanh(), nn.Linear(8, 3))


class LoraSlices(Lora):
    """Killed in the first step after an epoch."""

    doors = "script"
    draws = True
    flags = SLICES
    lives = (1, 21), (2, 0)


class ModeFlag(Program):
    """A number that follows the mode."""

    class kind_of_net(Part):
        def train(self, mode=True):
            self.heat = 0.3 if mode else 1.0
            return super().train(mode)

    def net(self):
        return self.kind_of_net(lambda net, x: net.head(x) / net.heat, head=nn.Linear(6, 3)).train()


class FrozenNormByTrain(ModeFlag):
    """BatchNorm that is frozen by an override, which a plain loop's net.train() calls."""

    class kind_of_net(Part):
        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

    def net(self):
        norm = nn.BatchNorm1d(6)
        return self.kind_of_net(lambda net, x: net.head(net.norm(x)), norm=norm, head=nn.Linear(6, 3))

    def plain(self, epochs):
        self.made = lambda: FrozenNormByTrain.made(self).train()
        return super().plain(epochs)


class Qat(Program):
    """Observers, which see an evaluation, too; its own numbers follow from its batches."""

    family = "evaluation"

    lives = (1, 4), (1, 0)
    evaluation = Program.nothing

    def net(self):
        def forward(net, x):
            net.top.lerp_(x.abs().amax(), 0.1)
            unit = net.top / 8
            return net.head((x / unit).round() * unit)

        return Part(forward, head=nn.Linear(6, 3), top=torch.tensor(3.0))


class Auc(Program):
    """A number of all scores of the test set."""

    doors = "loop"

    def report(self, run):
        self.seen = torch.zeros(0, 2)
        numbers = run.evaluate(lambda batch: self.values(run, batch))
        run.report(**numbers, auc=area(run.gather(self.seen)))

    def evaluation(self, net, test):
        self.seen = torch.zeros(0, 2)
        return [*super().evaluation(net, test), ("auc", area(self.seen))]

    def scores(self, out, y):
        if not torch.is_grad_enabled():
            self.seen = torch.cat([self.seen, torch.stack([out[:, 0], y == 0], 1)])
        return super().scores(out, y)


def area(seen):
    """How often the first class has the higher one of two scores."""
    assert len(seen) == TESTED
    yes, no = (seen[seen[:, 1] == which, 0] for which in (1, 0))
    return (yes[:, None] > no).double().mean()


# ---- float64, and what comes before the first batch -------------------------------------------------
class Stamps(Program):
    """Seconds since 1970, of which float32 holds every 128th."""

    doors = "script"
    own = "model dataset optimizer"

    def sample(self, draws):
        x, y = super().sample(draws)
        return x.double() * 50 + 1.7e9, y

    def net(self):
        return Part(lambda net, x: net.head(((x - 1.7e9) / 50).float()), head=nn.Linear(6, 3))


class StampsAsTensors(Stamps):
    def given(self):
        columns = [zip(*samples, strict=True) for samples in self.sets()]
        return [part for x, y in columns for part in (torch.stack(x), torch.tensor(y))]


class LoadsInside(Program):
    """Weights are written once the run has taken its own."""

    doors = "loop"
    refused = "0.weight is changed"

    def loop(self, run):
        nn.init.normal_(run.net[0].weight)
        super().loop(run)


# ---- what an optimizer keeps ------------------------------------------------------------------------
class Lookahead(Program):
    """Slow weights since the first step; numbers beside them, in the groups and in a list."""

    class kind(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            super().step()
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
                for p in group["params"]:
                    state = self.state[p]
                    slow = state.setdefault("slow", p.clone())
                    state.setdefault("seen", [None]).append((group["steps"], p.abs().max()))
                    if len(state["seen"]) % 3 == 0:
                        p.copy_(slow.lerp_(p, 0.5))


class OnItself(Program):
    class kind(torch.optim.SGD):
        steps = 0

        def step(self):
            self.steps += 1
            self.param_groups[0]["weight_decay"] = 0.1 * self.steps
            super().step()


class Timm(Program):
    doors = "script"
    rate = 0.01
    lives = (1, 4), (2, 0)
    opt = "lamb"

    def optimizer(self, net):
        return create_optimizer_v2(net, self.opt, self.rate)


for name in "adabelief adan adamp madgrad laprop mars adopt lookahead_adamw".split():
    type(f"Timm_{name}", (Timm,), {"opt": name})


class Warmed(Program):
    """Step sizes that begin with the rate of the first step, which a schedule lowers."""

    doors = "loop"
    kind = torch.optim.Rprop
    arguments = {}

    @staticmethod
    def warm(step, total=0):
        return min(1, (step + 1) / 4)

    def plains_optimizer(self, net):
        optimizer = self.optimizer(net)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.warm)
        self.after = lambda *_: scheduler.step()
        return optimizer


Warmed.flags = {"schedule": Warmed.warm}


class WarmedByFlags(Warmed):
    doors = "script"
    own = "model dataset task optimizer lr_schedule"
    flags = {}
    kind = torch.optim.ASGD
