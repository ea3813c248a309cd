"""Registry of nets; a net may be cut between the children of its top-level nn.Sequential.

To add one, write a function that takes the facts of the data (classes, sample_shape, vocab) and returns an
nn.Module, and add it to MODELS. One in a file of your own needs no edit here: `--model FILE.py:function`.
"""
import inspect
import math
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from common.errors import UserError, did_you_mean, one_line
from common.models.checks import check_net, check_trains, named_tensors
from common.models.gpt import build_gpt
from common.models.weights import freeze, load_weights, tied_names
from common.options import Options, call_user
from common.sampler import seeded


class Pool(nn.MaxPool2d):
    """The same bits in half the time: torch's pooling on CPUs is slow unless channels come last in memory."""

    def forward(self, x):
        if x.device.type != "cpu" or x.dim() < 4 or not x.is_contiguous():
            return super().forward(x)
        with torch.no_grad():
            last = x.contiguous(memory_format=torch.channels_last)
            where = nn.functional.max_pool2d(last, self.kernel_size, return_indices=True)[1].contiguous()
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
    net = nn.Sequential(OrderedDict(
        # Pooling before ReLU gives the same numbers as after it, from a quarter of the work.
        block1=nn.Sequential(nn.Conv2d(channels, 10, 5), Pool(2), nn.ReLU()),
        block2=nn.Sequential(nn.Conv2d(10, 20, 5), nn.Dropout2d(), Pool(2), nn.ReLU()),
        fc1=nn.Sequential(nn.Flatten(), nn.Linear(20 * rest[0] * rest[1], 50), nn.ReLU(), nn.Dropout()),
        fc2=nn.Sequential(nn.Linear(50, data.classes), nn.LogSoftmax(1)),
    ))
    net.placement = (0, 1, 0, 1)  # which of two devices holds each child when the net is cut by hand
    return net


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
    with seeded(opts.seed, "init"):
        if ".py" in name:
            net = call_user(name, opts, data)
            if isinstance(net, (list, tuple)) and all(isinstance(part, nn.Module) for part in net):
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
    setattr(net, "tied", tied_names(net))  # noqa: B010  (of the whole net, before a part of it is taken)
    if opts.init_from:
        load_weights(net, opts)
    if opts.freeze:
        freeze(net, opts.freeze)
    if not opts.eval_only:
        check_trains(net, name)
    return net


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
    if name in ("googlenet", "inception_v3"):
        facts.update(aux_logits=False, init_weights=True)  # the loop takes one output
    if name.startswith("vit_"):
        facts.update(image_size=height)
    if "input_size" in accepted:
        facts.update(input_size=(height, width))
    try:
        net = models.get_model(name, weights=None, **facts)
        fit_channels(net, channels)
        # A dry run on the meta device computes nothing; it fails now if the images are too small for the net.
        on_meta = {key: t.to("meta") for key, t in named_tensors(net)}
        with torch.no_grad():
            x = torch.empty(2, channels, height, width, device="meta")
            torch.func.functional_call(net.eval(), on_meta, (x,))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"model {name} cannot work on dataset {data.name} with samples of shape "
                        f"{data.sample_shape}\n{one_line(error)}") from error
    return net.train()


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
