"""Two stages on two cores, with micro batches in flight, against the same stages one after the other.

    python tests/bench/pipeline.py [--rounds 9] [--micros 4,8,16]

The ways take turns; of each the best round counts, as other users of the machine only ever slow it down.
Beside each stands the ideal: s stages and m micro batches can be m s / (m + s - 1) times as fast as one after
the other, if the cut is even, moving tensors costs nothing, and s processes at once are as fast as one alone.
"""

import time
from dataclasses import replace
from types import SimpleNamespace

from turns import arguments, take_turns  # isort: skip  (first: it finds the others)

import torch
from ranks import fork_ranks
from samples import Samples, share_of, state_of

from common.models import build_model
from common.options import Options
from common.pipeline import backward, split
from common.training import find_task

LENGTH = 128


def measure(world, args):
    """{micro batches: the best seconds of a step}; 1: one stage after the other."""
    world = world.in_stages(args.stages)
    tokens = torch.randint(0, 256, (args.batch, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    samples = Samples(tokens[:, :-1], tokens[:, 1:])
    data = SimpleNamespace(name="drawn", train=samples, classes=256, vocab=256, sample_shape=(LENGTH,))
    opts = Options(script="mp", model=args.model, global_batch_size=args.batch)

    def way(micros):
        given = replace(opts, micro_batch_size=args.batch // micros)
        model = split(build_model(given, data), given, world, data, find_task(given))
        state = state_of(model.net, given, 1 << 20, stages=model)
        batch = share_of(samples.x, samples.y, given)

        def step():
            world.all_sum(torch.zeros(1))
            began = time.perf_counter()
            backward(model, batch, state, world)
            state.update(batch.size)
            world.all_sum(torch.zeros(1))
            return time.perf_counter() - began

        return step

    ways = {micros: way(micros) for micros in map(int, f"1,{args.micros}".split(","))}
    costs = take_turns(ways, args.rounds)
    return {micros: min(seconds) for micros, seconds in costs.items()}


def main():
    args = arguments(__doc__, rounds=9, micros="4,8,16", model="gpt:8x4x192", batch=32, stages=2)
    best, *_ = fork_ranks(args.stages, measure, args, deadline=1800)
    for micros, seconds in best.items():
        ideal = micros * args.stages / (micros + args.stages - 1)
        print(
            f"{micros:3} micro batches  {seconds * 1e3:8.1f} ms  {best[1] / seconds:5.2f} x, "
            f"ideal {ideal:.2f} x"
        )


if __name__ == "__main__":
    main()
