"""timm's average is evaluated; a rate that falls when that stalls, and an end when it stalls twice."""

import torch
import torch.nn.functional as F
from beside import labelled
from program import Held
from timm.utils import ModelEmaV3
from torch import nn, optim

TEST = labelled(20, 6)


def made():
    net = nn.Linear(6, 3)
    optimizer = optim.SGD(net.parameters(), 2.0, momentum=0.9)
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    memory = {"ema": ModelEmaV3(net, decay=0.5), "plateau": plateau, "stopper": Held(best=9.0, bad=0)}
    return {
        "net": net,
        "optimizer": optimizer,
        "memory": memory,
        "epochs": 5,
        "dataset": labelled(48, 6),
        "test_set": TEST,
    }


def stops(stopper, loss):
    stopper["bad"] = 0 if loss < stopper["best"] else stopper["bad"] + 1
    stopper["best"] = min(loss, stopper["best"])
    return stopper["bad"] == 2


def plain(net, optimizer, epochs, ema, plateau, stopper):
    seen = {}
    for number, epoch in enumerate(epochs, 1):
        for x, y in epoch:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(net)
        with torch.no_grad():
            x, y = map(torch.stack, zip(*TEST, strict=True))
            loss = F.cross_entropy(ema.module(x), y).item()
        seen |= {f"step {3 * number}: val_loss": loss, f"step {3 * number}: lr": plateau.get_last_lr()[0]}
        plateau.step(loss)
        if stops(stopper, loss):
            break
    return seen


def mine(run, ema, plateau, stopper):
    def judge(batch):
        return {"loss": (F.cross_entropy(ema.module(batch.x), batch.y, reduction="sum"), len(batch.y))}

    for epoch in run.epochs():
        if stopper["bad"] == 2:
            break
        for batch in epoch:
            loss = F.cross_entropy(run.model(batch.x), batch.y)
            run.step(loss)
            if run.stepped:
                ema.update(run.net)
        loss = run.evaluate(judge)["val_loss"]
        run.report(loss=loss)
        plateau.step(loss)
        stops(stopper, loss)
