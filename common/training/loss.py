"""From samples to a loss: inputs, targets, and the distance of the outputs from the targets."""
import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F

from common.options import Options
from common.sampler import hash_seed
from common.training.state import TrainState

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def inputs_and_targets(x: Tensor, y: Tensor, state: TrainState) -> tuple[Tensor, list]:
    """(inputs, [(weight, targets)]) of some samples, in the memory layout of --channels-last and mixed."""
    if state.opts.channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return mix(x, y, state)


def criterion(out, y, **how):
    """The loss of training and of evaluation, of each token: change it here, and only here."""
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), **how)


def summed_loss(out: Tensor, targets: list, opts: Options) -> Tensor:
    """The training loss of each sample, added up; of a sample with many tokens, the mean over them."""
    out, tokens = out.float() if opts.amp != "off" else out, targets[0][1].shape[1:].numel()
    return sum(weight * criterion(out, y, reduction="sum", label_smoothing=opts.label_smoothing)
               for weight, y in targets) / tokens


def exact_losses(out, y):
    """The loss of each sample in an evaluation: in double precision, without label smoothing."""
    return criterion(out.double(), y, reduction="none").view(len(y), -1).mean(1)


def correct(out: Tensor, y: Tensor) -> Tensor:
    """How many samples are answered right; a sample with many tokens counts as the share that is right."""
    found = (out.detach().argmax(-1) == y).sum()
    return found if y.dim() == 1 else found / y.shape[1]


def autocast(opts: Options, device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast(device.type, AMP[opts.amp]) if opts.amp != "off" else contextlib.nullcontext()


def mix(x: Tensor, y: Tensor, state: TrainState) -> tuple[Tensor, list]:
    """Mixup or cutmix with the neighbour in the micro batch; (seed, step) alone decide the strength."""
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
