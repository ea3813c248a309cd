"""Registry of nets; a net may be cut between the children of its top-level nn.Sequential.

To add one, write a function that takes the facts of the data (classes, sample_shape, vocab) and returns an
nn.Module, and add it to MODELS. One in a file of your own needs no edit here: `--model FILE.py:function`.
"""
import inspect
import math
from collections import OrderedDict
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from common.errors import UserError, blamed, did_you_mean
from common.models.gpt import build_gpt
from common.models.weights import freeze, load_weights, tied_names, trained_weights
from common.options import Options, call_user, read_options
from common.sampler import seeded


class HalfPool(nn.Module):
    """2x2 max pooling: the same bits as nn.MaxPool2d(2), which takes twice the time on CPUs."""

    def forward(self, x):
        if x.device.type != "cpu" or x.dim() < 4 or not x.is_contiguous():
            return nn.functional.max_pool2d(x, 2)
        with torch.no_grad():
            last = x.contiguous(memory_format=torch.channels_last)
            where = nn.functional.max_pool2d(last, 2, return_indices=True)[1].contiguous()
        return x.flatten(2).gather(2, where.flatten(2)).view_as(where)


class LastHidden(nn.LSTM):
    """An LSTM that returns only its last hidden state, so that it fits into an nn.Sequential."""

    def forward(self, x):
        _, (hidden, _) = super().forward(x)
        return hidden[-1]


def build_net(data):
    """The MNIST network of the tutorials: two convolutions, two linear layers, log-probabilities out."""
    channels, height, width = numbers("net", data, dims=3)
    rest = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    if min(rest) < 1:
        raise UserError(f"model net needs 16x16 pixels or more, dataset {data.name} has {height}x{width}")
    return nn.Sequential(OrderedDict(
        # Pooling before ReLU gives the same numbers as after it, from a quarter of the work.
        block1=nn.Sequential(nn.Conv2d(channels, 10, 5), HalfPool(), nn.ReLU()),
        block2=nn.Sequential(nn.Conv2d(10, 20, 5), nn.Dropout2d(), HalfPool(), nn.ReLU()),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(20 * rest[0] * rest[1], 50), nn.ReLU(), nn.Dropout()),
        fc2=nn.Sequential(nn.Linear(50, data.classes), nn.LogSoftmax(1)),
    ))


def build_mlp(data):
    """Two linear layers with five units between them, as in the DDP tutorials."""
    features = math.prod(numbers("mlp", data))
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(features, 5),
                                     fc2=nn.Linear(5, data.classes)))


def build_lstm(data):
    """A text classifier: embedding, one LSTM, a linear layer on its last hidden state."""
    if not data.vocab:
        raise UserError(f"model lstm reads words, dataset {data.name} has shape {data.sample_shape}\n"
                        "choose --dataset sentiment, or another --model")
    return nn.Sequential(OrderedDict(
        embedding=nn.Embedding(data.vocab, 50), lstm=LastHidden(50, 50, batch_first=True),
        fc=nn.Linear(50, data.classes)))


MODELS = {"net": build_net, "mlp": build_mlp, "lstm": build_lstm, "gpt": build_gpt}


def build_model(opts: Options, data: Any) -> nn.Module:
    """The net that `opts.model` names, on the CPU; its weights depend only on opts.seed and --init-from."""
    name = opts.model
    with seeded(opts.seed, "init"), blamed(f"model {name}"):
        if ".py" in name:
            net = call_user(name, opts, data)
            if isinstance(net, (list, tuple)) and all(isinstance(stage, nn.Module) for stage in net):
                net = nn.Sequential(*net)  # its stages, already cut
            if not isinstance(net, nn.Module):
                raise UserError(f"model {name} returned {type(net).__name__}, not an nn.Module")
        elif name in MODELS:
            net = MODELS[name](data)
        elif name.startswith("gpt:"):
            net = build_gpt(data, name[4:])
        else:
            net = build_torchvision(name, data)
    check_net(net, name)
    net = net.cpu()
    net.train()  # here a net may freeze parts of itself
    tied_names(net)  # noted of the whole net, before a part of it is taken
    vars(net)["_facts_of_data"] = {fact: getattr(data, fact, None) for fact in FACTS}
    if opts.init_from:
        load_weights(net, opts)
    if opts.freeze:
        freeze(net, opts.freeze)
    if not opts.eval_only and not any(p.requires_grad for p in net.parameters()):
        raise UserError(f"model {name}: no weight of it trains\n"
                        "give it weights with requires_grad, or --freeze fewer")
    return net


def load(run: str | Path, which: str | int = "best") -> nn.Module:
    """The net of a run, on the CPU and in evaluation mode: no torchrun is needed, nor the data.

    Its weights are those of the best evaluation, averaged with --ema-decay; or the "newest", or of a step.
    """
    weights, facts = trained_weights(Path(run), which)
    if not facts["data"]:
        raise UserError(f"{run} was trained by a script of its own, which builds the net\n"
                        f"build it there, and give it python -m common.checkpoint {run} --best --export w.pt")
    flags = read_options(run)["options"] | {"init_from": "", "init_skip": (), "freeze": (), "eval_only": True}
    known: dict[str, Any] = {}
    for field in fields(Options):
        if field.name in flags:
            value = flags[field.name]
            known[field.name] = tuple(value) if isinstance(value, list) else value
    opts = Options(**known)
    data = SimpleNamespace(**facts["data"], classes=facts["data"]["known_classes"])
    data.sample_shape = tuple(data.sample_shape)
    net = build_model(opts, data)
    net.load_state_dict(weights)
    return net.eval()


FACTS = "name", "known_classes", "sample_shape", "vocab"  # of the data, from which a net is built


def facts_of_data(net: nn.Module) -> dict[str, Any]:
    """The facts that `build_model` was given; a checkpoint holds them, so that `load` needs no data."""
    return vars(net).get("_facts_of_data", {})


def named_tensors(net: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*net.named_parameters(), *net.named_buffers()]


def check_net(net: nn.Module, name: str) -> None:
    """UserError for a net that could not be trained, or whose checkpoints would lack something."""
    for path, tensor in named_tensors(net):
        if nn.parameter.is_lazy(tensor):
            raise UserError(f"model {name}: {path} has no size yet (a lazy layer)\n"
                            "give the layer all sizes, or run the net once on zeros before you return it")
        if tensor.is_meta or tensor.layout != torch.strided:
            raise UserError(f"model {name}: {path} is {tensor.layout} on {tensor.device}\n"
                            "return the net with its weights made, and dense")
        if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
            tensor.data = tensor.data.clone()  # expanded: nothing can be loaded into it
    for path, module in net.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UserError(f"model {name}: {path} makes sparse gradients\n"
                            "leave out sparse=True: updates here are dense")
    again = net.state_dict()
    for path, value in net.state_dict().items():
        if not torch.is_tensor(value) or value.data_ptr() != again[path].data_ptr():
            raise UserError(f"model {name}: its state_dict makes {path} ({type(value).__name__}) anew each "
                            "time\na checkpoint holds the net's own tensors: keep it in a buffer "
                            "(register_buffer)")


def build_torchvision(name, data):
    """Any classifier of torchvision.models, untrained, with the data's number of channels and classes."""
    try:
        from torchvision import models
    except ImportError:
        raise UserError(f"model {name} is none of {', '.join(MODELS)}, and torchvision is not installed\n"
                        "pip install torchvision") from None
    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"unknown model {name!r}{did_you_mean(name, [*MODELS, *known], 3)}\n"
                        f"there are {', '.join(MODELS)}, torchvision's names, and path/to/file.py:function")
    channels, height, width = numbers(name, data, dims=3)
    accepted = inspect.signature(models.get_model_builder(name)).parameters
    facts = {"num_classes": data.classes}
    if name.startswith("vit_"):
        facts["image_size"] = height
    if "input_size" in accepted:
        facts["input_size"] = (height, width)
    net = models.get_model(name, weights=None, **facts)
    fit_channels(net, channels)
    return net


def fit_channels(net, channels):
    """Replace the first convolution of `net` by one that takes `channels` channels, if it does not."""
    path, conv = next((path, part) for path, part in net.named_modules() if isinstance(part, nn.Conv2d))
    if conv.in_channels == channels:
        return
    parent, _, child = path.rpartition(".")
    fitted = nn.Conv2d(channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding,
                       conv.dilation, bias=conv.bias is not None)
    setattr(net.get_submodule(parent), child, fitted)


def numbers(model, data, dims=None):
    """The sample shape, for a model that takes numbers (in `dims` dimensions)."""
    if data.vocab or (dims and len(data.sample_shape) != dims):
        other = ("gpt" if data.classes == data.vocab else "lstm") if data.vocab else "mlp"
        has = "words" if data.vocab else f"samples of shape {data.sample_shape}"
        kind = "images" if dims else "numbers"
        raise UserError(f"model {model} takes {kind}, dataset {data.name} has {has}\n"
                        f"choose --model {other}, or another --dataset")
    return data.sample_shape
