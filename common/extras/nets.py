"""Nets by name, beside that of the core: an MLP, an LSTM, torchvision's classifiers."""

import math
from collections import OrderedDict

import torch
from torch import nn

from common.errors import blamed
from common.options import MODELS


def build_mlp(data):
    """Build two linear layers with five units between them, as in the DDP tutorials."""
    features = math.prod(data.sample_shape)
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(features, 5), fc2=nn.Linear(5, data.classes))
    )


class LastHidden(nn.LSTM):
    """An LSTM that returns only its last hidden state, so that it fits into an nn.Sequential."""

    def forward(self, x):
        _, (hidden, _) = super().forward(x)
        return hidden[-1]


def build_lstm(data):
    """Build a text classifier: embedding, one LSTM, a linear layer on its last hidden state."""
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(data.vocab, 50),
            lstm=LastHidden(50, 50, batch_first=True),
            fc=nn.Linear(50, data.classes),
        )
    )


def build_torchvision(name, data):
    """Build any classifier of torchvision.models, untrained, for the data's channels and classes."""
    with blamed(f"model {name} is none of {', '.join(MODELS)}; torchvision", "pip install torchvision"):
        from torchvision import models
    net = models.get_model(name, weights=None, num_classes=data.classes)
    channels = data.sample_shape[0]
    conv = next(module for module in net.modules() if isinstance(module, nn.Conv2d))
    if conv.in_channels != channels:
        conv.in_channels = channels
        conv.weight = nn.Parameter(torch.empty(conv.out_channels, channels, *conv.kernel_size))
        conv.reset_parameters()
    return net
