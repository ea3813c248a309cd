"""Rows of programs that once went wrong in silence, and are right now.

An evaluation leaves nothing behind; an optimizer keeps what it likes.
"""

import torch
from program import FLAGS, Part, Program, headed
from timm.optim import create_optimizer_v2
from torch import nn


class Annealing(Program):
    """A term that grows with the step."""

    doors = "script"
    only_script = {"task": f"{FLAGS}:annealed"}
    own = "model dataset optimizer"
    at = 0

    def scores(self, out, y):
        loss, count = super().scores(out, y)["loss"]
        return {"loss": (loss + 0.1 * self.at * out.square().sum(), count)}

    def after(self, net, optimizer, step):
        self.at = step


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


class Heated(Part):
    """It has a number that follows the mode."""

    def train(self, mode=True):
        self.heat = 0.3 if mode else 1.0
        return super().train(mode)


class ModeFlag(Program):
    def net(self):
        return Heated(lambda net, x: net.head(x) / net.heat, head=nn.Linear(6, 3)).train()


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

        return headed(forward, top=torch.tensor(3.0))


# ---- float64, and what comes before the first batch -------------------------------------------------
class Stamps(Program):
    """Seconds since 1970, of which float32 holds every 128th."""

    doors = "script"
    own = "model dataset optimizer"

    def sample(self, draws):
        x, y = super().sample(draws)
        return x.double() * 50 + 1.7e9, y

    def net(self):
        return headed(lambda net, x: net.head(((x - 1.7e9) / 50).float()))


class LoadsInside(Program):
    """Weights are written once the run has taken its own."""

    doors = "loop"
    refused = "0.weight is changed"

    def loop(self, run):
        nn.init.normal_(run.net[0].weight)
        super().loop(run)


# ---- what an optimizer keeps ------------------------------------------------------------------------


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
