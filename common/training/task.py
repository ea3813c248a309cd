"""What is minimised and what is shown: the sums and counts that a task returns of each forward, never means.

The built-in tasks are in loss.py. A user's own is a function of (net, batch) in a file:
{"loss": (sum, count), ...}, of which the first is minimised (--task path/to/file.py:loss).

A value may also be a tensor of whole numbers, such as a confusion matrix: these are added up, and `finish`
of the same file, a function of {name: number or tensor}, makes numbers of them.
"""
import contextlib
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from common.data import leaves, map_tensors
from common.errors import UserError, did_you_mean
from common.options import Options, call_user, find_user
from common.sampler import seeded
from common.training.loss import autocast, classify, describe, tokens

OWN = "the script"                   # its loop computes the loss (elastic.py)
TAKEN = ("step", "epoch", "lr")      # names in a line of metrics.jsonl


class Task:
    """A function of (net, batch, state), and the names of what it returns: known before the first step."""

    def __init__(self, function: Callable, names: tuple = (), ahead: bool = False,
                 finish: Callable | None = None, spec: str = "", shown: list | None = None):
        self.function, self.names, self.finish, self.spec = function, names, finish, spec
        self.ahead = ahead  # the count of what is minimised is the number of samples
        self.bins: dict[str, torch.Size] = {}  # names and shapes of the whole numbers
        self.shapes: dict[str, Any] = {}  # of all that a user's function returns
        self.predictions: dict[str, list] = {}  # and labels, of the last block that `classify` evaluated
        self.shown = shown or list(names)  # names of the numbers that a person sees

    def __call__(self, net: Any, batch: Any, state: Any) -> dict[str, Any]:
        found = self.function(net, batch, state)
        if self.spec and shapes(found) != self.shapes:
            raise UserError(f"--task {self.spec} returned {outline(shapes(found))}; on its first sample it "
                            f"was {outline(self.shapes)}\nreturn the same names and shapes each time "
                            "(bincount takes minlength); a sum of 0 and a count of 0 for nothing")
        return found

    def minimised(self, found: dict[str, Any], nothing: Callable[[], Tensor]) -> Tensor:
        """The sum to be minimised; `nothing()`, which has a gradient too, where nothing counts."""
        name = self.names[0]
        loss, count = found[name]
        if isinstance(loss, Tensor) and loss.requires_grad:
            return loss
        if count:
            raise UserError(f"--task {self.spec}: {name} has no gradient, but counts {float(count):g}"
                            "\nreturn the sum as torch computed it: without .item(), .detach() or no_grad")
        return nothing()

    # ---- totals: a vector of all sums and counts, then of all whole numbers -----------------------
    def zeros(self, device: torch.device, kind: torch.dtype = torch.float64) -> Tensor:
        size = 2 * len(self.names) + sum(shape.numel() for shape in self.bins.values())
        return torch.zeros(size, dtype=kind, device=device)

    @torch.no_grad()
    def add(self, totals: Tensor, found: dict[str, Any]) -> Tensor:
        """Adds what one forward returned, in place."""
        at = 0
        for name in self.names:
            for number in found[name]:
                totals[at] += number
                at += 1
        for name, shape in self.bins.items():
            totals[at:at + shape.numel()] += found[name].flatten()
            at += shape.numel()
        return totals

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """{name: sum / count}, or what `finish` makes of these; names with a count of 0 are left out."""
        pairs, at = totals.tolist(), 2 * len(self.names)
        found: dict[str, Any] = {name: pairs[2 * i] / pairs[2 * i + 1]
                                 for i, name in enumerate(self.names) if pairs[2 * i + 1]}
        for name, shape in self.bins.items():
            found[name] = totals[at:at + shape.numel()].round().long().view(shape).cpu()
            at += shape.numel()
        if self.finish and len(found) == len(self.names) + len(self.bins):
            found = self.finish(found)
        try:
            numbers = {name: float(value) for name, value in found.items() if name not in self.bins}
            if self.spec and not all(map(named, numbers)):
                raise ValueError
            return numbers
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"--task {self.spec}: finish returned {describe(found)}\nwanted: a number for "
                            f"each name; none begins with val_ or is one of {', '.join(TAKEN)}") from error

    # ---- where the net is cut into stages ---------------------------------------------------------
    def input_of(self, batch: Any, state: Any) -> Tensor:
        """The tensor with which the task calls the net: the input of the first stage."""
        def ask(x):
            raise Asked(x)

        try:
            self(StandIn(state.net, ask), batch, state)
        except Asked as asked:
            return asked.args[0]
        raise AssertionError("the task did not call the net")

    def answered(self, out: Tensor, batch: Any, state: Any) -> dict[str, Any]:
        """What the task returns of an output that the last stage has computed."""
        return self(StandIn(state.net, lambda x: out), batch, state)

    # ---- a user's own, tried before the first step ------------------------------------------------
    def try_out(self, net: nn.Module, data: Any, opts: Options, device: torch.device) -> None:
        """Learns the names from one sample; a mistake in the function is found here."""
        if not self.spec:
            return
        batch = map_tensors(lambda t: t.to(device), data.train.fetch([getattr(data.train, "first", 0)]))
        buffers, was = {name: buffer.clone() for name, buffer in net.named_buffers()}, net.training
        net.eval()
        seen = StandIn(net, net) if opts.script == "mp" else net
        with torch.no_grad(), seeded(opts.seed, "task"), autocast(opts, device):
            found = call_user(self.spec, seen, batch)
            for name, buffer in net.named_buffers():
                buffer.copy_(buffers[name])
        net.train(was)
        if isinstance(seen, StandIn) and seen.calls != 1:
            raise UserError(f"--task {self.spec} calls the net {seen.calls} times\n"
                            "in stages it has the output of one call: use train_ddp.py")
        self.learn(found)

    def learn(self, found: Any) -> None:
        """Takes names and shapes from what the function returned of one sample."""
        values = list(found.values()) if isinstance(found, dict) and all(map(named, found)) else []
        if not values or not all(map(counted, values)) or isinstance(values[0], Tensor) or any(
                value[1] < 0 for value in values if not isinstance(value, Tensor)):
            raise UserError(f"--task {self.spec} returned {describe(found)}\n"
                            'wanted: {"loss": (sum, count), ...}, the first one to be minimised: sums over '
                            "the samples, not means\nor, after it, tensors of whole numbers; "
                            f"no name begins with val_ or is one of {', '.join(TAKEN)}")
        self.bins = {name: value.shape for name, value in found.items() if isinstance(value, Tensor)}
        self.names = tuple(name for name in found if name not in self.bins)
        self.shapes = shapes(found)
        with torch.no_grad():
            totals = self.add(self.zeros(torch.device("cpu")), map_tensors(lambda t: t.detach().cpu(), found))
        numbers = {name: 1.0 for name in self.names} | dict(self.metrics(totals))
        self.shown = list(numbers)


def named(name):
    return isinstance(name, str) and name.isidentifier() and name not in TAKEN and not name.startswith("val_")


def counted(value):
    """Whether a value is (sum, count), both one number, or a tensor of whole numbers."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(
        part.dim() == 0 and not part.is_complex() if isinstance(part, Tensor) else isinstance(part, Real)
        for part in value)


def shapes(found):
    """{name: shape of its whole numbers, or None for (sum, count)}; its type where it is neither."""
    if not isinstance(found, dict):
        return {"": describe(found)}
    return {name: describe(value) if not counted(value) else tuple(value.shape) if isinstance(value, Tensor)
            else None for name, value in found.items()}


def outline(shapes):
    return ", ".join(name if shape is None else f"{name} {shape}".strip() for name, shape in shapes.items())


def find_task(opts: Options) -> Task:
    """The task that --task names."""
    if opts.task == "tokens":
        return Task(tokens, ("loss", "acc"), finish=perplexity, shown=["loss", "acc", "perplexity"])
    if opts.task == OWN:
        shown = ["loss", opts.best.removeprefix("-")] if opts.best else ["loss"]
        return Task(classify, ("loss",), shown=shown)  # never called
    if opts.task == "classify":
        return Task(classify, ("loss", "acc"), ahead=opts.bad_samples == "stop")
    function = find_user(opts.task)

    def users(net, batch, state):
        tensors = leaves(batch)
        with autocast(opts, tensors[0].device) if tensors else contextlib.nullcontext():
            return function(net, batch)

    finish = find_user(opts.task.rpartition(":")[0] + ":finish", None)
    return Task(users, spec=opts.task, finish=finish if callable(finish) else None)


def perplexity(found):
    return found | {"perplexity": math.exp(min(found["loss"], 700.0))}


def best_of(opts: Options, task: Task) -> tuple[str, int]:
    """(name, 1 or -1) of the metric whose best evaluation is kept; -1 if a lower one is better."""
    name = opts.best.removeprefix("-") or ("acc" if "acc" in task.shown else task.names[0])
    if name not in task.shown:
        raise UserError(f"--best {opts.best}: the task has no {name!r}{did_you_mean(name, task.shown)}\n"
                        f"it has {', '.join(task.shown)}; -NAME if lower is better")
    return f"val_{name}", -1 if opts.best.startswith("-") or not opts.best and name == task.names[0] else 1


class StandIn:
    """Takes the place of a net that is cut into stages: it may only be called, with one tensor."""

    def __init__(self, net: nn.Module, answer: Callable):
        self.training, self.answer, self.calls = net.training, answer, 0

    def __call__(self, x: Tensor) -> Any:
        self.calls += 1
        return self.answer(x)

    def __getattr__(self, name):
        raise UserError(f"--task asks for net.{name}, but in stages it has only the net's output\n"
                        "use train_ddp.py")


class Asked(BaseException):
    """Carries the input with which a task calls the net, past every `except Exception` of the task."""
