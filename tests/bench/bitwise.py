"""Step time of --virtual-ranks against plain DDP with the same micro batches, in the same processes.

python tests/bench/bitwise.py                 # W = 2; V = 2, 4, 8; an MLP, a ResNet-18
python tests/bench/bitwise.py --nets mlp --slices 2,8 --rounds 40
"""

import os
import sys
import time

from turns import arguments, compare  # isort: skip  (first: it finds the others)

import torch
from ranks import fork_ranks
from samples import Steps
from torch import nn

from common.options import Options
from common.world.world import keep_memory, pin


def mlp():
    """16.8 million parameters: little arithmetic for each byte exchanged."""
    widths = (784, 2048, 5888, 512, 10)
    layers = [
        part for pair in zip(widths, widths[1:], strict=False) for part in (nn.Linear(*pair), nn.ReLU())
    ]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def resnet():
    """11.2 million parameters, 20 BatchNorms."""
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


NETS = {  # with the shape of a sample, samples a slice
    "mlp": (mlp, (1, 28, 28), 8),
    "resnet": (resnet, (3, 32, 32), 4),
}


def measure(world, name, slices, rounds):
    """Seconds a step of each way, in each round."""
    build, shape, samples = NETS[name]
    size = samples * slices
    x = torch.randn(size, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(size) % 10

    def way(**flags):
        opts = Options(global_batch_size=size, optimizer="sgd", lr=1e-3, device="cpu", **flags)
        torch.manual_seed(0)
        steps = Steps(build(), opts, world, samples=10**6)
        batch = steps.batch(x, y)

        def turn():
            world.all_sum(torch.zeros(1))  # together
            began = time.perf_counter()
            steps.step(batch)
            return time.perf_counter() - began

        return turn

    ways = {"plain": way(micro_batch_size=samples), "bitwise": way(virtual_ranks=slices)}
    pin(Options(virtual_ranks=slices))  # for both: it costs both the same
    keep_memory()
    if world.rank:
        sys.stdout = open(os.devnull, "w")
    compare(f"{name}, V = {slices}", ways, rounds, "plain")


def main():
    args = arguments(__doc__, nets=",".join(NETS), slices="2,4,8", world=2, rounds=30)
    for name in args.nets.split(","):
        for slices in map(int, args.slices.split(",")):
            fork_ranks(args.world, measure, name, slices, args.rounds, deadline=1800)


if __name__ == "__main__":
    main()
