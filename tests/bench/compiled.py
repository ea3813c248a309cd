"""What --compile costs where gradients travel: a step, and when in the backward the first of them leave.

    torchrun --nproc_per_node=2 tests/bench/compiled.py [STEPS]

The net as it is and compiled as --compile does it take turns. The second figure: the first bucket leaves at
this part of the way from the begin of the backward to the last one.
"""

import os
import sys
import time
from statistics import median

from turns import compare  # isort: skip  (first: it finds the others)

import torch
import torch.distributed as dist
from samples import Facts
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from common.extras.gpt import build_gpt
from common.training.replicas import Weights

TOKENS = (2, 64)  # of a process: sequences, length


class Arm:
    """A net and its engine."""

    def __init__(self, compiles):
        torch.manual_seed(0)
        net = build_gpt(Facts("drawn", 256, TOKENS[1:], vocab=256), "2x4x256")
        self.engine = DistributedDataParallel(Weights(net), bucket_cap_mb=1)
        self.engine.register_comm_hook(None, self.leave)
        self.net = torch.compile(net) if compiles else net
        self.firsts = []

    def leave(self, _, bucket):
        self.left.append(time.perf_counter())
        return allreduce_hook(dist.group.WORLD, bucket)

    def step(self):
        x = torch.randint(256, TOKENS)
        self.left = []
        dist.barrier()
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(self.net(x).flatten(0, 1), x.flatten())
        self.engine()
        backward = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - began
        self.firsts.append((self.left[0] - backward) / (self.left[-1] - backward))
        self.engine.zero_grad()
        return seconds


def main(count=20):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    arms = {"as it is": Arm(compiles=False), "--compile": Arm(compiles=True)}
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")
    compare("a step", {name: arm.step for name, arm in arms.items()}, int(count), "as it is")
    for name, arm in arms.items():
        print(f"{name}: the first bucket at {median(arm.firsts[3:]):.2f} of the last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
