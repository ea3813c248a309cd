"""The optimizer: how it is made, the state it begins with, the gradient it gets, the learning rate."""

import inspect
import math
from collections import UserDict, defaultdict
from types import MappingProxyType

import torch
from torch import Tensor, nn

from common.errors import UserError, blamed, warn
from common.options import Options, call_user
from common.sampler import seeded
from common.training.unsaved import remembered_aside

def build_optimizer(net: nn.Module, opts: Options) -> torch.optim.Optimizer:
    """The optimizer of --optimizer over all weights that train; TrainState makes its state."""
    if ".py" in opts.optimizer:
        return checked(call_user(opts.optimizer, net, opts, first=True), opts)
    return _named(net, opts)


def _named(net, opts):
    """The optimizer of this name in torch.optim."""
    weights = [p for p in net.parameters() if p.requires_grad]
    kind, arguments = opts.torch_optimizer
    if any(p.is_complex() for p in weights):
        arguments.pop("fused", None)  # torch has none for complex weights
    groups: list[dict] = [{"params": weights}]  # a frozen stage has none
    if opts.no_decay_1d:
        groups = [
            {"params": [p for p in weights if p.dim() > 1]},
            {"params": [p for p in weights if p.dim() <= 1], "weight_decay": 0.0},
        ]
    with blamed(
        f"--optimizer {opts.optimizer}",
        "change --optimizer-args, or write a function: path/to/file.py:function",
    ):
        return kind(groups, **arguments)


def checked(optimizer, opts):
    """A user's optimizer; UserError unless it is one, at the rate of --lr."""
    flag = f"--optimizer {opts.optimizer}"
    with blamed(flag, "return a torch.optim.Optimizer of the net's weights"):
        groups_of(optimizer)
    for part in parts_of(optimizer):
        usual = inspect.signature(type(part)).parameters.get("lr")
        for group in part.param_groups:
            if group.get("lr", opts.lr) not in (opts.lr, usual and usual.default):
                raise UserError(
                    f"{flag}: its lr={group['lr']} cannot take effect, --lr is {opts.lr}\n"
                    "give --lr, and a group with another rate a `scale`"
                )
    return optimizer


# ---- an optimizer may hold others: Muon for the matrices and AdamW for the rest, say ----
def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizer, and all that are its attributes, or in lists, tuples and dicts there; each once."""
    parts = [optimizer]
    for part in parts:
        for value in vars(part).values():
            held = [*value.values()] if isinstance(value, dict) else value
            for other in held if isinstance(held, (list, tuple)) else [held]:  # no iterator: it may not end
                if isinstance(other, torch.optim.Optimizer) and other not in parts:
                    parts.append(other)
    return parts


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [group for part in parts_of(optimizer) for group in part.param_groups]


def check_groups(optimizer, net):
    """UserError if a weight trains that the optimizer does not have, or the other way round."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    strangers = held - {*net.parameters()}
    if strangers:
        raise UserError(
            f"the optimizer has a weight of shape {[*strangers.pop().shape]} that is not the net's\n"
            "ranks would not average its gradient, and no checkpoint would hold it: make it a part of the net"
        )
    if any(group.get("dampening") for group in groups_of(optimizer)):
        raise UserError(
            "the optimizer has dampening, which would damp its first step, too, unlike torch\nleave it out"
        )
    hooked = [name for name, p in net.named_parameters() if p._backward_hooks]
    if hooked:
        warn(
            f"a hook on {', '.join(hooked[:3])} sees the gradient of one rank's share alone\n"
            "for the whole gradient there is optimizer.register_step_pre_hook"
        )
    for name, p in net.named_parameters():
        if p.requires_grad and p not in held:
            raise UserError(
                f"{name} trains, but is in no group of the optimizer\n"
                "what another one does differs between ranks, and is in no checkpoint\n"
                "add it to a group, or freeze it"
            )


# ---- the state it begins with ----
class FirstValues(UserDict):
    """A weight's state; `first` keeps what the optimizer put there first, before its step changed it."""

    def __init__(self, given):
        self.first = {}
        super().__init__(given)

    def __setitem__(self, name, value):
        if not isinstance(value, Tensor) and value is not None:
            raise TypeError(f"its state has {name}, which no checkpoint would hold: keep a tensor instead")
        if name == "ema":
            raise TypeError("its state has 'ema', which in a checkpoint is an averaged weight: rename it")
        self.first.setdefault(name, None if value is None else value.clone())
        super().__setitem__(name, value)


@torch.no_grad()
def make_state(optimizer):
    """Gives each weight the state that the optimizer makes in its first step, as it is before that step.

    So a checkpoint has the same names at step 0 and at step 1000. The step is made without a gradient, and
    without weight decay, which SGD would remember.
    """
    parts = parts_of(optimizer)
    groups = [part.param_groups for part in parts]
    for i, part in enumerate(parts):
        for other in parts:
            other.param_groups = []  # it must not step on the net's weights
        part.param_groups = groups[i]
        before = remembered_aside(part)
        _make_state(part)
        changed = [name for name, value in remembered_aside(part).items() if before.get(name) != value]
        if changed:
            raise UserError(
                f"a step of {type(part).__name__} changes its {changed[0]}, which no checkpoint holds\n"
                "wanted: tensors in the state of each weight, or optimizers as its attributes"
            )
    for part, own in zip(parts, groups, strict=True):
        part.param_groups = own


def _make_state(optimizer):
    groups = optimizer.param_groups
    states = optimizer.state
    weights = [(group, weight) for group in groups for weight in group["params"]]
    is_torchs = type(optimizer).__module__.startswith("torch.")
    zeros = {}  # by kinds of weights: a state that begins with nothing else
    for group, weight in weights:
        kind = (id(group), weight.dtype, weight.device, weight.shape, weight.stride())
        # a script may have made it before its net moved to the device; counters stay
        given = {
            name: value.to(weight.device) if torch.is_tensor(value) and value.dim() else value
            for name, value in states.get(weight, {}).items()
        }
        if kind in zeros and not given:
            states[weight] = {name: torch.zeros_like(value) for name, value in zeros[kind].items()}
            continue
        _, state = _step_of_twin(optimizer, group, weight, given, 0.0)
        states[weight] = state.first
        # what a user's optimizer makes may be zeros for this weight alone
        if is_torchs and not any(value is None or value.any() for value in state.first.values()):
            zeros[kind] = state.first
    if weights and not is_torchs:
        group, weight = weights[-1]
        _, state = _step_of_twin(optimizer, group, weight, {}, 0.0)
        afresh, _ = _step_of_twin(optimizer, group, weight, {}, 1.0)
        made, _ = _step_of_twin(optimizer, group, weight, state.first, 1.0)
        if not torch.equal(afresh, made):
            raise UserError(
                f"the first step of {type(optimizer).__name__} begins its state with the gradient\n"
                "wanted: a state that begins with the same values whatever the gradient is"
            )
    optimizer.param_groups = groups
    optimizer.state = states


def _step_of_twin(optimizer, group, weight, given, gradient):
    """(a copy of the weight after a step from the `given` state, that state)."""
    twin = weight.detach().clone()
    twin.grad = torch.full_like(twin, gradient)
    state = FirstValues(given)
    # It cannot be changed: no checkpoint would hold that.
    optimizer.param_groups = [MappingProxyType(group | {"weight_decay": 0.0, "params": [twin]})]
    optimizer.state = defaultdict(dict, {twin: state})
    with (
        seeded("step of twin"),
        blamed(
            f"a step of {type(optimizer).__name__}",
            "wanted: other --optimizer-args; a step() without a closure; no change of its groups",
        ),
    ):
        inspect.unwrap(type(optimizer).step)(optimizer)  # without hooks: they belong to real steps
    return twin, state


# ---- the gradient; nothing here reads a number from a GPU, which would make the program wait for it ----
def unscale(state):
    """Undoes fp16's scale; if one rank skips the step, all skip it."""
    state.scaler.scale(torch.zeros((), device=state.device))  # initialises it on ranks without a loss
    state.scaler.unscale_(state.optimizer)
    marks = state.scaler._found_inf_per_device(state.optimizer)
    overflows = sum((mark.to(state.device) for mark in marks.values()), torch.zeros((), device=state.device))
    for mark in marks.values():  # the optimizer adds them up, and accepts only 0 or 1
        mark.zero_()
    marks[state.device] = overflows.clamp_(max=1.0)


def end_mean(state, counted, size, add):
    """Ends the mean where a task counts other things than samples; `add` sums over all ranks."""
    if not state.task.counts_samples:
        total = add(counted.clone())
        divide(state.gradients, torch.where(total == 0, 1.0, total / size))


def divide(gradients, divisor):
    alike = defaultdict(list)
    for gradient in gradients:
        alike[gradient.device, gradient.dtype].append(gradient)
    for (device, kind), rows in alike.items():
        torch._foreach_div_(rows, divisor.to(device, torch.promote_types(kind, torch.float32)))


# ---- the learning rate ----
def learning_rate(step, opts, steps_per_epoch, schedule=None):
    """A pure function of the step, so nothing is stored and nothing is lost with a node.

    `schedule` is that of a loop of one's own: a function of (step, steps in all), as --lr-schedule names one.
    """
    warmup = opts.warmup_epochs * steps_per_epoch
    total = max(1, opts.epochs * steps_per_epoch)
    if schedule or ".py" in opts.lr_schedule:
        if schedule:
            value = schedule(step, total)
        else:
            value = call_user(opts.lr_schedule, step, total, opts, first=True)
        if not isinstance(value, (int, float)) or not 0 <= value < 1e300:
            raise UserError(
                f"the schedule returned {value!r} for step {step}\n"
                "wanted: a factor of the learning rate, a number from 0"
            )
        return opts.lr * value
    if step < warmup:
        return opts.lr * (step + 1) / (warmup + 1)
    if opts.lr_schedule == "cosine":
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return opts.min_lr + (opts.lr - opts.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if opts.lr_schedule == "step":  # a tenth after each third of the run
        return max(opts.min_lr, opts.lr * 0.1 ** min(2, 3 * step // total))
    return opts.lr
