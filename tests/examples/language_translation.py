"""A Transformer over padded sentences; the loss counts words."""

import torch
import torch.nn.functional as F
from program import Part
from torch import nn, optim
from torch.nn.utils.rnn import pad_sequence

PAD = 0


class Sentences(list):
    def collate(self, samples):
        return [
            pad_sequence(side, batch_first=True, padding_value=PAD) for side in zip(*samples, strict=True)
        ]


def made():
    def forward(net, source, target):
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        nothing = source == PAD
        masks = {"src_key_padding_mask": nothing, "memory_key_padding_mask": nothing}
        out = net.inner(net.words(source), net.words(target), tgt_mask=later, **masks)
        return net.head(out)

    inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0, batch_first=True)
    net = Part(forward, words=nn.Embedding(10, 8), inner=inner, head=nn.Linear(8, 10))
    draws = torch.Generator().manual_seed(1)
    sources = [torch.randint(2, 10, (3 + i % 4,), generator=draws) for i in range(48)]
    pairs = Sentences((words, torch.cat([torch.tensor([1]), words.flip(0)])) for words in sources)
    return {"net": net, "optimizer": optim.SGD(net.parameters(), 0.2), "dataset": pairs}


def plain(net, optimizer, epochs):
    for epoch in epochs:
        for source, target in epoch:
            out = net(source, target[:, :-1])
            loss = F.cross_entropy(out.transpose(1, 2), target[:, 1:], ignore_index=PAD)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def mine(run):
    for batch in run:
        source, target = batch.data
        out = run.model(source, target[:, :-1])
        loss = F.cross_entropy(out.transpose(1, 2), target[:, 1:], ignore_index=PAD, reduction="sum")
        run.step(loss, (target[:, 1:] != PAD).sum())
