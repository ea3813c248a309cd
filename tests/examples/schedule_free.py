"""A schedule-free optimizer; its average is evaluated."""

import torch
import torch.nn.functional as F
from beside import TEST, WHOLE_TEST, evaluated
from torch import optim

OPTIONS = {"test_set": TEST}
mine = evaluated


class ScheduleFree(optim.Optimizer):
    """Weights are between z, which steps, and its average x."""

    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr, "k": 0, "sum": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] += 1
            weight = min(1.0, group["k"] / 3) ** 2
            group["sum"] += weight
            for p in group["params"]:
                state = self.state[p]
                z = state.setdefault("z", p.clone())
                x = state.setdefault("x", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, weight / group["sum"])
                p.copy_(z.lerp(x, 0.9))

    def loss(self, net, x, y):
        averages = {name: self.state[p].get("x", p) for name, p in net.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(net, averages, x), y, reduction="sum")


def optimizer(net):
    return ScheduleFree(net.parameters(), 0.5)


def seen(net, optimizer):
    return {"step 6: val_loss": optimizer.loss(net, *WHOLE_TEST) / len(TEST)}


def judge(run, batch):
    return {"loss": (run.optimizer.loss(run.net, batch.x, batch.y), len(batch.y))}
