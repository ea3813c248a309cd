"""A critic with three turns, whose weights are clipped, and a generator with one."""

from beside import NUMBERS, critic_and_generator, my_turns, plain_turns
from torch import optim

BITWISE = True
OPTIONS = {"dataset": NUMBERS}
net = critic_and_generator
plain = plain_turns
mine = my_turns


def optimizer(net):
    of_critic, of_generator = (optim.RMSprop(part.parameters(), 0.005) for part in net.values())
    return [of_critic] * 3 + [of_generator]


def loss_of(net, x, noise, turn):
    critic, generator = net.values()
    fake = generator(noise)
    if turn < 3:
        return (critic(fake.detach()) - critic(x)).mean()
    return -critic(fake).mean()


def after(net):
    for p in net["critic"].parameters():
        p.data.clamp_(-0.3, 0.3)
