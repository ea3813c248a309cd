"""Tasks beside `classify`: next tokens, functions in a user's file, a loop's own loss and its judge.

A task of your own is a function of (net, batch) in a file (--task path/to/file.py:loss). A value may also be
a tensor of whole numbers, such as a confusion matrix: these are added up, and `finish` of the same file, a
function of {name: number or tensor}, makes numbers of them.
"""

import math
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from common.data import Batch, leaves
from common.errors import UserError, blamed
from common.options import Options, find_function
from common.training import IGNORED, OWN, Task, autocast, reduced, scored
from common.world import World, gather

WANTED = 'wanted each time: {"loss": (sum, count), ...}; later values may be whole numbers of one shape'


def task_of(opts: Options) -> Task:
    """Return the task that --task names, other than classify."""
    if opts.task == "tokens":
        return Task(partial(tokens, opts=opts), ["loss", "acc"])
    if opts.task == OWN:
        task = OwnTask(None, ["loss"])
        task.shown = []  # until it reports
        return task
    function = find_function(opts.task)
    with blamed(f"--task {opts.task}"):
        required = [p for p in signature(function).parameters.values() if p.default is p.empty]

    def own(model, batch):
        more = [model.progress] if len(required) > 2 else []  # its third argument: .step, .epoch
        with autocast(opts, leaves(batch)[0].device):
            return function(model, batch, *more)

    finish = find_function(opts.task.rpartition(":")[0] + ":finish", None)
    return OwnTask(own, [], finish, opts.task)


def loss_of(loss: Tensor, count: Any, samples: int) -> tuple:
    """Return (sum, count) of a loop's loss as written: a mean over samples, or a sum of `count` things."""
    if count is not None:
        return loss, count
    if reduced(loss, "Sum"):
        raise UserError("the loss is a sum, of how many things?\nrun.step(loss, count), or give a mean")
    return loss * samples, samples


# ---- the next token ----
def tokens(model, batch, opts):
    """Return loss and right answers, summed over all targets that are not IGNORED."""
    loss, answers, y = scored(model, batch, opts)
    count = (y != IGNORED).sum()
    return {"loss": (loss, count), "acc": ((answers == y).sum(), count)}


# ---- a user's own ----
class OwnTask(Task):
    """Takes the names of its values from those of the first samples; `spec` says whose it is."""

    def __init__(
        self, function: Callable | None, names: list[str], finish: Callable | None = None, spec: str = ""
    ) -> None:
        super().__init__(function, names)
        self.finish = finish
        self.spec = spec
        self.source = f"--task {spec}"
        self.shapes: dict[str, list[int]] = {}  # of the whole numbers, by name

    def __call__(self, model, batch):
        values = super().__call__(model, batch)
        if not isinstance(values, dict):
            raise UserError(f"what --task {self.spec} returned is a {type(values).__name__}\n{WANTED}")
        return values

    # ---- totals: as any task's, and then all whole numbers ----
    def zeros(self, device: torch.device | None = None) -> Tensor:
        size = 2 * len(self.names) + sum(map(math.prod, self.shapes.values()))
        return torch.zeros(size, dtype=torch.float64, device=device)

    @torch.no_grad()
    def counted(self, values: dict) -> Tensor:
        with blamed(f"what --task {self.spec} returned", WANTED):
            if not self.names:
                self._learn(values)
            totals = super().counted(values)
            for name, numbers in self._whole(totals).items():
                numbers.add_(values[name].reshape(numbers.shape).to(totals))
        return totals

    def _learn(self, values):
        self.names = [name for name, value in values.items() if not isinstance(value, Tensor)]
        self.shapes = {name: [*values[name].shape] for name in values if name not in self.names}
        if any(values[name].is_floating_point() for name in self.shapes):
            raise TypeError(f"{', '.join(self.shapes)}: numbers without a count")
        if not self.names:
            raise TypeError("no value is a (sum, count)")
        metrics = self.metrics(self.counted(values))
        self.shown = [*dict.fromkeys([*self.names, *metrics])]

    def agree(self, world: World) -> None:
        known = gather(world, [self.names, self.shapes])
        self.names, self.shapes = next(of_a_rank for of_a_rank in known if of_a_rank[0])

    def _whole(self, totals):
        """Return {name: its part of the totals}."""
        named = {}
        start = 2 * len(self.names)
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            named[name] = totals[start:end].view(shape)
            start = end
        return named

    def whole(self, totals: Tensor) -> dict[str, Tensor]:
        """Return {name: whole numbers}, such as the confusion matrix of a judge."""
        return {name: part.long() for name, part in self._whole(totals.cpu()).items()}

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return what `finish` makes of sum / count and of the whole numbers."""
        metrics = super().metrics(totals)
        if self.finish and len(metrics) == len(self.names):
            metrics = self.finish(metrics | self.whole(totals))
        return {name: float(metrics[name]) for name in metrics if name not in self.shapes}


class Judge(OwnTask):
    """A loop's own function of a batch, for one evaluation, which returns the whole numbers, too."""

    def __init__(self, judge: Callable) -> None:
        super().__init__(lambda _, batch: judge(batch), [], spec="judge")

    def _argument(self, batch):
        return Batch([([], batch.data)], batch.size)  # ids are those of samples to train on

    def evaluation(self, totals: Tensor) -> dict[str, Any]:
        return super().evaluation(totals) | self.whole(totals)
