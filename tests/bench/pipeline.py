"""Two stages on two cores, with micro batches in flight, against the same two stages one after the other and
one process.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tests/bench/pipeline.py [--rounds 9] [--micros 4,8,16]

The ways take turns, several steps each; of each the best round counts, as other users of the machine only
ever slow it down. Beside each stands what is left of the ideal: s stages and m micro batches can be m s / (m
+ s - 1) times as fast as one after the other (the rest is the bubble; interleaved, with l stages a process,
it is l m s / (l m + s - 1)), if the cut is even, moving tensors costs nothing, and s processes at once are as
fast as one alone. What these cost is measured too: each stage's own work with nobody to wait for, while the
other process rests, and while it does the same.
"""
import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

import torch
import torch.distributed as dist
from samples import share_of

from common.models import build_model
from common.options import Options
from common.pipeline import backward, split
from common.pipeline.schedule import LOOPS
from common.pipeline.stages import gradient_of
from common.training import TrainState, build_optimizer, find_task
from common.training import backward as plain
from common.world import World


def way(world, data, opts):
    """(model, a function that makes one step of it), a net of its own each."""
    net = build_model(opts, data)
    model, run = (net, plain) if world.size == 1 else (
        split(net, opts, world, data, find_task(opts)), backward)
    net = model.net if world.size > 1 else net
    state = TrainState(net, build_optimizer(net, opts), opts, 1 << 20)
    x, y = data.train.fetch(range(opts.global_batch_size))
    batch = share_of(x, y, opts)

    def step():
        run(model, batch, state, world)
        state.update(len(x))
    return model, step


def work(model, data, size, flights):
    """Forward and backward of this rank's stages for so many micro batches, without the other ranks."""
    for _ in range(flights):
        for stage in model.stages:
            x = data.train.fetch(range(size))[0]
            if stage.index:
                shape, dtype = model.transfer.edges[stage.index - 1]
                x = torch.zeros(size, *shape, dtype=dtype, requires_grad=True)
            gradient_of(x, y := stage(x), (torch.ones_like(y),))


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--steps", type=int, default=1)
    flags.add_argument("--micros", default="4,8,16")
    flags.add_argument("--schedules", default="gpipe,1f1b,interleaved")
    flags.add_argument("--model", default="gpt:8x4x192")
    flags.add_argument("--batch", type=int, default=32)
    flags.add_argument("--length", type=int, default=128)
    given = flags.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    alone = World(0, 1, 0, 1, 0, (torch.device("cpu"),), "bench", 0)
    world = replace(alone, rank=rank, size=size, local_rank=rank, local_size=size).in_stages(size)
    tokens = torch.randint(0, 256, (given.batch, given.length + 1),
                           generator=torch.Generator().manual_seed(0))
    split_of = type("Split", (), {"fetch": lambda self, ids: (tokens[list(ids), :-1], tokens[list(ids), 1:]),
                                  "__len__": lambda self: len(tokens)})()
    data = SimpleNamespace(name="drawn", train=split_of, classes=256, vocab=256, sample_shape=(given.length,))
    opts = Options(script="mp", model=given.model, global_batch_size=given.batch, balance="time")
    flights = [int(text) for text in given.micros.split(",")]
    naive, step = way(world, data, opts)
    ways = {("one process", 0): way(alone, data, opts)[1] if rank == 0 else None,
            ("one after the other", 0): step}
    for m in flights:
        for turn in range(size):
            ways[f"stage {turn} alone",
                 m] = (lambda m=m: work(naive, data, given.batch // m, m)) if turn == rank else None
        ways["all stages at once", m] = lambda m=m: work(naive, data, given.batch // m, m)
        for kind in given.schedules.split(","):
            ways[kind, m] = way(world, data,
                                replace(opts, schedule=kind, micro_batch_size=given.batch // m))[1]
    best = {}
    for number in range(given.rounds + 1):
        for key, step in ways.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(given.steps if step else 0):
                step()
            dist.barrier()
            if number:  # the first round warms up
                best[key] = min(best.get(key, 1e9), (time.perf_counter() - began) / given.steps)
    if rank == 0:
        report(given, best, size, flights, [[piece.name for piece in group] for group in naive.groups])
    dist.barrier()
    dist.destroy_process_group()


def report(given, best, size, flights, groups):
    print(f"{given.model}, {given.batch} samples of {given.length} tokens a step, {size} stages; best of "
          f"{given.rounds} rounds")
    print("   ".join(f"stage {i}: {group[0]} ... {group[-1]}" for i, group in enumerate(groups)))
    base = best["one after the other", 0]
    for name in ("one process", "one after the other"):
        print(f"{name:20} {best[name, 0] * 1e3:8.1f} ms  {base / best[name, 0]:5.2f} x")
    for m in flights:
        own, together = [best[f"stage {i} alone", m] for i in range(size)], best["all stages at once", m]
        print(f"{m} micro batches of {given.batch // m}; own work of each stage "
              f"{', '.join(f'{s * 1e3:.0f}' for s in own)} ms, "
              f"all at once {together * 1e3:.0f} ms: {together / max(own):.2f} x")
        for kind in given.schedules.split(","):
            loops, seconds = LOOPS if kind == "interleaved" else 1, best[kind, m]
            bubble = (size - 1) / (loops * m + size - 1)
            ideal, left = size * (1 - bubble), together / (1 - bubble)
            print(f"  {kind:18} {seconds * 1e3:8.1f} ms  {base / seconds:5.2f} x   bubble {bubble:3.0%}, "
                  f"ideal {ideal:.2f} x: "
                  f"reached {base / seconds / ideal:.2f}; of what all at once allows {left / seconds:.2f}")


if __name__ == "__main__":
    main()
