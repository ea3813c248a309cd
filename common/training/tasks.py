"""What is minimised and what is shown: a task returns sums and counts of each forward, never means.

    {"loss": (sum, count), "acc": (sum, count)}      the first one is minimised

A task of your own is a function of (net, batch) in a file (--task path/to/file.py:loss). A value may also be
a tensor of whole numbers, such as a confusion matrix: these are added up, and `finish` of the same file, a
function of {name: number or tensor}, makes numbers of them.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common.data import leaves
from common.errors import UserError, blamed, did_you_mean
from common.options import Options, find_function
from common.world import World, gather

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHOWN_SAMPLES = 16  # of a test set that is no larger, an evaluation shows the predictions, too
IGNORED = -100  # a target that does not count, as torch's cross entropy has it
REDUCTIONS = {"Mean": 1, "Sum": 2}  # in torch's loss functions
JUDGE = "judge"  # of a loop of one's own, for one evaluation
OWN = "the script"  # its loop computes the loss (elastic.py)
WANTED = 'wanted each time: {"loss": (sum, count), ...}; later values may be whole numbers of one shape'


# ---- the built-in tasks ----
def criterion(out, targets, smoothing):
    """Return the loss of training and evaluation, summed over rows of outputs: change it here, only here.

    A row whose target is IGNORED adds 0.
    """
    return F.cross_entropy(out, targets, reduction="sum", label_smoothing=smoothing)


def classify(model, batch, opts):
    """Return the mean over samples, and over the tokens of a sample."""
    loss, answers, y = scored(model, batch, opts)
    values = {"loss": (loss / y.shape[1:].numel(), len(y)), "acc": ((answers == y).sum(), y.numel())}
    if not torch.is_grad_enabled():
        values["predictions"] = torch.stack([answers, y])
    return values


def tokens(model, batch, opts):
    """Return the mean over all targets that are not IGNORED."""
    loss, answers, y = scored(model, batch, opts)
    count = (y != IGNORED).sum()
    return {"loss": (loss, count), "acc": ((answers == y).sum(), count)}


def perplexity(metrics):
    return metrics | {"perplexity": math.exp(min(metrics["loss"], 700))}


def pair(batch):
    """Return (inputs, targets) of a pair, or of a dict, whose targets are its "labels"."""
    match batch:
        case {"labels": targets, **inputs}:
            return inputs, targets
        case (inputs, targets):  # no tensor with two rows
            return inputs, targets
    raise UserError(
        f"a batch is a {type(batch).__name__}\nwanted: (inputs, targets), or a dict with labels\n"
        "for any other sample write your own: --task path/to/file.py:function"
    )


def scored(model, batch, opts):
    """Return (summed loss, answers, targets); in an evaluation in doubles, without label smoothing."""
    x, y = pair(batch)
    if isinstance(x, Mapping):
        out = model(**x)
    elif isinstance(x, (tuple, list)):
        out = model(*x)
    else:
        out = model(x)
    out = getattr(out, "logits", out)  # of a Hugging Face net
    y = y.to(out.device, non_blocking=True)
    if out.shape[:-1] != y.shape:
        raise UserError(
            f"an output of shape {tuple(out.shape)} does not fit targets of shape {tuple(y.shape)}\n"
            "wanted: the numbers of all classes in the output's last dimension, and one target for them"
        )
    trains = torch.is_grad_enabled()
    rows = out.flatten(0, -2)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) if trains else rows.double()
    loss = criterion(rows, y.flatten(), opts.label_smoothing if trains else 0.0)
    return loss, out.detach().argmax(-1), y


def autocast(opts: Options, device: torch.device) -> AbstractContextManager:
    if opts.amp == "off":
        return nullcontext()
    return torch.autocast(device.type, AMP[opts.amp])


# ---- any task ----
class Task:
    """A function of (model, batch), and what is known of its values before the first step."""

    def __init__(
        self,
        function: Callable | None,
        names: list[str],
        finish: Callable | None = None,
        spec: str = "",
        counts_samples: bool = False,
    ) -> None:
        self.function = function
        self.finish = finish
        self.spec = spec  # of a user's own
        self.counts_samples = counts_samples  # of what is minimised the count is that of samples
        self.names = names  # of (sum, count)
        self.shapes = {}  # of the whole numbers, by name
        self.shown = [*names]  # names of the numbers that a person sees

    def __call__(self, model, batch):
        with blamed(f"--task {self.spec}"):
            values = self.function(model, getattr(batch, "data", batch))
        if not isinstance(values, dict):
            raise UserError(f"what --task {self.spec} returned is a {type(values).__name__}\n{WANTED}")
        return values

    def summed(self, loss: Tensor, count: Any, samples: int) -> tuple:
        """Return (sum, count) of a loss as written: a mean over samples, or a sum of `count` things."""
        if count is not None:
            return loss, count
        if reduced(loss, "Sum"):
            raise UserError("the loss is a sum, of how many things?\nrun.step(loss, count), or give a mean")
        return loss * samples, samples

    def minimised(self, values: dict) -> Tensor | None:
        """Return the sum to be minimised; None if nothing counts."""
        loss, count = values[self.names[0]]
        if isinstance(loss, Tensor) and loss.requires_grad:
            if reduced(loss, "Mean"):
                raise UserError(
                    "the loss is a mean, wanted with a count is the sum: only sums add up over shares\n"
                    'give the loss function reduction="sum", or in a loop run.step(loss) without a count'
                )
            if loss.dtype in AMP.values():
                raise UserError(
                    f"the loss is a sum in {loss.dtype}, of three digits\ncompute it in float32: out.float()"
                )
            return loss
        if count:
            raise UserError(
                f"the loss has no gradient, but counts {float(count):g}\n"
                "return the sum as torch computed it: without .item(), .detach() or no_grad"
            )
        return None

    # ---- totals: a vector of all sums and counts, then of all whole numbers ----
    def zeros(self, device: torch.device | None = None) -> Tensor:
        return torch.zeros(sum(self._sizes()), dtype=torch.float64, device=device)

    def _sizes(self):
        return [2] * len(self.names) + [*map(math.prod, self.shapes.values())]

    def _named(self, totals):
        """Return {name: its part of the totals}."""
        return dict(zip([*self.names, *self.shapes], totals.split(self._sizes()), strict=True))

    @torch.no_grad()
    def counted(self, values: dict) -> Tensor:
        """Return the totals of one forward, where its outputs are; the first one gives the names."""
        if not self.names:
            self._learn(values)
        totals = self.zeros(next((tensor.device for tensor in leaves(values)), None))
        named = self._named(totals)
        with blamed(f"what --task {self.spec} returned", WANTED):
            for name in self.names:
                total, count = values[name]
                named[name][:1].add_(total)
                named[name][1:].add_(count)
            for name, shape in self.shapes.items():
                named[name].add_(values[name].reshape(shape).flatten().to(totals))
        return totals

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return {name: sum / count}, or what `finish` makes of it; names with a count of 0 are left out."""
        named = self._named(totals.cpu())
        metrics = {}
        for name in self.names:
            total, count = named[name].tolist()
            if count:
                metrics[name] = total / count
        if len(metrics) < len(self.names):
            return metrics
        if self.finish:
            metrics = self.finish(metrics | self.whole(totals))
        return {name: float(metrics[name]) for name in metrics if name not in self.shapes}

    def whole(self, totals: Tensor) -> dict[str, Tensor]:
        """Return {name: whole numbers}, such as the confusion matrix of a judge."""
        named = self._named(totals.cpu())
        return {name: named[name].long().view(shape) for name, shape in self.shapes.items()}

    def _learn(self, values):
        """Take names and shapes from what the function returned of the first samples."""
        with blamed(f"what --task {self.spec} returned", WANTED):
            self.names = [name for name, value in values.items() if not isinstance(value, Tensor)]
            self.shapes = {name: [*values[name].shape] for name in values if name not in self.names}
            if any(values[name].is_floating_point() for name in self.shapes):
                raise TypeError(f"{', '.join(self.shapes)}: numbers without a count")
            if not self.names:
                raise TypeError("no value is a (sum, count)")
            metrics = self.metrics(self.counted(values))
        self.shown = [*dict.fromkeys([*self.names, *metrics])]

    def agree(self, world: World) -> None:
        """Take the names from a rank that had something to evaluate; call it on every rank."""
        known = gather(world, [self.names, self.shapes])
        self.names, self.shapes = next(of_a_rank for of_a_rank in known if of_a_rank[0])


def reduced(loss, how):
    """Return whether the last thing that torch has done to a loss was a "Sum" or a "Mean"."""
    reduction = getattr(loss.grad_fn, "_saved_reduction", None)
    return reduction == REDUCTIONS[how] or type(loss.grad_fn).__name__.startswith(f"{how}Backward")


def find_task(opts: Options) -> Task:
    """Return the task that --task names."""
    if opts.task == OWN:
        task = Task(None, ["loss"])
        task.shown = []  # until it reports
        return task
    if opts.task == "classify":
        return Task(partial(classify, opts=opts), ["loss", "acc"], counts_samples=opts.bad_samples == "stop")
    if opts.task == "tokens":
        task = Task(partial(tokens, opts=opts), ["loss", "acc"], perplexity)
        task.shown.append("perplexity")
        return task
    function = find_function(opts.task)
    with blamed(f"--task {opts.task}"):
        required = [p for p in signature(function).parameters.values() if p.default is p.empty]

    def own(model, batch):
        more = [model.progress] if len(required) > 2 else []  # its third argument: .step, .epoch
        with autocast(opts, leaves(batch)[0].device):
            return function(model, batch, *more)

    finish = find_function(opts.task.rpartition(":")[0] + ":finish", None)
    return Task(own, [], finish, opts.task)


def best_of(opts, task):
    """Return (name, 1 or -1) of the metric whose best evaluation is kept; -1 if a lower one is better."""
    minimised = [*task.names, "loss"][0]
    name = opts.best.removeprefix("-") or ("acc" if "acc" in task.shown else minimised)
    if opts.best and task.shown and name not in task.shown:
        raise UserError(
            f"--best {opts.best}: the task has no {name!r}{did_you_mean(name, task.shown)}\n"
            f"it has {', '.join(task.shown)}; -NAME if lower is better"
        )
    return f"val_{name}", -1 if opts.best.startswith("-") or name == minimised else 1
