"""The optimizer: how it is made, the state it begins with, the gradient it gets, the learning rate."""
import copy
import inspect
import math
from collections import UserDict, defaultdict
from typing import Any

import torch
from torch import nn

from common.errors import UserError, one_line, out_of_memory
from common.options import Options, call_user


def build_optimizer(net: nn.Module, opts: Options) -> torch.optim.Optimizer:
    """The optimizer of --optimizer over all weights that train; TrainState makes its state."""
    weights = [p for p in net.parameters() if p.requires_grad]
    if ".py" in opts.optimizer:
        return checked(call_user(opts.optimizer, net, opts, first=True), weights, net, opts)
    name, arguments = opts.torch_optimizer
    if any(p.is_complex() or name == "SGD" and hasattr(p, "to_local") for p in weights):
        arguments.pop("fused", None)  # torch has none for complex weights, and no SGD for sharded ones
    groups: list[dict] = [{"params": weights}]  # a frozen stage has none
    if opts.no_decay_1d:
        groups = [{"params": [p for p in weights if p.dim() > 1]},
                  {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0}]
    try:
        return getattr(torch.optim, name)(groups, **arguments)
    except Exception as error:  # of any kind: torch checks some arguments only
        raise UserError(f"--optimizer {opts.optimizer}: {one_line(error)}\n"
                        "change --optimizer-args, or write a function: path/to/file.py:function") from error


def checked(optimizer, weights, net, opts):
    """A user's optimizer; UserError unless it has all weights that train, at the rate of --lr."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"--optimizer {opts.optimizer} returned {type(optimizer).__name__}\n"
                        "wanted: a torch.optim.Optimizer")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if odd := [name for name, p in net.named_parameters() if p.requires_grad != (p in held)]:
        raise UserError(f"--optimizer {opts.optimizer}: {odd[0]} trains, but is in no group, or the reverse\n"
                        "put all that trains into groups, and freeze the rest with --freeze")
    usual = inspect.signature(type(optimizer)).parameters.get("lr")
    for group in optimizer.param_groups:
        if not isinstance(scale := group.get("scale", 1.0), (int, float)) or not 0 <= scale < math.inf:
            raise UserError(f"--optimizer {opts.optimizer}: a group has scale={scale!r}\n"
                            "wanted: a number from 0, times --lr")
        if group.get("lr", opts.lr) not in (opts.lr, usual and usual.default):
            raise UserError(f"--optimizer {opts.optimizer}: its lr={group['lr']} cannot take effect, "
                            f"--lr is {opts.lr}\ngive --lr, and a group with another rate a `scale`")
    return optimizer


class Recorder(UserDict):
    """A weight's state; `first` keeps the first value of each entry."""

    def __init__(self, given):
        self.first = {}
        super().__init__(given)

    def __setitem__(self, name, value):
        if name not in self.first:
            self.first[name] = value.clone() if torch.is_tensor(value) else value
        super().__setitem__(name, value)


@torch.no_grad()
def make_state(optimizer):
    """Gives each weight the state that the optimizer makes in its first step, as it is before that step.

    So a checkpoint has the same names at step 0 and at step 1000. Weights of one shape share the work, unless
    the state depends on their values: else each restart would be seconds longer.
    """
    groups, made, known, was = optimizer.param_groups, optimizer.state, {}, remembered(optimizer)
    for i, group in enumerate(groups):
        for weight in group["params"]:
            twin, given = weight.detach(), made[weight]
            like = (i, weight.shape, weight.stride(), weight.dtype, weight.device)
            if given or hasattr(weight, "to_local"):
                known[like] = None
            elif like not in known:
                one, other = (_first_state(optimizer, group, values, given)
                              for values in (twin.clone(), torch.full_like(twin, 0.4567)))
                same = one.keys() == other.keys() and all(
                    torch.equal(v, other[n]) if torch.is_tensor(v) else v == other[n] for n, v in one.items())
                known[like] = one if same else None
            made[weight] = _first_state(optimizer, group, twin.clone(), given) \
                if known[like] is None else copy.deepcopy(known[like])
    optimizer.param_groups, optimizer.state, now = groups, made, remembered(optimizer)
    if odd := [name for name, text in now.items() if was.get(name) != text]:
        refuse(optimizer, f"keeps {odd[0]} as its attribute")


def remembered(optimizer):
    """{attribute: its text}: what an optimizer keeps beside groups and state; flags may be torch's own."""
    found = {name: value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")}
    if inner := [name for name, value in found.items() if isinstance(value, torch.optim.Optimizer)]:
        refuse(optimizer, f"keeps another optimizer, {inner[0]}")
    return {name: repr(value) for name, value in found.items() if not isinstance(value, bool)}


def refuse(optimizer, fact):
    raise UserError(f"{type(optimizer).__name__} {fact}, which no checkpoint would hold\n"
                    "keep a tensor instead, in the state of each weight")


def _first_state(optimizer, group, twin, given):
    """What a step makes for one weight, without a gradient and without weight decay, SGD's first momentum."""
    twin.grad = torch.zeros_like(twin)
    alone = group | {"params": [twin]} | ({"weight_decay": 0.0} if "weight_decay" in group else {})
    before, state = dict(alone), Recorder(given)
    optimizer.param_groups, optimizer.state = [alone], defaultdict(dict, {twin: state})
    try:
        optimizer.step()
    except Exception as error:
        if out_of_memory(error):
            raise
        kind = f"{type(optimizer).__name__} fails: {type(error).__name__}"
        raise UserError(f"a step of {kind}: {one_line(error)}\n"
                        "wanted: other --optimizer-args, or a step() that needs no closure") from error
    if odd := [key for key in optimizer.state if key is not twin]:
        refuse(optimizer, f"keeps {odd[0]} in no weight's state")
    for name, value in [*alone.items(), *state.items()]:
        if not torch.is_tensor(value) and value != before.get(name, state.first.get(name)):
            refuse(optimizer, f"keeps {name} as a plain {type(value).__name__}")
    return state.first


# ---- the gradient; nothing here reads a number from a GPU, which would make the program wait for it ----
def finish_gradient(state: Any) -> None:
    """Unscales, divides and clips; call it on every rank, for ranks with parts of one net add their norms."""
    clip, scaler, divisor = state.opts.clip_grad_norm, state.scaler, state.divisor
    if scaler and (clip or state.all_sum or divisor is not None):
        unscale(state)
    gradients = [p.grad for p in state.names if p.grad is not None]
    logged = state.opts.tensorboard and (state.step + 1) % state.opts.log_every == 0
    shown = logged and not scaler and not state.all_sum
    norm = state.norm(gradients) if clip or shown else None
    if shown:
        state.grad_norm = norm if divisor is None else norm / divisor
    if divisor is not None:
        divide(state, gradients, divisor, norm)
    elif clip:
        torch.nn.utils.clip_grads_with_norm_(state.names, clip, norm)


def unscale(state):
    """Undoes fp16's scale; if one rank skips the step, all skip it."""
    none = torch.zeros((), device=next(iter(state.names)).device)
    state.scaler.scale(none)  # initialises the scaler on ranks without a loss
    state.scaler.unscale_(state.optimizer)
    if state.all_sum:
        found = state.scaler._found_inf_per_device(state.optimizer)
        own = sum((overflow.to(none.device) for overflow in found.values()), none)
        overflows = state.all_sum(own).clamp_(max=1.0)
        for other in found.values():  # the optimizer adds them up, and accepts only 0 or 1
            other.zero_()
        found[none.device] = overflows


def divide(state, gradients, divisor, norm):
    """Ends the mean over the global count: in one pass with the clipping, or inside a fused optimizer."""
    factor = 1 / divisor
    if clip := state.opts.clip_grad_norm:
        factor = factor * (clip / (norm.double() / divisor + 1e-6)).clamp(max=1.0)
    elif not state.scaler and all(group.get("fused") for group in state.optimizer.param_groups) and all(
            g.dtype == torch.float32 for g in gradients):
        state.optimizer.grad_scale = divisor.float()
        return
    gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
    for device, kind in {(g.device, g.dtype) for g in gradients}:
        alike = [g for g in gradients if (g.device, g.dtype) == (device, kind)]
        torch._foreach_mul_(alike, factor.to(device, torch.promote_types(kind, torch.float32)))


def learning_rate(step, opts, steps_per_epoch):
    """A pure function of the step, so nothing is stored and nothing is lost with a node."""
    warmup, total = opts.warmup_epochs * steps_per_epoch, max(1, opts.epochs * steps_per_epoch)
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


def factor(found: Any, whose: str, step: int) -> float:
    """The factor that a user's schedule returned for a step, checked; `whose` names the schedule."""
    if not isinstance(found, (int, float)) or not 0 <= found < 1e300:
        raise UserError(f"{whose} returned {found!r} for step {step}\n"
                        "wanted: a factor of the learning rate, a number from 0")
    return float(found)
