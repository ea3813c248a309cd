"""Step time of --virtual-ranks against plain DDP with the same micro batches, and the bytes both send.

    python tests/bench/bitwise.py                 # W = 2; V = 2, 4, 8; a small CNN, an MLP, a ResNet-18
    python tests/bench/bitwise.py --nets cnn --slices 2,8 --rounds 40

Both modes live in the same processes and take turns, a few steps each, so that whatever else the machine does
hits both: read the ratios (median over the rounds, with the quartiles), not the milliseconds. CPU time, of
all ranks, is steadier.
"""
import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

import torch
from ranks import fork_ranks
from samples import share_of
from torch import nn

from common.options import Options
from common.training import TrainState, backward, build_optimizer, distribute
from common.world.determinism import pin
from common.world.world import keep_memory


def cnn():
    """55,338 parameters."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
                         nn.MaxPool2d(2),
                         nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                         nn.MaxPool2d(2),
                         nn.Flatten(), nn.Dropout(0.25),
                         nn.Linear(784, 67), nn.BatchNorm1d(67), nn.ReLU(), nn.Dropout(),
                         nn.Linear(67, 10)), (1, 28, 28)


def mlp():
    """16.8 million parameters, nearly all of them in two layers: little arithmetic for each byte exchanged.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 5888), nn.ReLU(),
                         nn.Linear(5888, 512),
                         nn.ReLU(), nn.Linear(512, 10)), (1, 28, 28)


def resnet():
    """11.2 million parameters, 20 BatchNorms."""
    from torchvision.models import resnet18
    return resnet18(num_classes=10), (3, 32, 32)


NETS = {"cnn": (cnn, 8, 4), "mlp": (mlp, 8, 1), "resnet": (resnet, 4, 1)}  # samples a slice, steps a turn


def bytes_sent(tree):
    """Per step and rank, on average over the ranks; a ring all-reduce sends 2 (W-1)/W of the gradient."""
    replicas = tree.world.replicas
    return sum(bucket.flat[0].nbytes / replicas * (replicas - 1) * (len(bucket.received) / replicas + 1)
               for bucket in tree.buckets)


def measure(world, name, slices, rounds):
    """[(wall, CPU) seconds a step in plain mode, the same in bitwise mode] of each round; (bytes sent, bytes
    of all values).
    """
    build, samples, steps = NETS[name]
    size, modes = samples * slices, {}
    x = torch.randn(size, *build()[1], generator=torch.Generator().manual_seed(0))
    y = torch.arange(size) % 10
    for mode, extra in (("plain", {"micro_batch_size": samples}), ("bitwise", {"virtual_ranks": slices})):
        opts = Options(global_batch_size=size, optimizer="sgd", lr=1e-3, device="cpu", **extra)
        batch = share_of(x, y, opts, world.rank, world.size)
        torch.manual_seed(0)
        net = build()[0]
        state = TrainState(net, build_optimizer(net, opts), opts, 10**6)
        modes[mode] = distribute(net, opts, world), state, batch
    pin(modes["bitwise"][1].opts)  # for both: it costs both the same
    keep_memory()
    times = []
    for round in range(rounds + 2):
        turn = {}
        for mode in sorted(modes, reverse=bool(round % 2)):  # neither is always the first
            model, state, batch = modes[mode]
            world.all_sum(torch.zeros(1))  # together
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                backward(model, batch, state, world)
                state.update(size)
            turn[mode] = (time.perf_counter() - began) / steps, (time.process_time() - cpu) / steps
        times.append((turn["plain"], turn["bitwise"]))
    net = modes["bitwise"][1].net
    sent = bytes_sent(modes["bitwise"][0].tree)
    return times[2:], (sent, sum(t.numel() for t in [*net.parameters(), *net.buffers()]) * 4)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--slices", default="2,4,8")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    print(f"{args.world} ranks, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
          f"cores")
    print("net      V  plain ms  bitwise ms   ratio (quartiles)      CPU     bytes sent / ring all-reduce")
    for name in args.nets.split(","):
        for slices in map(int, args.slices.split(",")):
            found = fork_ranks(args.world, measure, name, slices, args.rounds, deadline=1800)
            times, (sent, exchanged) = found[0]
            low, middle, high = statistics.quantiles((b[0] / p[0] for p, b in times), n=4)
            plain, bitwise = (statistics.median(t[0] for t in mode) * 1000
                              for mode in zip(*times, strict=True))
            cpu = statistics.median(sum(rank[0][k][1][1] for rank in found) / sum(rank[0][k][0][1]
                                                                                  for rank in found)
                                    for k in range(args.rounds))
            ring = 2 * (args.world - 1) / args.world * exchanged
            print(f"{name:7} {slices:2}  {plain:8.2f}  {bitwise:10.2f}   {middle:.3f} ({low:.3f}-{high:.3f}) "
                  f"  {cpu:.3f}   "
                  f"{sent / ring:.4f}", flush=True)
            assert args.world & args.world - 1 or slices & slices - 1 or sent < 1.005 * ring, (
                "what is padded is little")


if __name__ == "__main__":
    main()
