"""What is minimised and what is shown: a task returns sums and counts of each forward, never means.

    {"loss": (sum, count), "acc": (sum, count)}      the first one is minimised

The task `tokens` and those of a user's own are in extras/tasks.py.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common.data import leaves
from common.errors import UserError, blamed, did_you_mean
from common.options import Options, extra
from common.world import World

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
IGNORED = -100  # a target that does not count, as torch's cross entropy has it
REDUCTIONS = {"Mean": 1, "Sum": 2}  # in torch's loss functions
OWN = "the script"  # its loop computes the loss (elastic.py)


# ---- the built-in task ----
def criterion(out, targets, smoothing):
    """Return the loss of training and evaluation, summed over rows of outputs: change it here, only here.

    A row whose target is IGNORED adds 0.
    """
    return F.cross_entropy(out, targets, reduction="sum", label_smoothing=smoothing)


def classify(model, batch, opts):
    """Return the loss, summed over samples (of each the mean over its targets), and the right answers."""
    loss, answers, y = scored(model, batch, opts)
    return {"loss": (loss / y.shape[1:].numel(), len(y)), "acc": ((answers == y).sum(), y.numel())}


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


def scored(model: Callable, batch: Any, opts: Options) -> tuple[Tensor, Tensor, Tensor]:
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
    """A function of (model, batch), and the names of what it returns; those of a user's own are an extra."""

    source = "the net, on these samples"  # of what is wrong

    def __init__(self, function: Callable | None, names: list[str], counts_samples: bool = False) -> None:
        self.function = function
        self.names = names
        self.shown = [*names]  # names of the numbers that a person sees
        self.counts_samples = counts_samples  # of what is minimised the count is that of samples

    def __call__(self, model, batch):
        with blamed(self.source):
            return self.function(model, self._argument(batch))

    def _argument(self, batch):
        return getattr(batch, "data", batch)

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

    # ---- totals: a vector of all sums and counts ----
    def zeros(self, device: torch.device | None = None) -> Tensor:
        return torch.zeros(2 * len(self.names), dtype=torch.float64, device=device)

    @torch.no_grad()
    def counted(self, values: dict) -> Tensor:
        """Return the totals of one forward, where its outputs are."""
        totals = self.zeros(next((tensor.device for tensor in leaves(values)), None))
        for i, name in enumerate(self.names):
            total, count = values[name]
            totals[2 * i].add_(total)
            totals[2 * i + 1].add_(count)
        return totals

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """Return {name: sum / count}; names with a count of 0 are left out."""
        pairs = totals[: 2 * len(self.names)].view(-1, 2).tolist()
        metrics = {}
        for name, (total, count) in zip(self.names, pairs, strict=True):
            if count:
                metrics[name] = total / count
        return metrics

    def evaluation(self, totals: Tensor) -> dict[str, Any]:
        """Return the metrics of a test set."""
        return {f"val_{name}": value for name, value in self.metrics(totals).items()}

    def agree(self, world: World) -> None:
        """Take names from a rank that had something to evaluate; these are known. Call it on every rank."""


def reduced(loss: Tensor, how: str) -> bool:
    """Return whether the last thing that torch has done to a loss was a "Sum" or a "Mean"."""
    reduction = getattr(loss.grad_fn, "_saved_reduction", None)
    return reduction == REDUCTIONS[how] or type(loss.grad_fn).__name__.startswith(f"{how}Backward")


def find_task(opts: Options) -> Task:
    """Return the task that --task names."""
    if opts.task == "classify":
        return Task(partial(classify, opts=opts), ["loss", "acc"], counts_samples=opts.bad_samples == "stop")
    return extra("task")(opts)


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
