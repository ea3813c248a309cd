"""A GPT: AdamW with decay for matrices alone, gradients clipped."""

import torch
from beside import class_loss
from program import Part
from torch import nn, optim

TEXT = torch.randint(7, (48, 6), generator=torch.Generator().manual_seed(1)).sort().values
OPTIONS = {"dataset": [(words[:-1], words[1:]) for words in TEXT], "clip_grad_norm": 1.0}


def net():
    def forward(net, words):
        later = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return net.head(net.layer(net.words(words) + net.places.weight, later)).transpose(1, 2)

    layer = nn.TransformerEncoderLayer(8, 2, 16, 0, batch_first=True, norm_first=True, bias=False)
    return Part(
        forward, words=nn.Embedding(7, 8), places=nn.Embedding(5, 8), layer=layer, head=nn.Linear(8, 7)
    )


def optimizer(net):
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0},
    ]
    return optim.AdamW(groups, 0.003, (0.9, 0.95))


def plain(net, optimizer, epochs):
    for epoch in epochs:
        for batch in epoch:
            loss = class_loss(net, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
