"""What is minimised and what is shown: a task returns sums and counts of each forward, never means.

    {"loss": (sum, count), "acc": (sum, count)}      the first one is minimised

A task of your own is a function of (net, batch) in a file (--task path/to/file.py:loss). A value may also be
a tensor of whole numbers, such as a confusion matrix: these are added up, and `finish` of the same file, a
function of {name: number or tensor}, makes numbers of them.
"""
import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.data import leaves, map_tensors
from common.errors import UserError, blamed, did_you_mean
from common.options import Options, call_user, find_user
from common.sampler import seeded

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
DOUBLE_LOGITS = 1 << 22  # logits that an evaluation turns into double precision at once: 32 MiB
SHOWN_SAMPLES = 16  # of a test set that is no larger, an evaluation shows the predictions, too
IGNORED = -100  # a target that does not count, as torch's cross entropy has it
OWN = "the script"  # its loop computes the loss (elastic.py)
WANTED = ('wanted each time: {"loss": (sum, count), ...}, sums over samples, no means, one number each\n'
          "or, after the first, tensors of whole numbers, of one shape")
TAKEN = "step", "epoch", "lr"  # names in a row of metrics.jsonl


# ---- the built-in tasks ----
def criterion(out: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The loss of training and of evaluation, summed over rows of outputs: change it here, and only here."""
    return F.cross_entropy(out, targets, reduction="sum", label_smoothing=smoothing)


def classify(net: Any, batch: Any, state: Any) -> dict[str, Any]:
    """The mean over samples, and over the tokens of a sample."""
    x, y = pair(batch, state.opts)
    loss, right = judged(net, x, y, state)
    return {"loss": (loss / y.shape[1:].numel(), len(y)), "acc": (right, y.numel())}


def tokens(net: Any, batch: Any, state: Any) -> dict[str, Any]:
    """The mean over all targets that are not IGNORED."""
    x, y = pair(batch, state.opts)
    loss, right = judged(net, x, y, state)
    count = (y != IGNORED).sum()
    return {"loss": (loss, count), "acc": (right, count)}


def perplexity(numbers: dict[str, Any]) -> dict[str, Any]:
    return numbers | {"perplexity": math.exp(min(numbers["loss"], 700.0))}


def pair(batch: Any, opts: Options) -> tuple[Any, Tensor]:
    """(inputs, targets): of a pair, or of a dict, whose targets are its "labels"."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise UserError(f"--task {opts.task}: a batch is a {type(batch).__name__}\n"
                    'wanted: (inputs, targets), or a dict with "labels"\n'
                    "for any other sample write your own: --task path/to/file.py:function")


def outputs(net: Any, x: Any, opts: Options, device: torch.device) -> Tensor:
    """The net's output for inputs of any shape; of a Hugging Face net its logits."""
    with autocast(opts, device):
        if isinstance(x, Mapping):
            out = net(**x)
        elif isinstance(x, (tuple, list)):
            out = net(*x)
        else:
            out = net(x)
    out = getattr(out, "logits", out)
    if not isinstance(out, Tensor):
        raise UserError(f"--task {opts.task}: the net returned a {type(out).__name__}\n"
                        "wanted: a tensor, or something with a tensor .logits\n"
                        "for anything else write your own: --task path/to/file.py:function")
    return out


def judged(net, x, y, state):
    """(summed loss, right answers); of an evaluation in double precision, without label smoothing."""
    opts = state.opts
    out = outputs(net, x, opts, y.device)
    rows, targets = out.flatten(0, -2), y.flatten()
    if state.net.training:
        loss = criterion(rows.float() if opts.amp != "off" else rows, targets, opts.label_smoothing)
        if (state.step + 1) % opts.log_every or not len(y):
            return loss, 0  # nobody sees it, and it takes long with many classes
        return loss, (out.detach().argmax(-1) == y).sum()
    size = max(1, DOUBLE_LOGITS // max(1, out.shape[-1]))
    pieces = zip(rows.split(size), targets.split(size), strict=True)
    loss = sum(criterion(piece.double(), part, 0.0) for piece, part in pieces)
    answers = out.argmax(-1)
    state.task.predictions = torch.stack([answers, y]) if y.dim() == 1 and len(y) <= SHOWN_SAMPLES else None
    return loss, (answers == y).sum()


def autocast(opts: Options, device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast(device.type, AMP[opts.amp]) if opts.amp != "off" else contextlib.nullcontext()


# ---- any task ----
class Task:
    """A function of (net, batch, state), and the names of what it returns: known before the first step."""

    def __init__(self, function: Callable, names: tuple = (), ahead: bool = False,
                 finish: Callable | None = None, spec: str = "", shown: list | None = None):
        self.function = function
        self.names = names  # of (sum, count)
        self.bins: dict[str, torch.Size] = {}  # names and shapes of the whole numbers
        self.ahead = ahead  # the count of what is minimised is the number of samples
        self.finish = finish
        self.spec = spec  # of a user's own
        self.shown = shown or list(names)  # names of the numbers that a person sees
        self.predictions: Tensor | None = None  # and labels, of the last small block that was evaluated

    def __call__(self, net: Any, batch: Any, state: Any) -> dict[str, Any]:
        return self.function(net, batch, state)

    def minimised(self, values: dict[str, Any], nothing: Callable[[], Tensor]) -> Tensor:
        """The sum to be minimised; `nothing()`, which has a gradient too, where nothing counts."""
        name = self.names[0]
        loss, count = values[name]
        if isinstance(loss, Tensor) and loss.requires_grad:
            return loss
        if count:
            raise UserError(f"--task {self.spec}: {name} has no gradient, but counts {float(count):g}"
                            "\nreturn the sum as torch computed it: without .item(), .detach() or no_grad")
        return nothing()

    def zeros(self, device: torch.device, kind: torch.dtype = torch.float64) -> Tensor:
        """Totals: a vector of all sums and counts, then of all whole numbers."""
        size = 2 * len(self.names) + sum(shape.numel() for shape in self.bins.values())
        return torch.zeros(size, dtype=kind, device=device)

    @torch.no_grad()
    def add(self, totals: Tensor, values: Any) -> Tensor:
        """Adds what one forward returned, in place."""
        with blamed(f"what --task {self.spec} returned", WANTED):
            if set(values) != {*self.names, *self.bins}:
                raise ValueError(f"its names are not {', '.join([*self.names, *self.bins])}")
            flat = []
            for name in self.names:
                total, count = values[name]
                flat += [_number(total, totals), _number(count, totals)]
            for name, shape in self.bins.items():
                if values[name].is_floating_point() or values[name].shape != shape:
                    raise ValueError(f"{name} is no tensor of whole numbers of shape {tuple(shape)}")
                flat.append(values[name].flatten().to(totals))
            totals += torch.cat(flat)
        return totals

    def metrics(self, totals: Tensor) -> dict[str, float]:
        """{name: sum / count}, or what `finish` makes of these; names with a count of 0 are left out."""
        pairs = totals.tolist()
        at = 2 * len(self.names)
        numbers: dict[str, Any] = {name: pairs[2 * i] / pairs[2 * i + 1]
                                   for i, name in enumerate(self.names) if pairs[2 * i + 1]}
        for name, shape in self.bins.items():
            numbers[name] = totals[at:at + shape.numel()].round().long().view(shape).cpu()
            at += shape.numel()
        with blamed(f"--task {self.spec}: finish", "wanted: a dict with a number for each name"):
            if self.finish and len(numbers) == len(self.names) + len(self.bins):
                numbers = self.finish(numbers)
            return {name: float(value) for name, value in numbers.items() if name not in self.bins}

    # ---- where the net is cut into stages ----
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

    # ---- a user's own, tried before the first step ----
    def try_out(self, net: nn.Module, data: Any, opts: Options, device: torch.device,
                cut: bool = False) -> None:
        """Learns the names from one sample; a mistake in the function is found here.

        A net that will be `cut` into stages may only be called once, with one tensor.
        """
        if not self.spec:
            return
        batch = map_tensors(lambda t: t.to(device), data.train.fetch([getattr(data.train, "first", 0)]))
        buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
        training = net.training
        seen = StandIn(net, net) if cut else net
        net.eval()
        with torch.no_grad(), seeded(opts.seed, "task"), autocast(opts, device):
            values = call_user(self.spec, seen, batch)
            for name, buffer in net.named_buffers():
                buffer.copy_(buffers[name])
        net.train(training)
        if isinstance(seen, StandIn) and seen.calls != 1:
            raise UserError(f"--task {self.spec} calls the net {seen.calls} times\n"
                            "in stages it has the output of one call: use train_ddp.py")
        self.learn(values)

    def learn(self, values: Any) -> None:
        """Takes names and shapes from what the function returned of one sample."""
        with blamed(f"what --task {self.spec} returned", WANTED):
            self.bins = {name: value.shape for name, value in values.items() if isinstance(value, Tensor)}
            self.names = tuple(name for name in values if name not in self.bins)
            if next(iter(values)) in self.bins:
                raise ValueError("the first value is no (sum, count)")
        totals = self.add(self.zeros(torch.device("cpu")), values)
        self.shown = list({name: 1.0 for name in self.names} | self.metrics(totals))
        for name in self.shown:
            if name in TAKEN or name.startswith("val_"):
                raise UserError(f"--task {self.spec}: a name is {name!r}\n"
                                f"no name begins with val_ or is one of {', '.join(TAKEN)}")


def _number(number, totals):
    if isinstance(number, Tensor):
        return number.detach().to(totals).view(1)
    return torch.full((1,), number, dtype=totals.dtype, device=totals.device)  # waits for no GPU


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


def best_of(opts: Options, task: Task) -> tuple[str, int]:
    """(name, 1 or -1) of the metric whose best evaluation is kept; -1 if a lower one is better."""
    minimised = task.names[0]
    name = opts.best.removeprefix("-") or ("acc" if "acc" in task.shown else minimised)
    if name not in task.shown:
        raise UserError(f"--best {opts.best}: the task has no {name!r}{did_you_mean(name, task.shown)}\n"
                        f"it has {', '.join(task.shown)}; -NAME if lower is better")
    return f"val_{name}", -1 if opts.best.startswith("-") or name == minimised else 1


class StandIn:
    """Takes the place of a net that is cut into stages: it may only be called, with one tensor."""

    def __init__(self, net: nn.Module, answer: Callable):
        self.training = net.training
        self.answer = answer
        self.calls = 0

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if len(inputs) != 1 or named or not isinstance(inputs[0], Tensor):
            raise UserError("the task calls the net with more than one tensor, and stages hand on one\n"
                            "use train_ddp.py, or --stages 1 with --shard")
        self.calls += 1
        return self.answer(inputs[0])

    def __getattr__(self, name):
        raise UserError(f"--task asks for net.{name}, but in stages it has only the net's output\n"
                        "use train_ddp.py")


class Asked(BaseException):
    """Carries the input with which a task calls the net, past every `except Exception` of the task."""
