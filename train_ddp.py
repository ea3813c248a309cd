"""Train with one process per device (DistributedDataParallel); kill it, start more or fewer processes.

    python train_ddp.py                                             # a world of one
    torchrun --nproc_per_node=2 train_ddp.py                        # two processes on this machine
    torchrun --nproc_per_node=2 --max_restarts=100 train_ddp.py     # and a crash restarts them
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 --nproc_per_node=8 --max_restarts=1000000 \\
        --rdzv_backend=c10d --rdzv_id=JOB --rdzv_endpoint=HOST:29400 train_ddp.py --run-dir /shared/run

Start the last one on each of one to four machines; without its variable, a machine that joins later would
end the job for all.

The same command resumes a run that was stopped, and does nothing once the run is complete.
"""
from common.options import parse_options

if __name__ == "__main__":
    OPTIONS = parse_options(__doc__)  # before torch is imported: --help and a typo answer at once

from common.errors import guarded
from common.models import build_model
from common.run import Run
from common.training import backward, build_optimizer, cross_check, distribute, evaluate, find_task, prepare


def main(opts):
    run = Run(opts)  # who am I, with which data, in which order
    task = find_task(opts)  # the loss, and what is shown
    net = prepare(build_model(opts, run.data), opts, run.world, run.data, task)
    state = run.restore(net, build_optimizer(net, opts), task=task)  # the newest checkpoint that verifies
    model = distribute(net, opts, run.world)
    with run.life(lambda: evaluate(net, run.data.test, state, run.world)):
        while not state.finished:
            run.order.set_epoch(state.epoch, state.position)  # a new shuffle; skips what is trained on
            net.train()
            for batch in run.batches():
                totals = backward(model, batch, state, run.world)  # one gradient of one global batch
                odd = cross_check(model, run.data.train, state, run.world)  # all ranks vote on a slice's bits
                if odd is not None:
                    run.store.count_votes(odd)
                run.sum_up(totals)  # over all ranks, where the step is logged
                state.update(batch.size)  # clip, optimizer, averages, counters: or nothing
                run.stepped(totals)  # logs, saves, leaves when asked
            run.end_epoch()  # evaluates, saves if it is worth it


if __name__ == "__main__":
    with guarded(debug=OPTIONS.debug):  # mistakes are told in three lines
        main(OPTIONS)
