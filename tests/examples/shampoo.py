"""An optimizer with a list of matrices for each weight, inverted every other step."""

import torch
from torch import optim


class Shampoo(optim.Optimizer):
    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=0, sums=[torch.eye(n) * 0.1 for n in p.shape], roots=[None] * p.dim())
            gradient = p.grad
            for i, total in enumerate(state["sums"]):
                rows = p.grad.movedim(i, 0).flatten(1) if p.dim() > 1 else p.grad[:, None]
                total += rows @ rows.T
                if state["step"] % 2 == 0:
                    values, vectors = torch.linalg.eigh(total)
                    state["roots"][i] = vectors * values ** (-0.5 / p.dim()) @ vectors.T
                gradient = torch.tensordot(gradient, state["roots"][i], dims=[[0], [0]])
            state["step"] += 1
            p.sub_(gradient, alpha=self.param_groups[0]["lr"])


def optimizer(net):
    return Shampoo(net.parameters(), 0.1)
