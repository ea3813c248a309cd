"""timm's average is evaluated; a rate that falls when that stalls, and an end when it stalls twice."""

import torch
from beside import TEST, WHOLE_TEST, class_loss
from program import Held
from timm.utils import ModelEmaV3
from torch import optim

OPTIONS = {"test_set": TEST, "epochs": 5}


def optimizer(net):
    return optim.SGD(net.parameters(), 2.0, momentum=0.9)


def memory(net, optimizer):
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return {"ema": ModelEmaV3(net, decay=0.5), "plateau": plateau, "stopper": Held(best=9.0, bad=0)}


def stops(stopper, loss):
    stopper["bad"] = 0 if loss < stopper["best"] else stopper["bad"] + 1
    stopper["best"] = min(loss, stopper["best"])
    return stopper["bad"] == 2


def plain(net, optimizer, epochs, ema, plateau, stopper):
    for epoch in epochs:
        for batch in epoch:
            loss = class_loss(net, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(net)
        with torch.no_grad():
            loss = class_loss(ema.module, WHOLE_TEST).item()
        plateau.step(loss)
        if stops(stopper, loss):
            break


def mine(run, ema, plateau, stopper):
    def judge(batch):
        return {"loss": (class_loss(ema.module, batch.data) * len(batch.y), len(batch.y))}

    for epoch in run.epochs():
        if stopper["bad"] == 2:
            break
        for batch in epoch:
            loss = class_loss(run.model, batch.data)
            run.step(loss)
            if run.stepped:
                ema.update(run.net)
        loss = run.evaluate(judge)["val_loss"]
        run.report(loss=loss)
        plateau.step(loss)
        stops(stopper, loss)
