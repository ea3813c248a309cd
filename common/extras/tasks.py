"""Tasks beside `classify`: next tokens, functions in a user's file, a loop's own loss and its judge.

A task of your own is a function of (net, batch) in a file (--task path/to/file.py:loss). A value may also be
a tensor of whole numbers, such as a confusion matrix: these are added up, and `finish` of the same file, a
function of {name: number or tensor}, makes numbers of them.
"""

import math
from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from common.data import Batch, leaves
from common.errors import UserError, blamed
from common.extras.own_files import call_user
from common.options import find_function
from common.training import IGNORED, OWN, Task, autocast, reduced, scored
from common.world import gather

WANTED = 'wanted each time: {"loss": (sum, count), ...}; later values may be whole numbers of one shape'


def task_of(opts):
    """Return the task that --task names, other than classify."""
    if opts.task == "tokens":
        return Task(partial(tokens, opts=opts), ["loss", "acc"])
    if opts.task == OWN:
        task = OwnTask(None, "the loop")
        task.names = ["loss"]  # shown is none until it reports
        return task

    def own(model, batch):
        progress = getattr(model, "progress", None)  # its third argument: .step, .epoch
        with autocast(opts, leaves(batch)[0].device):
            return call_user(opts.task, model, batch, progress, first=True)

    finish = find_function(opts.task.rpartition(":")[0] + ":finish", None)
    return OwnTask(own, f"--task {opts.task}", finish)


def loss_of(loss, count, samples):
    """Return (sum, count) of a loop's loss as written: a mean over samples, or a sum of `count` things."""
    if count is not None:
        return loss, count
    if reduced(loss, "Sum"):
        raise UserError("the loss is a sum, of how many things?\nrun.step(loss, count), or give a mean")
    return loss * samples, samples


def end_mean(gradient, total):
    """Divide a gradient by what all ranks have counted, where that is not samples.

    No number is read from a GPU, which would make the program wait for it.
    """
    alike = defaultdict(list)
    for p in gradient.state.names:
        if p.grad is not None:
            alike[p.grad.device, p.grad.dtype].append(p.grad)
    divisor = torch.where(total == 0, 1.0, total / gradient.batch.size)
    for (device, kind), rows in alike.items():
        torch._foreach_div_(rows, divisor.to(device, torch.promote_types(kind, torch.float32)))


def answers(model, part, opts):
    """Return what the net says to each sample of a small test set, and what is right, if it is one number."""
    ids, samples = part
    _, predictions, labels = scored(model, samples, opts)
    if labels.shape != (len(ids),):
        return {}
    return {"predictions": predictions.tolist(), "labels": labels.tolist()}


# ---- the next token ----
def tokens(model, batch, opts):
    """Return loss and right answers, summed over all targets that are not IGNORED."""
    loss, answers, y = scored(model, batch, opts)
    count = (y != IGNORED).sum()
    return {"loss": (loss, count), "acc": ((answers == y).sum(), count)}


# ---- a user's own ----
class OwnTask(Task):
    """Takes the names of its values from those of the first samples; `source` says whose it is."""

    def __init__(self, function, source, finish=None):
        super().__init__(function, [])
        self.source = source
        self.finish = finish
        self.shapes = {}  # of the whole numbers, by name

    def __call__(self, model, batch):
        values = super().__call__(model, batch)
        if not isinstance(values, dict):
            raise UserError(f"what {self.source} returned is a {type(values).__name__}\n{WANTED}")
        return values

    # ---- totals: as any task's, and then all whole numbers ----
    def zeros(self, device=None):
        return torch.zeros(sum(self._sizes()), dtype=torch.float64, device=device)

    def _sizes(self):
        return [2 * len(self.names), *map(math.prod, self.shapes.values())]

    @torch.no_grad()
    def counted(self, values):
        with blamed(f"what {self.source} returned", WANTED):
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

    def agree(self, world):
        known = gather(world, [self.names, self.shapes])
        self.names, self.shapes = next(of_a_rank for of_a_rank in known if of_a_rank[0])

    def _whole(self, totals):
        """Return {name: its part of the totals}."""
        parts = zip(self.shapes.items(), totals.split(self._sizes())[1:], strict=True)
        return {name: part.view(shape) for (name, shape), part in parts}

    def whole(self, totals):
        """Return {name: whole numbers}, such as the confusion matrix of a judge."""
        return {name: part.long() for name, part in self._whole(totals.cpu()).items()}

    def metrics(self, totals):
        """Return what `finish` makes of sum / count and of the whole numbers."""
        metrics = super().metrics(totals)
        if self.finish and len(metrics) == len(self.names):
            metrics = self.finish(metrics | self.whole(totals))
        return {name: float(metrics[name]) for name in metrics if name not in self.shapes}


class Judge(OwnTask):
    """A loop's own function of a batch, for one evaluation, which returns the whole numbers, too."""

    def __init__(self, judge):
        super().__init__(lambda _, batch: judge(batch), "the judge")

    def _argument(self, batch):
        return Batch([([], batch.data)], batch.size)  # ids are those of samples to train on

    def evaluation(self, totals):
        return super().evaluation(totals) | self.whole(totals)
