"""Environments and what was played in them are remembered, and trained on in several epochs."""

import torch
from beside import actor_and_critic, numbers, pole
from program import Held

net = actor_and_critic
OPTIONS = {"dataset": [*range(48)], "epochs": 4}  # rows of the rollout


def memory(net, optimizer):
    rollout = Held(now=numbers(12, 4) / 9)
    play(net, rollout, 0)
    return {"rollout": rollout}


@torch.no_grad()
def play(net, rollout, epoch):
    """Every other epoch: four steps of twelve poles."""
    if epoch % 2:
        return
    draws = torch.Generator().manual_seed(epoch)
    rows = []
    for _ in range(4):
        state = rollout["now"]
        log, value = net(state)
        action = log.exp().multinomial(1, generator=draws)
        rollout["now"] = pole(state, action[:, 0])
        gain = (rollout["now"][:, 2].abs() < 0.3) * 5 - value
        rows.append((state, action, log.gather(1, action)[:, 0], gain, gain + value))
    names = "states", "actions", "logs", "gains", "returns"
    rollout.update(zip(names, map(torch.cat, zip(*rows, strict=True)), strict=True))


def loss_of(net, rollout, rows):
    log, value = net(rollout["states"][rows])
    ratio = (log.gather(1, rollout["actions"][rows])[:, 0] - rollout["logs"][rows]).exp()
    gain = rollout["gains"][rows]
    policy = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    return (value - rollout["returns"][rows]).square().mean() / 2 - policy


def plain(net, optimizer, epochs, rollout):
    for number, epoch in enumerate(epochs, 1):
        for rows in epoch:
            loss = loss_of(net, rollout, rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        play(net, rollout, number)


def mine(run, rollout):
    for epoch in run.epochs():
        for batch in epoch:
            loss = loss_of(run.model, rollout, batch.data)
            run.step(loss)
        play(run.net, rollout, run.progress.epoch + 1)
