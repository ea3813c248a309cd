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

from common.checkpoint import CheckpointStore
from common.data import batches, load_data
from common.errors import report_errors
from common.ledger import Audit, Clock, Ledger, Log
from common.models import build_model
from common.rescue import Rescue, open_life
from common.sampler import ElasticSampler
from common.training import TrainState, backward, build_optimizer, distribute, evaluate, find_task, prepare
from common.world import join, leave


@report_errors
def main(opts):
    clock = Clock("import")
    world = join(opts)  # reads RANK, LOCAL_RANK, WORLD_SIZE; without them a world of one
    clock.lap("join")
    data = load_data(opts, world)
    order = ElasticSampler(data.train, opts.global_batch_size, world.rank, world.size, opts.seed)
    task = find_task(opts)  # what is minimised and shown
    net = prepare(build_model(opts, data), opts, world, data, task)
    clock.lap("load")
    state = TrainState(net, build_optimizer(net, opts), opts, len(data.train), order=order.name, task=task)
    ledger, audit = Ledger(opts.run_dir), Audit(opts.run_dir, world.life, world.rank, on=opts.audit)
    store = CheckpointStore(opts, world, data.fingerprint, ledger)
    source = store.restore(state)  # the newest checkpoint that verifies, on any node; none is fine
    clock.lap("restore")
    model = distribute(net, opts, world)
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
                if (state.step + 1) % opts.log_every == 0:
                    rescue.all_sum(totals)  # of one process: itself, and what RUN/control/ asks for
                state.update(batch.size)  # clip, optimizer, averages, counters: or nothing
                audit.done(state.whole)
                clock.stepped(state.step)
                if state.step % opts.log_every == 0:
                    log.step(state, state.note(totals) | world.memory())
                if rescue.told("save") or store.due(state):
                    store.save(state)  # copies; a thread writes
                store.check()
                if rescue.told("evaluate"):  # touch RUN/control/evaluate
                    log.evaluation(state, evaluate(model, data.test, state, world))
                    net.train()
                if rescue.asked:
                    rescue.leave()
                if state.finished:  # --max-steps
                    break
            if state.evaluation_due:
                log.evaluation(state, state.record_evaluation(evaluate(model, data.test, state, world)))
            state.end_epoch()
            store.save(state)
        if state.evaluation_missing:  # --eval-only, or the run was stopped between its last step and this
            log.evaluation(state, state.record_evaluation(evaluate(model, data.test, state, world)))
            store.save(state)
        store.close()
        clock.close()
    leave(world)


if __name__ == "__main__":
    main(OPTIONS)
