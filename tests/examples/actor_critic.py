"""Two heads; a running reward, which ends the training; the dice of an episode are its sample's."""

import torch
import torch.nn.functional as F
from beside import actor_and_critic, numbers, pole
from program import Held
from torch import optim

net = actor_and_critic
STARTS = zip(numbers(48, 4) / 9, torch.special.ndtr(numbers(48, 10)), strict=True)
OPTIONS = {"dataset": [*STARTS], "epochs": 4}


def optimizer(net):
    return optim.Adam(net.parameters(), 0.03)


def memory(net, optimizer):
    return {"running": Held(reward=0.0)}


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
        for batch in epoch:
            loss, reward = played(net, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if is_solved(running, reward):
                return


def mine(run, running):
    for batch in run:
        loss, reward = played(run.model, *batch.data)
        reward = run.mean(reward)
        run.step(loss)
        if is_solved(running, reward):
            return
