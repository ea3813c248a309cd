"""Weights from elsewhere (--init-from), layers that stand still (--freeze), and what a run has trained."""
import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint import checkpoints, describe
from common.errors import UserError, one_line
from common.options import Options


@torch.no_grad()
def load_weights(net: nn.Module, opts: Options) -> None:
    """--init-from: copies the weights of a file into the net; prefixes of wrappers are removed from names.

    Weights whose names begin with one of --init-skip keep their own first values.
    """
    path, skip, ours = opts.init_from, opts.init_skip, net.state_dict()
    weights: dict[str, Tensor] = {}
    for wrapped, tensor in read_weights(path).items():
        name = wrapped if wrapped in ours else wrapped.replace("_orig_mod.", "")
        name = name if name in ours else name.removeprefix("module.")
        if name in weights:
            raise UserError(f"--init-from {path}: holds {name} twice, wrapped and bare\n"
                            "save only net.state_dict()")
        weights[name] = tensor
    check_prefixes("--init-skip", skip, [*ours, *weights])
    tied = {ours[name].data_ptr() for name in ours.keys() & weights.keys()}  # one of its names is enough
    names = sorted(name for name in ours.keys() | weights.keys() if not name.startswith(skip))
    wrong = [name for name in names if _kind(weights.get(name)) != _kind(ours.get(name))
             and (name in weights or ours[name].data_ptr() not in tied)]
    if wrong:
        layers = ",".join(dict.fromkeys(f"{name.rpartition('.')[0]}." for name in wrong[:12]))
        raise UserError(f"--init-from {path}: {len(wrong)} tensors do not fit this model, "
                        f"the first: {wrong[0]} (in the file {_kind(weights.get(wrong[0]))}, "
                        f"in the model {_kind(ours.get(wrong[0]))})\n"
                        f"choose the --model these weights belong to, or begin afresh: --init-skip {layers}")
    for name in names:
        if name in weights:
            ours[name].copy_(weights[name])


def _kind(tensor):
    """What a tensor is: between two kinds, copy_ fails or changes numbers in silence."""
    if tensor is None:
        return "absent"
    number = "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "whole"
    plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    where = "" if plain else f", {tensor.layout}, {tensor.dtype} on {tensor.device}"
    return f"{tuple(tensor.shape)} of {number} numbers{where}"


def read_weights(path: str) -> dict[str, Tensor]:
    """{name: tensor} of a .safetensors file, or of a pickle, from which nothing but tensors is read."""
    if not Path(path).is_file():
        raise UserError(f"--init-from {path} is no file\nname a file of weights")
    try:
        if str(path).endswith(".safetensors"):
            return load_file(path)
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise UserError(f"--init-from {path}: not a file of weights {_why_not(path, error)}") from error
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded or not all(
            isinstance(name, str) and torch.is_tensor(value) for name, value in loaded.items()):
        raise UserError(f"--init-from {path}: holds no dict of tensors\n"
                        "save it with torch.save(net.state_dict(), path)")
    return loaded


def _why_not(path, error):
    """The end of the message for a file that could not be read: the cause, and the way out."""
    try:
        objects = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # it is no file of torch.save
        objects = []
    if objects:
        return (f"alone: it holds {', '.join(objects[:3])}, and opening such objects can run code\n"
                "if you trust it: torch.save(torch.load(path, weights_only=False)['model'], 'weights.pt')")
    return f"({one_line(error).partition('. ')[0][:120]})\nsave one with torch.save(net.state_dict(), path)"


def freeze(net: nn.Module, prefixes: tuple[str, ...]) -> None:
    """--freeze: weights with these prefixes do not train, and their modules stay in evaluation mode.

    So their BatchNorm uses the statistics it has and keeps them, and their dropout is off.
    """
    check_prefixes("--freeze", prefixes, [name for name, _ in net.named_parameters()])
    for name, parameter in net.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)
    for name, module in net.named_modules():
        if name and f"{name}.".startswith(prefixes):
            # net.train() calls it on every module
            module.eval().train = lambda mode=True, module=module: module


def tied_names(net: nn.Module) -> dict[str, str]:
    """{name: first name} of weights with several names, in the whole net, even if only a part is left."""
    if "_tied_names" not in vars(net):
        first: dict[Tensor, str] = {}
        named = list(net.named_parameters(remove_duplicate=False))
        vars(net)["_tied_names"] = {name: first[p] for name, p in named if first.setdefault(p, name) != name}
    return vars(net)["_tied_names"]


def check_prefixes(flag, prefixes, names):
    """UserError for a prefix with which no name begins."""
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            layers = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise UserError(f"{flag}: no weight's name begins with {prefix!r}\nthere are {layers[:300]}")


def trained_weights(run: Path, which: str | int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(weights, facts) of a run's "best" or "newest" checkpoint, or of a step; averages are the weights."""
    folder, facts = _whole(run)
    step = facts["best"]["step"] if which == "best" else which
    if step and step != "newest":
        folder, facts = _whole(run, step)
    weights: dict[str, list[Tensor]] = {}
    averages: dict[str, list[Tensor]] = {}
    for path in sorted(folder.rglob("*.safetensors")):  # of a sharded net the first part has the first rows
        for name, rows in load_file(path).items():
            if path.name == "model.safetensors":
                weights.setdefault(name, []).append(rows)
            elif name.endswith("/ema"):
                averages.setdefault(name.removesuffix("/ema"), []).append(rows)
    named = {name: torch.cat(rows) if len(rows) > 1 else rows[0]
             for name, rows in (weights | averages).items()}
    return named | {name: named[first] for name, first in facts["tied"].items()}, facts


def _whole(run, step=None):
    """(folder, facts) of the newest checkpoint whose every byte verifies, or of that of a step."""
    for at, folder in checkpoints(run / "checkpoints"):
        if step in (None, at) and describe(at, folder)[0]:
            return folder, json.loads((folder / "state.json").read_text())
    raise UserError(f"{run}: no whole checkpoint" + (f" of step {step}" if step else "") +
                    f"\npython -m common.checkpoint {run} lists them", code=3)
