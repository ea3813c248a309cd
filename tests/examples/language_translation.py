"""A Transformer over padded sentences; the loss counts words."""

import torch
import torch.nn.functional as F
from program import Part
from torch import nn, optim
from torch.nn.utils.rnn import pad_sequence

PAD = 0
WORDS = torch.randint(2, 10, (48, 6), generator=torch.Generator().manual_seed(1))


class Sentences(list):
    def collate(self, samples):
        return [pad_sequence(side, batch_first=True) for side in zip(*samples, strict=True)]


sources = [words[: 3 + i % 4] for i, words in enumerate(WORDS)]
OPTIONS = {"dataset": Sentences((words, torch.cat([torch.tensor([1]), words.flip(0)])) for words in sources)}


def net():
    def forward(net, source, target):
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        nothing = source == PAD
        masks = {"src_key_padding_mask": nothing, "memory_key_padding_mask": nothing}
        out = net.inner(net.words(source), net.words(target), tgt_mask=later, **masks)
        return net.head(out).transpose(1, 2)

    inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0, batch_first=True)
    return Part(forward, words=nn.Embedding(10, 8), inner=inner, head=nn.Linear(8, 10))


def optimizer(net):
    return optim.SGD(net.parameters(), 0.2)


def loss_of(net, batch, reduction="mean"):
    source, target = batch
    out = net(source, target[:, :-1])
    return F.cross_entropy(out, target[:, 1:], ignore_index=PAD, reduction=reduction)


def mine(run):
    for batch in run:
        loss = loss_of(run.model, batch.data, "sum")
        run.step(loss, (batch.data[1][:, 1:] != PAD).sum())
