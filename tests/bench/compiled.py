"""What --compile costs where gradients travel: a step, and when in the backward the first of them leave.

    torchrun --nproc_per_node=2 tests/bench/compiled.py [STEPS]

Three arms take turns: the net as it is, compiled as --compile does it, and compiled inside DDP's own forward,
where torch cuts the graph at DDP's buckets. 1.0 is the net as it is, step by step; the median, and quartiles.
"""

import sys
import time
from pathlib import Path
from statistics import quantiles
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from common.extras.gpt import build_gpt  # noqa: E402
from common.training.replicas import Weights  # noqa: E402

TOKENS = (2, 64)  # of a process: sequences, length


class Arm:
    """A net, its engine, and what its steps took."""

    def __init__(self, compiles, inside):
        torch.manual_seed(0)
        net = build_gpt(SimpleNamespace(vocab=256, classes=256, sample_shape=TOKENS[1:]), "2x4x256")
        self.engine = DistributedDataParallel(net if inside else Weights(net), bucket_cap_mb=1)
        self.engine.register_comm_hook(None, self.leave)
        self.inside = inside
        self.net = self.engine if inside else net
        if compiles:
            self.net = torch.compile(self.net)
        self.steps = []
        self.firsts = []

    def leave(self, _, bucket):
        self.left.append(time.perf_counter())
        return allreduce_hook(dist.group.WORLD, bucket)

    def step(self, x):
        self.left = []
        dist.barrier()
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(self.net(x).flatten(0, 1), x.flatten())
        if not self.inside:
            self.engine()
        backward = time.perf_counter()
        loss.backward()
        self.steps.append(time.perf_counter() - began)
        self.firsts.append((self.left[0] - backward) / (self.left[-1] - backward))
        self.engine.zero_grad()


def summary(name, values):
    low, middle, high = quantiles(values, n=4)
    return f"{name} {middle:.2f} ({low:.2f} to {high:.2f})"


def main(count):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    arms = {"as it is": Arm(False, False), "--compile": Arm(True, False), "inside DDP": Arm(True, True)}
    x = torch.randint(256, TOKENS)
    for _ in range(count + 3):
        for arm in arms.values():
            arm.step(x)
    base = arms["as it is"].steps[3:]
    for name, arm in arms.items():
        ratios = [mine / theirs for mine, theirs in zip(arm.steps[3:], base, strict=True)]
        if dist.get_rank() == 0:
            print(
                f"{name}: {summary('step', ratios)}, {summary('first bucket at', arm.firsts[3:])} of the last"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int((sys.argv[1:] or [20])[0]))
