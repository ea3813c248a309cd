"""Two heads; a running reward, which ends the training; the dice of an episode are its sample's."""

import torch
import torch.nn.functional as F
from beside import actor_and_critic, numbers, pole
from program import Held
from torch import optim


def made():
    net = actor_and_critic()
    starts = zip(numbers(48, 4) / 9, torch.special.ndtr(numbers(48, 10)), strict=True)
    return {
        "net": net,
        "optimizer": optim.Adam(net.parameters(), 0.03),
        "dataset": [*starts],
        "memory": {"running": Held(reward=0.0)},
        "epochs": 4,
    }


def played(net, state, dice):
    """(loss, mean reward)"""
    logs, values, rewards = [], [], []
    for number in dice.unbind(1):
        log, value = net(state)
        action = (number < log[:, 1].exp()).long()
        logs.append(log.gather(1, action[:, None])[:, 0])
        values.append(value)
        state = pole(state, action)
        rewards.append((state[:, 2].abs() < 0.3).float())
    values, rewards = torch.stack(values), torch.stack(rewards)
    returns = rewards.flip(0).cumsum(0).flip(0)
    gain = returns - values.detach()
    loss = -(torch.stack(logs) * gain) + F.smooth_l1_loss(values, returns, reduction="none")
    return loss.sum(0).mean(), rewards.sum(0).mean()


def is_solved(running, reward):
    running["reward"] = 0.9 * running["reward"] + 0.1 * float(reward)
    return running["reward"] > 5.5


def plain(net, optimizer, epochs, running):
    for epoch in epochs:
        for state, dice in epoch:
            loss, reward = played(net, state, dice)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_solved(running, reward):
                return


def mine(run, running):
    for batch in run:
        state, dice = batch.data
        loss, reward = played(run.model, state, dice)
        reward = run.mean(reward)
        run.step(loss)
        if is_solved(running, reward):
            return
