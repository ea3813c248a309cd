"""Weights without their checkpoint: read from a foreign file, and compared between ranks."""
import zipfile

import torch

from common.errors import UserError


def load_weights(state, path, shapes=None, own=lambda name, tensor: tensor):
    """--init-from: a foreign .pt file, weights only; wrapped names are stripped. Explicit, because this one is a pickle.

    A rank with a part of the net gives the `shapes` of the whole, and which part of a tensor is its `own`: of the others no
    byte is read.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        words = next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]
        raise UserError(f"--init-from {path}: not a file of weights ({words[:120]})\n"
                        "save one with torch.save(net.state_dict(), path)") from error
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded or not all(torch.is_tensor(v) for v in loaded.values()):
        raise UserError(f"--init-from {path}: holds no dict of tensors\nsave it with torch.save(net.state_dict(), path)")
    ours, weights = shapes or {name: tensor.shape for name, tensor in state.net.state_dict().items()}, {}
    for name, tensor in loaded.items():
        name = name if name in ours else name.replace("_orig_mod.", "")
        name = name if name in ours else name.removeprefix("module.")
        if name in weights:
            raise UserError(f"--init-from {path}: {name} is there twice, wrapped and bare\nsave net.state_dict() alone")
        weights[name] = tensor
    wrong = sorted(n for n in ours.keys() | weights.keys()
                   if n not in ours or n not in weights or tuple(ours[n]) != tuple(weights[n].shape))
    if wrong:
        found = {name: tensor.shape for name, tensor in weights.items()}
        raise UserError(f"--init-from {path}: {len(wrong)} tensors do not fit this model, the first: {wrong[0]} "
                        f"(in the file {_shape(found, wrong[0])}, in the model {_shape(ours, wrong[0])})\n"
                        "choose the --model these weights belong to")
    for name, live in state.tensors()["model"].items():
        live.copy_(own(name, weights[name]))
    for name, buffer in state.net.named_buffers():
        buffer.copy_(state.buffers[name])
    for name, parameter in state.net.named_parameters():
        if name in state.ema:
            state.ema[name].copy_(parameter.detach())               # an average starts where the weights start
    return str(path)


def _shape(shapes, name):
    return tuple(shapes[name]) if name in shapes else "absent"
