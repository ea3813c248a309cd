"""The optimizer: how it is made, its state by names."""

import torch
from torch import nn

from common.errors import UserError, blamed
from common.options import Options, extra


def build_optimizer(net: nn.Module, opts: Options) -> torch.optim.Optimizer:
    """Return the optimizer of --optimizer, over all weights that train."""
    if ".py" in opts.optimizer:
        return extra("own_optimizer")(net, opts)
    weights = [p for p in net.parameters() if p.requires_grad]
    kind, arguments = opts.torch_optimizer
    if any(p.is_complex() for p in weights):
        arguments.pop("fused", None)  # torch has none for complex weights
    groups = extra("no_decay_1d")(weights) if opts.no_decay_1d else [{"params": weights}]
    with blamed(
        f"--optimizer {opts.optimizer}",
        "change --optimizer-args, or write a function: path/to/file.py:function",
    ):
        return kind(groups, **arguments)


# ---- an optimizer may hold others: Muon for the matrices and AdamW for the rest, say ----
def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizer, and all that are its attributes, or in lists, tuples, dicts there; each once."""
    parts = [optimizer]
    for part in parts:
        for value in vars(part).values():
            held = [*value.values()] if isinstance(value, dict) else value
            for other in held if isinstance(held, (list, tuple)) else [held]:  # no iterator: it may not end
                if isinstance(other, torch.optim.Optimizer) and other not in parts:
                    parts.append(other)
    return parts


def turns_of(optimizer):
    """Return those that take turns with a batch; usually it is one."""
    return getattr(optimizer, "turns", [optimizer])


def weights_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the weights of its own groups that train."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def groups_of(optimizer):
    """Return the groups of all its parts."""
    return [group for part in parts_of(optimizer) for group in part.param_groups]


def check_groups(optimizer, net):
    """Raise a UserError if a weight trains that the optimizer does not have, or the other way round."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    strangers = held - {*net.parameters()}
    if strangers:
        raise UserError(
            f"the optimizer has a weight of shape {[*strangers.pop().shape]} that is not the net's\n"
            "ranks would not average its gradient, and no checkpoint would hold it: make it a part of the net"
        )
    for name, p in net.named_parameters():
        if p.requires_grad and p not in held:
            raise UserError(
                f"{name} trains, but is in no group of the optimizer\n"
                "what another one does differs between ranks, and is in no checkpoint\n"
                "add it to a group, or freeze it"
            )


# ---- its state, by names ----
def named_state(optimizer, names):
    """Return {"weight/key": tensor} of what it remembers of a weight; "weight/ema" is the run's average."""
    named = {}
    for i, part in enumerate(parts_of(optimizer)):
        for p, values in part.state.items():
            for key, value in values.items() if p in names else ():
                if not (isinstance(key, str) and key.isidentifier()):
                    raise UserError(f"the optimizer's state has a key {key!r}\nname it as a variable")
                if torch.is_tensor(value):
                    part_of = f"{i}." if i or key == "ema" else ""
                    named[f"{names[p]}/{part_of}{key}"] = value
    return named


def take_state(optimizer, names, tensors):
    """Give it what `named_state` has returned; a counter lies where torch's own would."""
    parts = parts_of(optimizer)
    weights = {name: p for p, name in names.items()}
    groups = {id(p): group for part in parts for group in part.param_groups for p in group["params"]}
    for name, tensor in tensors.items():
        weight, _, key = name.rpartition("/")
        number, dot, rest = key.partition(".")
        part = parts[int(number)] if dot else parts[0]
        p = weights[weight]
        if id(p) not in groups:
            raise UserError(
                f"{name} is in the checkpoint, but {weight} is in no group of the optimizer any more\n"
                "keep the weight in its group: one that is frozen may stay there, and takes no step\n"
                "or begin another run with the exported weights"
            )
        group = groups[id(p)]
        on_device = tensor.dim() or group.get("fused") or group.get("capturable")
        if tensor.dim() and tensor.shape == p.shape:  # fused optimizers pair bytes as they lie in memory
            value = torch.empty_like(p, dtype=tensor.dtype).copy_(tensor)
        else:
            value = tensor.to(p.device if on_device else "cpu")
        part.state[p][rest or key] = value
