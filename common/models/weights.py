"""What a net begins with: weights from elsewhere (--init-from), and layers that stand still (--freeze)."""
import hashlib
import zipfile
from pathlib import Path

import torch

from common.errors import UserError, one_line


@torch.no_grad()
def load_weights(net, opts):
    """--init-from: copies the weights of a file into the net; prefixes of wrappers are removed from names.

    Weights whose names begin with one of --init-skip keep their own first values.
    """
    path = published(opts.model) if opts.init_from == "pretrained" else opts.init_from
    ours, weights, skip = net.state_dict(), {}, opts.init_skip
    for name, tensor in read_weights(path).items():
        name = name if name in ours else name.replace("_orig_mod.", "")
        name = name if name in ours else name.removeprefix("module.")
        if name in weights:
            raise UserError(f"--init-from {path}: holds {name} twice, wrapped and bare\n"
                            "save only net.state_dict()")
        weights[name] = tensor
    check_prefixes("--init-skip", skip, [*ours, *weights])
    tied = {ours[name].data_ptr() for name in ours.keys() & weights.keys()}  # one of its names is enough
    names = sorted(name for name in ours.keys() | weights.keys() if not name.startswith(skip))
    wrong = [name for name in names if (_shape(ours, name) != _shape(weights, name) if name in weights
                                        else ours[name].data_ptr() not in tied)]
    if wrong:
        layers = ",".join(dict.fromkeys(f"{name.rpartition('.')[0]}." for name in wrong[:12]))
        raise UserError(f"--init-from {path}: {len(wrong)} tensors do not fit this model, "
                        f"the first: {wrong[0]} (in the file {_shape(weights, wrong[0])}, "
                        f"in the model {_shape(ours, wrong[0])})\n"
                        f"choose the --model these weights belong to, or begin afresh: --init-skip {layers}")
    for name, tensor in ours.items():
        if name in weights and not name.startswith(skip):
            if _kind(weights[name]) != _kind(tensor):
                raise UserError(f"--init-from {path}: {name} is {_kind(weights[name])}, in the model it is "
                                f"{_kind(tensor)}\nsave them dense, and in the type that the model has")
            tensor.copy_(weights[name])


def read_weights(path):
    """{name: tensor} of a .safetensors file, or of a pickle, from which nothing but tensors is read."""
    try:
        if not Path(path).is_file():
            raise UserError(f"--init-from {path} is no file\nname a file of weights")
        if str(path).endswith(".safetensors"):
            from safetensors.torch import load_file
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--init-from {path}: not a file of weights {_why_not(path, error)}") from error
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict) or not loaded or not all(
            isinstance(name, str) and torch.is_tensor(v) for name, v in loaded.items()):
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


def published(model):
    """The file of torchvision's own weights for a model; nothing is downloaded."""
    from torchvision import models
    try:
        url = models.get_model_weights(model).DEFAULT.url
    except ValueError as error:
        raise UserError(f"--init-from pretrained: torchvision has no weights for --model {model}\n"
                        "name a file") from error
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if not path.is_file():
        raise UserError(f"--init-from pretrained: {path} does not exist, and nothing is downloaded\n"
                        f"fetch {url}, or set TORCH_HOME to where hub/checkpoints/{path.name} is")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if not digest.startswith(path.stem.rpartition("-")[2]):  # its name ends with the first digits
        raise UserError(f"--init-from pretrained: {path} is damaged or changed: its SHA-256 begins with "
                        f"{digest[:8]}, not as its name says\ndelete it and fetch {url}")
    return path


def freeze(net, prefixes):
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


def tied_names(net: torch.nn.Module) -> dict[str, str]:
    """{name: first name} of weights with several names, in the whole net, even if only a part is left."""
    if isinstance(found := getattr(net, "tied", None), dict):
        return found
    named, first = list(net.named_parameters(remove_duplicate=False)), {}
    return {name: first[p] for name, p in named if first.setdefault(p, name) != name}


def check_prefixes(flag, prefixes, names):
    """UserError for a prefix with which no name begins."""
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            layers = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
            raise UserError(f"{flag}: no weight's name begins with {prefix!r}\nthere are {layers[:300]}")


def _kind(tensor):
    """What sort of tensor this is, in words: between two sorts, copy_ fails or changes numbers in silence."""
    plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    number = "complex" if tensor.is_complex() else "real" if tensor.is_floating_point() else "whole"
    return f"of {number} numbers" if plain else f"{tensor.layout}, {tensor.dtype} on {tensor.device}"


def _shape(tensors, name):
    return tuple(tensors[name].shape) if name in tensors else "absent"
