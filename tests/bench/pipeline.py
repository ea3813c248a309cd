"""Two stages on two cores, with micro batches in flight, against the same two stages one after the other and one process.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tests/bench/pipeline.py [--rounds 9] [--micros 4,8,16]

The ways take turns, several steps each; of each the best round counts, as other users of the machine only ever slow it down.
Beside each stands what is left of the ideal: s stages and m micro batches can be m s / (m + s - 1) times as fast as one after
the other (the rest is the bubble), if the cut is even and moving tensors costs nothing.
"""
import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from common.data import Batch
from common.models import build_model
from common.options import Options
from common.pipeline import backward, split
from common.reduce import backward as plain
from common.state import TrainState, build_optimizer
from common.world import World


def way(name, world, data, opts):
    """(name, one step of it), a net of its own each."""
    net = build_model(opts, data)
    model, run = (net, plain) if world.size == 1 else (split(net, opts, world, data), backward)
    net = model.net if world.size > 1 else net
    state = TrainState(net, build_optimizer(net, opts), opts, 1 << 20)
    x, y = data.train.fetch(range(opts.global_batch_size))
    batch = Batch(x, y, [], len(x))

    def step():
        run(model, batch, state, world)
        state.update(len(x))
    return name, step


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--steps", type=int, default=2)
    flags.add_argument("--micros", default="4,8,16")
    flags.add_argument("--model", default="gpt:6x4x192")
    flags.add_argument("--batch", type=int, default=32)
    flags.add_argument("--length", type=int, default=64)
    given = flags.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    alone = World(0, 1, 0, 1, 0, (torch.device("cpu"),), "bench", 0)
    world = replace(alone, rank=rank, size=size, local_rank=rank, local_size=size).in_stages(size)
    tokens = torch.randint(0, 256, (given.batch, given.length + 1), generator=torch.Generator().manual_seed(0))
    split_of = type("Split", (), {"fetch": lambda self, ids: (tokens[list(ids), :-1], tokens[list(ids), 1:]),
                                  "__len__": lambda self: len(tokens)})()
    data = SimpleNamespace(name="drawn", train=split_of, classes=256, vocab=256, sample_shape=(given.length,))
    opts = Options(script="mp", model=given.model, global_batch_size=given.batch, balance="time")
    ways = [way("one process", alone, data, opts)] if rank == 0 else [("one process", lambda: None)]
    ways.append(way("one after the other", world, data, opts))
    flights = [int(text) for text in given.micros.split(",")]
    for schedule in ("gpipe", "1f1b"):
        ways += [way(f"{schedule} {m}", world, data, replace(opts, schedule=schedule, micro_batch_size=given.batch // m))
                 for m in flights]
    best = {}
    for number in range(given.rounds + 1):
        for name, step in ways:
            dist.barrier()
            began = time.perf_counter()
            for _ in range(given.steps):
                step()
            dist.barrier()
            if number:                                              # the first round warms up
                best[name] = min(best.get(name, 1e9), (time.perf_counter() - began) / given.steps)
    if rank == 0:
        base = best["one after the other"]
        print(f"{given.model}, {given.batch} samples of {given.length} tokens a step, {size} stages; best of {given.rounds} rounds")
        for name, seconds in best.items():
            m = int(name.split()[-1]) if name.split()[-1].isdigit() else 0
            ideal = max(1, size * m) / (m + size - 1)
            beside = f"   ideal {ideal:.2f} x, reached {base / seconds / ideal:.2f} (bubble {(size - 1) / (m + size - 1):.0%})"
            print(f"{name:20} {seconds * 1e3:8.1f} ms  {base / seconds:5.2f} x{beside if m else ''}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
