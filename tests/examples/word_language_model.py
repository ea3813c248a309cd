"""An RNN that keeps its hidden state from batch to batch, in order; a quarter of the rate where it stalls."""

import torch
import torch.nn.functional as F
from program import Held, Part
from torch import nn, optim
from torch.utils.data import default_collate

COLUMNS = 16
TEXT = torch.randint(9, (COLUMNS, 16), generator=torch.Generator().manual_seed(1))
WINDOWS = [(column[t : t + 5], column[t + 1 : t + 6]) for t in (0, 5, 10) for column in TEXT]
TEST = [(y, x) for x, y in WINDOWS[:COLUMNS]]
OPTIONS = {"dataset": WINDOWS, "test_set": TEST, "order": "given", "epochs": 4, "clip_grad_norm": 0.25}


def net():
    def forward(net, x, hidden):
        seen, hidden = net.rnn(net.words(x), hidden)
        return net.head(seen).transpose(1, 2), hidden

    return Part(forward, words=nn.Embedding(9, 8), rnn=nn.RNN(8, 8, batch_first=True), head=nn.Linear(8, 9))


def optimizer(net):
    return optim.SGD(net.parameters(), 20.0)


def memory(net, optimizer):
    return {"held": Held(hidden=torch.zeros(1, COLUMNS, 8), best=9.0)}


def next_epoch(optimizer, held, loss):
    held["hidden"] = torch.zeros(1, COLUMNS, 8)
    if loss >= held["best"]:
        optimizer.param_groups[0]["lr"] /= 4
    held["best"] = min(loss, held["best"])


def loss_of(net, batch, hidden=None):
    x, y = batch
    out, hidden = net(x, hidden)
    return F.cross_entropy(out, y), hidden


def plain(net, optimizer, epochs, held):
    test = default_collate(TEST)
    for epoch in epochs:
        for batch in epoch:
            loss, hidden = loss_of(net, batch, held["hidden"])
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
            held["hidden"] = hidden.detach()
        with torch.no_grad():
            loss, _ = loss_of(net, test)
        next_epoch(optimizer, held, loss.item())


def mine(run, held):
    def judge(batch):
        loss, _ = loss_of(run.model, batch.data)
        return {"loss": (loss * len(batch.y), len(batch.y))}

    for epoch in run.epochs():
        for batch in epoch:
            mine = [i % COLUMNS for i in batch.ids]
            loss, hidden = loss_of(run.model, batch.data, held["hidden"][:, mine])
            hidden = run.gather(hidden[0])[None]
            run.step(loss)
            held["hidden"] = hidden
        loss = run.evaluate(judge)["val_loss"]
        run.report(loss=loss)
        next_epoch(run.optimizer, held, loss)
