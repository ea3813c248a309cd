"""Two nets that take turns with each batch."""

from beside import NUMBERS, critic_and_generator, my_turns, plain_turns
from torch import optim
from torch.nn.functional import softplus

BITWISE = True
OPTIONS = {"dataset": NUMBERS}
net = critic_and_generator
plain = plain_turns
mine = my_turns


def optimizer(net):
    return [optim.Adam(part.parameters(), 0.01, (0.5, 0.999)) for part in net.values()]


def loss_of(net, x, noise, turn):
    critic, generator = net.values()
    fake = generator(noise)
    if turn == 0:
        return (softplus(-critic(x)) + softplus(critic(fake.detach()))).mean()
    return softplus(-critic(fake)).mean()
