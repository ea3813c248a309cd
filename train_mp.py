"""Train a net cut into stages over several devices of each process, because it does not fit on one.

    python train_mp.py --devices cuda:0,cuda:1 --micro-batch-size 8            # one process, two devices
    torchrun --nproc_per_node=2 train_mp.py --micro-batch-size 8               # each has half of the GPUs
    python train_mp.py --devices cpu,cpu                                       # the same without a GPU

The three scripts write the same checkpoints: any of them can resume a run.
"""
from common.options import parse_options

if __name__ == "__main__":
    OPTIONS = parse_options(__doc__)  # before torch is imported: --help and a typo answer at once

import torch

from common.errors import guarded
from common.models import build_model
from common.run import Run
from common.stages import Stages
from common.training import backward, build_optimizer, distribute, evaluate, find_task, prepare


def main(opts):
    run = Run(opts)  # who am I, with which data, in which order
    if run.was_complete():
        return
    task = find_task(opts)  # the loss, and what is shown
    net = prepare(build_model(opts, run.data), opts, run.world, run.data, task, torch.device("cpu"))
    stages = Stages(net, opts, run.world.devices)
    state = run.restore(net, build_optimizer(net, opts), task=task)  # the newest checkpoint that verifies
    model = distribute(stages, opts, run.world)
    with run.life(lambda: evaluate(stages, run.data.test, state, run.world)):
        for line in stages.describe():
            run.log.note(line)
        while not run.progress.finished:
            run.order.set_epoch(run.progress.epoch, run.progress.position)  # shuffled, from there on
            net.train()
            for batch in run.batches():
                totals = backward(model, batch, state, run.world)  # one gradient of one global batch
                run.sum_up(totals)  # over all ranks, where the step is logged
                run.agree()  # all ranks: save? stop? may all update?
                state.update(batch.size)  # clip, optimizer, averages, counters: or nothing
                run.stepped(totals)  # logs, saves, leaves when asked
            run.end_epoch()  # evaluates, saves if it is worth it


if __name__ == "__main__":
    with guarded(debug=OPTIONS.debug):  # mistakes are told in three lines
        main(OPTIONS)
