"""The optimizer: how it is made, the state it begins with, the gradient it gets, the learning rate."""
import inspect
import math
from collections import UserDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError, blamed
from common.options import Options, call_user


def build_optimizer(net: nn.Module, opts: Options) -> torch.optim.Optimizer:
    """The optimizer of --optimizer over all weights that train; TrainState makes its state."""
    weights = [p for p in net.parameters() if p.requires_grad]
    if ".py" in opts.optimizer:
        return checked(call_user(opts.optimizer, net, opts, first=True), net, opts)
    name, arguments = opts.torch_optimizer
    if any(p.is_complex() or name == "SGD" and hasattr(p, "to_local") for p in weights):
        arguments.pop("fused", None)  # torch has none for complex weights, and no SGD for sharded ones
    groups: list[dict] = [{"params": weights}]  # a frozen stage has none
    if opts.no_decay_1d:
        groups = [{"params": [p for p in weights if p.dim() > 1]},
                  {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0}]
    with blamed(f"--optimizer {opts.optimizer}",
                "change --optimizer-args, or write a function: path/to/file.py:function"):
        return getattr(torch.optim, name)(groups, **arguments)


def checked(optimizer, net, opts):
    """A user's optimizer; UserError unless it has all weights that train, at the rate of --lr."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"--optimizer {opts.optimizer} returned {type(optimizer).__name__}\n"
                        "wanted: a torch.optim.Optimizer")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for name, p in net.named_parameters():
        if p.requires_grad != (p in held):
            raise UserError(f"--optimizer {opts.optimizer}: {name} trains, but is in no group, or the "
                            "reverse\nput all that trains into groups, and freeze the rest with --freeze")
    usual = inspect.signature(type(optimizer)).parameters.get("lr")
    for group in optimizer.param_groups:
        if not 0 <= group.get("scale", 1.0) < math.inf:
            raise UserError(f"--optimizer {opts.optimizer}: a group has scale={group['scale']}\n"
                            "wanted: a number from 0, times --lr")
        if group.get("lr", opts.lr) not in (opts.lr, usual and usual.default):
            raise UserError(f"--optimizer {opts.optimizer}: its lr={group['lr']} cannot take effect, "
                            f"--lr is {opts.lr}\ngive --lr, and a group with another rate a `scale`")
    return optimizer


# ---- the state it begins with ----
class FirstValues(UserDict):
    """A weight's state; `first` keeps what the optimizer put there first, before its step changed it."""

    def __init__(self, given):
        self.first = {}
        super().__init__(given)

    def __setitem__(self, name, value):
        self.first.setdefault(name, value.clone() if torch.is_tensor(value) else value)
        super().__setitem__(name, value)


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives each weight the state that the optimizer makes in its first step, as it is before that step.

    So a checkpoint has the same names at step 0 and at step 1000. The step is made without a gradient, and
    without weight decay, which SGD would remember.
    """
    groups = optimizer.param_groups
    states = optimizer.state
    before = _not_in_states(optimizer, groups)
    after = set()
    for group in groups:
        decay = {"weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
        for weight in group["params"]:
            twin = weight.detach().clone()
            twin.grad = torch.zeros_like(twin)
            alone = group | {"params": [twin]} | dict.fromkeys(decay, 0.0)
            state = FirstValues(states[weight])
            optimizer.param_groups = [alone]
            optimizer.state = defaultdict(dict, {twin: state})
            with blamed(f"a step of {type(optimizer).__name__}",
                        "wanted: other --optimizer-args, or a step() without a closure"):
                optimizer.step()
            after |= {name for name, value in state.items()
                      if not torch.is_tensor(value) and value is not None}
            after |= {str(key) for key in optimizer.state if key is not twin}
            states[weight] = state.first
            after |= _not_in_states(optimizer, [alone | decay])
    if after - before:
        raise UserError(f"{type(optimizer).__name__} keeps {min(after - before)}, "
                        "which no checkpoint would hold\nkeep a tensor instead, in the state of each weight")
    optimizer.param_groups = groups
    optimizer.state = states


def _not_in_states(optimizer, groups):
    """What an optimizer keeps beside the states of its weights, as texts; flags are torch's own."""
    texts = set()
    for holder in [vars(optimizer), *groups]:
        for name, value in holder.items():
            if isinstance(value, torch.optim.Optimizer):
                raise UserError(f"{type(optimizer).__name__} keeps another optimizer, {name}\n"
                                "no checkpoint would hold its state: make one optimizer of both")
            if name not in ("param_groups", "state", "params") and not isinstance(value, bool):
                texts.add(f"{name} = {value!r}"[:100])
    return texts


# ---- the gradient; nothing here reads a number from a GPU, which would make the program wait for it ----
def finish_gradient(state: Any) -> None:
    """Unscales, divides and clips; call it on every rank, for ranks with parts of one net add their norms."""
    clip = state.opts.clip_grad_norm
    divisor = state.updates.divisor
    if state.scaler and (clip or state.stages or divisor is not None):
        unscale(state)
    gradients = [p.grad for p in state.names if p.grad is not None]
    norm = None
    if clip:
        norm = (state.stages.norm if state.stages else torch.nn.utils.get_total_norm)(gradients)
    if divisor is not None:
        divide(gradients, divisor, clip, norm)
    elif clip:
        torch.nn.utils.clip_grads_with_norm_(state.names, clip, norm)


def unscale(state):
    """Undoes fp16's scale; if one rank skips the step, all skip it."""
    none = torch.zeros((), device=next(iter(state.names)).device)
    state.scaler.scale(none)  # initialises the scaler on ranks without a loss
    state.scaler.unscale_(state.optimizer)
    if state.stages:
        by_device = state.scaler._found_inf_per_device(state.optimizer)
        here = sum((overflow.to(none.device) for overflow in by_device.values()), none)
        overflows = state.stages.world.all_sum(here).clamp_(max=1.0)
        for other in by_device.values():  # the optimizer adds them up, and accepts only 0 or 1
            other.zero_()
        by_device[none.device] = overflows


def divide(gradients: list[Tensor], divisor: Tensor, clip: float, norm: Tensor | None) -> None:
    """Ends the mean over the global count, in one pass with the clipping."""
    if norm is not None:
        divisor = divisor / (clip / (norm.double() / divisor + 1e-6)).clamp(max=1.0)
    gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    for device, kind in {(g.device, g.dtype) for g in gradients}:
        alike = [g for g in gradients if (g.device, g.dtype) == (device, kind)]
        torch._foreach_div_(alike, divisor.to(device, torch.promote_types(kind, torch.float32)))


# ---- the learning rate ----
def learning_rate(step: int, opts: Options, steps_per_epoch: int) -> float:
    """A pure function of the step, so nothing is stored and nothing is lost with a node."""
    warmup = opts.warmup_epochs * steps_per_epoch
    total = max(1, opts.epochs * steps_per_epoch)
    if ".py" in opts.lr_schedule:
        schedule = call_user(opts.lr_schedule, step, total, opts, first=True)
        return opts.lr * factor(schedule, f"--lr-schedule {opts.lr_schedule}", step)
    if step < warmup:
        return opts.lr * (step + 1) / (warmup + 1)
    if opts.lr_schedule == "cosine":
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return opts.min_lr + (opts.lr - opts.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if opts.lr_schedule == "step":  # a tenth after each third of the run
        return max(opts.min_lr, opts.lr * 0.1 ** min(2, 3 * step // total))
    return opts.lr


def factor(value: Any, whose: str, step: int) -> float:
    """The factor that a user's schedule returned for a step, checked; `whose` names the schedule."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        raise UserError(f"{whose} returned {value!r} for step {step}\n"
                        "wanted: a factor of the learning rate, a number from 0")
    return float(value)
