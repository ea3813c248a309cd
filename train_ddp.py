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

from torch.distributed.elastic.multiprocessing.errors import record

from common.checkpoint import CheckpointStore
from common.data import batches, load_data
from common.errors import report_errors
from common.ledger import Audit, Clock, Ledger, Log
from common.models import build_model
from common.rescue import Rescue, open_life
from common.sampler import ElasticSampler
from common.training import (
    CrossCheck,
    TrainState,
    backward,
    build_optimizer,
    distribute,
    evaluate,
    find_task,
    prepare,
)
from common.world import join, leave


@record
@report_errors
def main(opts):
    clock = Clock("import")
    world = join(opts)  # reads RANK, LOCAL_RANK, WORLD_SIZE; without them a world of one
    clock.lap("join")
    data = load_data(opts, world)
    order = ElasticSampler(data.train, opts.global_batch_size, world.rank, world.size, opts.seed,
                           slices=opts.virtual_ranks)
    task = find_task(opts)  # what is minimised and shown
    net = prepare(build_model(opts, data), opts, world, data, task)
    clock.lap("load")
    state = TrainState(net, build_optimizer(net, opts), opts, len(data.train), order=order.name, task=task)
    ledger, audit = Ledger(opts.run_dir), Audit(opts.run_dir, world.life, world.rank, on=opts.audit)
    store = CheckpointStore(opts, world, data.fingerprint, ledger)
    source = store.restore(state)  # the newest checkpoint that verifies, on any node; none is fine
    clock.lap("restore")
    model = distribute(net, opts, world)
    check = CrossCheck(model, data.train, order, state, world)  # with --cross-check: one slice on two ranks
    with Log(opts, world, state.step, state.total_steps, (state.record, state.evaluated)) as log, \
            Rescue(store, state, world, ledger, closing=[log.close, clock.close]) as rescue:
        open_life(log, ledger, clock, opts, world, data, state, source)
        while not state.finished:  # a finished run falls through and exits 0
            if rescue.told("stop-epoch"):
                rescue.leave()
            order.set_epoch(state.epoch, state.position)  # a new shuffle; skips what is already trained on
            net.train()
            for batch in clock.timed(batches(data.train, order, opts)):
                audit.begin(state.step + 1, state.epoch, state.position, batch.ids)
                totals = backward(model, batch, state, world)  # one gradient of one global batch
                if check.due:
                    store.trust(state, check.odd_rank())
                if (state.step + 1) % opts.log_every == 0:
                    rescue.all_sum(totals)  # before the update: a rank that makes the step knows its loss
                state.update(batch.size)  # clip, optimizer, averages, counters: or nothing
                audit.done(state.whole)
                clock.stepped(state.step)
                if state.step % opts.log_every == 0:
                    log.step(state, state.note(totals))
                if opts.check_every and state.step % opts.check_every == 0:
                    store.agree(state)
                if rescue.told("save") or store.due(state):
                    store.save(state)  # copies; a thread writes
                store.check()
                if rescue.told("evaluate"):  # touch RUN/control/evaluate
                    log.evaluation(state, evaluate(net, data.test, state, world))
                    net.train()
                if rescue.asked:
                    rescue.leave()
                if state.finished:  # --max-steps
                    break
            if state.evaluation_due:
                log.evaluation(state, state.record_evaluation(evaluate(net, data.test, state, world)))
            state.end_epoch()
            store.save(state)
        if state.evaluation_missing:  # --eval-only, or the run was stopped between its last step and this
            log.evaluation(state, state.record_evaluation(evaluate(net, data.test, state, world)))
            store.save(state)
        store.close()
        clock.close()
    leave(world)


if __name__ == "__main__":
    main(OPTIONS)
