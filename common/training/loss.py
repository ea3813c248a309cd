"""From samples to a loss: inputs, targets, and the distance of the outputs from the targets."""
import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from common.errors import UserError
from common.options import Options
from common.sampler import hash_seed

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}
DOUBLE_LOGITS = 1 << 22        # logits that an evaluation turns into double precision at once: 32 MiB
SHOWN_SAMPLES = 16       # up to so many samples, an evaluation tells the predictions, too
IGNORED = -100           # a target that does not count, as torch's cross entropy has it


def classify(net, batch, state):
    """The built-in task `classify`: the mean over samples, and over the tokens of a sample."""
    x, y = pair(batch, "classify")
    loss, right = judged(net, x, y, state)
    return {"loss": (loss / y.shape[1:].numel(), len(y)), "acc": (right, y.numel())}


def tokens(net, batch, state):
    """The built-in task `tokens`: the mean over all targets that are not IGNORED."""
    x, y = pair(batch, "tokens")
    loss, right = judged(net, x, y, state)
    count = (y != IGNORED).sum()
    return {"loss": (loss, count), "acc": (right, count)}


def pair(batch: Any, task: str) -> tuple[Any, Tensor]:
    """(inputs, targets): of a pair, or of a dict, whose targets are its "labels"."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return {key: value for key, value in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise UserError(f"--task {task}: a batch is {describe(batch)}\n"
                    'wanted: (inputs, targets), or a dict with "labels"\n'
                    "for any other sample write your own: --task path/to/file.py:function")


def describe(batch: Any) -> str:
    """Types, for a person: (Tensor, int), {'x': Tensor}."""
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name!r}: {type(value).__name__}" for name, value in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in batch)})"
    return type(batch).__name__


def outputs(net, x, y, state):
    """The net's output for inputs of any shape; of a Hugging Face net its logits."""
    with autocast(state.opts, y.device):
        out = net(**x) if isinstance(x, Mapping) else net(*x) if isinstance(x, (tuple, list)) else net(x)
    out = getattr(out, "logits", out)
    if not isinstance(out, Tensor):
        raise UserError(f"--task {state.opts.task}: the net returned {describe(out)}\n"
                        "wanted: a tensor, or something with a tensor .logits\n"
                        "for anything else write your own: --task path/to/file.py:function")
    return out


def criterion(out, y, **how):
    """The loss of training and of evaluation, of each token: change it here, and only here."""
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), **how)


def judged(net, x, y, state):
    """(summed loss, right answers); of an evaluation in double precision, without label smoothing."""
    if state.net.training:
        x, targets = mix(x, y, state)
        out = outputs(net, x, y, state)
        out = out.float() if state.opts.amp != "off" else out
        return sum(weight * criterion(out, target, reduction="sum",
                                      label_smoothing=state.opts.label_smoothing)
                   for weight, target in targets), hits(out, y, state)
    out = outputs(net, x, y, state)
    rows = max(1, DOUBLE_LOGITS // max(1, out.shape[-1]))
    pieces = zip(out.flatten(0, -2).split(rows), y.flatten().split(rows), strict=True)
    loss = sum(criterion(piece.double(), targets, reduction="sum") for piece, targets in pieces)
    found, few = out.argmax(-1), y.dim() == 1 and len(y) <= SHOWN_SAMPLES
    state.task.predictions = {"predictions": found.tolist(), "labels": y.tolist()} if few else {}
    return loss, (found == y).sum()


def hits(out: Tensor, y: Tensor, state: Any) -> Tensor | int:
    """How many targets are answered right; in steps that are logged, as it takes long with many classes."""
    if (state.step + 1) % state.opts.log_every or not len(y):
        return 0
    return (out.detach().argmax(-1) == y).sum()


def autocast(opts: Options, device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast(device.type, AMP[opts.amp]) if opts.amp != "off" else contextlib.nullcontext()


def mix(x: Tensor, y: Tensor, state: Any) -> tuple[Tensor, list]:
    """Mixup or cutmix with the neighbour in the micro batch; only (seed, step) decide the strength."""
    opts = state.opts
    if not (opts.mixup or opts.cutmix) or len(x) < 2:
        return x, [(1.0, y)]
    draws = torch.Generator().manual_seed(hash_seed(opts.seed, "mix", state.step))
    boxes = bool(opts.cutmix) and (not opts.mixup or torch.rand((), generator=draws) < 0.5)
    alpha = opts.cutmix if boxes else opts.mixup
    gammas = torch._standard_gamma(torch.full((2,), float(alpha)), generator=draws)
    keep = float(gammas[0] / gammas.sum().clamp_min(1e-12))
    other = x.roll(1, 0)
    if not boxes:
        return x * keep + other * (1 - keep), [(keep, y), (1 - keep, y.roll(1))]
    height, width = x.shape[-2:]
    h, w = int(height * (1 - keep) ** 0.5), int(width * (1 - keep) ** 0.5)
    top, left = (int(torch.randint(side, (), generator=draws)) for side in (height - h + 1, width - w + 1))
    x = x.clone()
    x[..., top:top + h, left:left + w] = other[..., top:top + h, left:left + w]
    keep = 1 - h * w / (height * width)
    return x, [(keep, y), (1 - keep, y.roll(1))]
