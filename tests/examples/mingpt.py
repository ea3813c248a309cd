"""A GPT: AdamW with decay for matrices alone, gradients clipped."""

import torch
import torch.nn.functional as F
from program import Part
from torch import nn, optim

TEXT = torch.randint(7, (48, 6), generator=torch.Generator().manual_seed(1)).sort().values
OPTIONS = {"dataset": [(words[:-1], words[1:]) for words in TEXT], "clip_grad_norm": 1.0}


def net():
    def forward(net, words):
        x = net.words(words) + net.places.weight
        query, key, value = net.attention(net.before(x)).chunk(3, 2)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return net.head(x + net.mixer(x))

    return Part(
        forward,
        words=nn.Embedding(7, 8),
        places=nn.Embedding(5, 8),
        before=nn.LayerNorm(8),
        attention=nn.Linear(8, 24, bias=False),
        mixer=nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
        head=nn.Linear(8, 7),
    )


def optimizer(net):
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0},
    ]
    return optim.AdamW(groups, 0.003, (0.9, 0.95))


def loss_of(net, batch):
    x, y = batch
    return F.cross_entropy(net(x).flatten(0, 1), y.flatten())


def plain(net, optimizer, epochs):
    for epoch in epochs:
        for batch in epoch:
            loss = loss_of(net, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
