"""Train a net cut into stages, because it does not fit on one device; micro batches keep all stages busy.

    torchrun --nproc_per_node=2 train_mp.py --micro-batch-size 8               # two processes, a stage each
    torchrun --nproc_per_node=4 train_mp.py --micro-batch-size 8 --stages 2    # two pipelines of two stages
    torchrun --nproc_per_node=6 train_mp.py --virtual-ranks 8 --stages 2       # bitwise as train_ddp.py
    python train_mp.py --devices cuda:0,cuda:1 --micro-batch-size 8            # one process, two devices
    torchrun --nproc_per_node=2 train_mp.py --micro-batch-size 4 --model gpt:small --dataset text --data-dir F

The three scripts write the same checkpoints: any of them can resume a run.
"""
from common.options import parse_options

if __name__ == "__main__":
    OPTIONS = parse_options(__doc__)  # before torch is imported: --help and a typo answer at once

from common.errors import guarded
from common.models import build_model
from common.pipeline import backward, describe, split
from common.run import Run
from common.training import build_optimizer, evaluate, find_task


def main(opts):
    run = Run(opts)  # who am I, with which data, in which order
    if run.was_complete():
        return
    world, task = run.world, find_task(opts)  # the loss, and what is shown
    model = split(build_model(opts, run.data), opts, world, run.data, task)
    net = model.net  # this rank's stages, so that the optimizer holds their weights alone
    state = run.restore(net, build_optimizer(net, opts), task=task,
                        stages=model)  # clipping and fp16 look at all stages
    with run.life(lambda: evaluate(model, run.data.test, state, world)):
        for line in describe(model):
            run.log.note(line)
        while not run.progress.finished:
            run.order.set_epoch(run.progress.epoch, run.progress.position)  # shuffled, from there on
            net.train()
            for batch in run.batches():
                totals = backward(model, batch, state, world)  # one gradient of one global batch
                state.finish_gradient(batch.size)  # clip; from here on this rank can make the step alone
                run.sum_up(totals)  # over all ranks, where the step is logged
                run.agree()  # all ranks: save? stop? may all update?
                state.update(batch.size)  # optimizer, averages, counters: or nothing
                run.stepped(totals)  # logs, saves, leaves when asked
            run.end_epoch()  # evaluates, saves if it is worth it


if __name__ == "__main__":
    with guarded(debug=OPTIONS.debug):  # mistakes are told in three lines
        main(OPTIONS)
