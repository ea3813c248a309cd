"""Exact metrics: each sample counts once, and no bit of the result depends on the number of ranks.

From a test set to metrics: replicas share blocks of a fixed size; each block has one row of sums and counts;
all ranks add the rows in one order, and divide once.
"""

from collections.abc import Callable
from typing import Any

import torch

from common.data import Batch, loaded
from common.options import extra
from common.sampler import seed
from common.training.state import TrainState
from common.training.step import placed
from common.training.tasks import OWN, Task
from common.world import World, gather

BLOCK = 256  # samples per forward: the same blocks at every world size
SHOWN_SAMPLES = 16  # of a test set that is no larger, the answers are shown, too
BLOCK_TOKENS = 4096  # tokens per forward, if these are fewer samples
BLOCK_LOGITS = 1 << 24  # outputs per forward, if these are fewer samples: 64 MiB


@torch.no_grad()
def evaluate(model: Callable, split: Any, state: TrainState, world: World, task: Task) -> dict[str, Any]:
    """Return {"val_loss": ..., "val_acc": ...}, of few samples also {"predictions", "labels"}.

    Call it on every rank.
    """
    ids = range(len(split))
    size = block_size(split, state.opts)
    blocks = range(-(-len(split) // size))
    mine = blocks[world.rank :: world.size]
    cuts = ([[*ids[number * size : (number + 1) * size]]] for number in mine)
    is_small = len(split) <= SHOWN_SAMPLES and len(blocks) == 1
    answers = {}  # of a small set
    rows = {}  # {number of a block: its sums and counts}
    totals = torch.zeros(())  # of this rank's blocks, with whole numbers
    with state.evaluating():
        for number, [(block, samples)] in zip(mine, loaded(split, cuts, state.opts), strict=True):
            state.heartbeat += 1
            seed(state.opts.seed, "evaluation", number)  # a net that draws does so alike at every world
            if samples is None:  # they are bad
                continue
            part = (block, placed(samples, state.device, state.opts))
            counted = task.counted(task(model, Batch([part], len(block))))
            rows[number] = counted[: 2 * len(task.names)].clone()
            totals = counted + totals
            if is_small and state.opts.task == "classify" and task is state.task:
                answers = extra("answers")(model, part, state.opts)
    if is_small:
        answers = gather(world, answers)[0]  # rank 0 has the first block
    task.agree(world)
    # whole numbers have the same sum in any order, others are added in that of the blocks
    totals = world.all_sum(task.zeros() + totals.cpu())
    table = torch.zeros(len(blocks), 2 * len(task.names), dtype=torch.float64)
    for number, row in rows.items():
        table[number] = row
    sums = world.all_sum(table).cumsum(0)[-1]
    totals[: len(sums)] = sums
    return task.evaluation(totals) | answers


def block_size(split, opts):
    """Return the samples per forward: with code of one's own, or --micro-batch-size, at most a training's."""
    sizes = [BLOCK, BLOCK_TOKENS // split.tokens, BLOCK_LOGITS // (split.tokens * (split.classes or 1))]
    if opts.micro_batch_size or ".py" in opts.task or opts.task == OWN:
        sizes.append(opts.micro_batch_size or -(-opts.global_batch_size // (opts.virtual_ranks or 1)))
    return max(1, min(sizes))
