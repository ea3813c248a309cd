"""Two stages on two cores, with micro batches in flight, against the same stages one after the other.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 tests/bench/pipeline.py [--rounds 9] [--micros 4,8,16]

The ways take turns; of each the best round counts, as other users of the machine only ever slow it down.
Beside each stands the ideal: s stages and m micro batches can be m s / (m + s - 1) times as fast as one after
the other, if the cut is even, moving tensors costs nothing, and s processes at once are as fast as one alone.
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
from samples import Samples, share_of

from common.models import build_model
from common.options import Options
from common.pipeline import backward, split
from common.training import TrainState, build_optimizer, find_task
from common.world import World


def way(world, data, opts):
    """A function that makes one step of a net of its own, in stages."""
    model = split(build_model(opts, data), opts, world, data, find_task(opts))
    state = TrainState(model.net, build_optimizer(model.net, opts), opts, 1 << 20, stages=model)
    batch = share_of(data.train.x, data.train.y, opts)

    def step():
        backward(model, batch, state, world)
        state.update(batch.size)

    return step


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--rounds", type=int, default=9)
    flags.add_argument("--micros", default="4,8,16")
    flags.add_argument("--model", default="gpt:8x4x192")
    flags.add_argument("--batch", type=int, default=32)
    flags.add_argument("--length", type=int, default=128)
    args = flags.parse_args()
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    world = World(rank, size, rank, size, 0, (torch.device("cpu"),), "bench", 0).in_stages(size)
    tokens = torch.randint(0, 256, (args.batch, args.length + 1), generator=torch.Generator().manual_seed(0))
    samples = Samples(tokens[:, :-1], tokens[:, 1:])
    data = SimpleNamespace(name="drawn", train=samples, classes=256, vocab=256, sample_shape=(args.length,))
    opts = Options(script="mp", model=args.model, global_batch_size=args.batch)
    ways = {1: way(world, data, opts)}  # one micro batch: one stage after the other
    for micros in map(int, args.micros.split(",")):
        ways[micros] = way(world, data, replace(opts, micro_batch_size=args.batch // micros))
    best = dict.fromkeys(ways, float("inf"))
    for number in range(args.rounds + 1):
        for micros, step in ways.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if number:  # the first round warms up
                best[micros] = min(best[micros], time.perf_counter() - began)
    if rank == 0:
        print(f"{args.model}, {args.batch} samples of {args.length} tokens a step, {size} stages")
        for micros, seconds in best.items():
            ideal = micros * size / (micros + size - 1)
            print(f"{micros:3} micro batches  {seconds * 1e3:8.1f} ms  {best[1] / seconds:5.2f} x, "
                  f"ideal {ideal:.2f} x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
