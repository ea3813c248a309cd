"""Train in one process over many devices (nn.DataParallel): scatter, replicate, gather.

    python train_dp.py                                              # all GPUs, or the CPU
    CUDA_VISIBLE_DEVICES=0,2 python train_dp.py                     # these two GPUs
    python train_dp.py --devices cpu,cpu --show-scatter             # the same without a GPU
    python train_dp.py --model lstm --dataset sentiment --epochs 10

train_ddp.py is faster, even on one machine; both write the same checkpoints.
"""
from common.options import parse_options

if __name__ == "__main__":
    OPTIONS = parse_options(__doc__)  # before torch is imported: --help and a typo answer at once

from common.errors import guarded
from common.models import build_model
from common.run import Run
from common.training import backward, build_optimizer, distribute, evaluate, find_task, prepare


def main(opts):
    run = Run(opts)  # who am I, with which data, in which order
    if run.was_complete():
        return
    task = find_task(opts)  # the loss, and what is shown
    net = prepare(build_model(opts, run.data), opts, run.world, run.data, task)
    state = run.restore(net, build_optimizer(net, opts), task=task)  # the newest checkpoint that verifies
    model = distribute(net, opts, run.world)
    if opts.show_scatter:
        net.register_forward_hook(print_sizes("In Model: "))  # of each replica
        model.register_forward_hook(print_sizes("Outside:  "))  # of the whole batch
    with run.life(lambda: evaluate(model, run.data.test, state, run.world)):  # on all devices, too
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


def print_sizes(where):
    """A hook that prints sizes of inputs and outputs, as PyTorch's tutorial does."""
    return lambda _, inputs, output: print(
        where, f"input size {tuple(inputs[0].shape)} output size {tuple(output.shape)}")


if __name__ == "__main__":
    with guarded(debug=OPTIONS.debug):  # mistakes are told in three lines
        main(OPTIONS)
