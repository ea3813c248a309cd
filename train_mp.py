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

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from common.checkpoint import CheckpointStore
from common.data import batches, load_data
from common.errors import report_errors
from common.ledger import Audit, Clock, Ledger, Log
from common.models import build_model
from common.pipeline import backward, describe, split
from common.rescue import Rescue, open_life
from common.sampler import ElasticSampler
from common.training import TrainState, build_optimizer, evaluate, find_task
from common.world import join, leave


@record
@report_errors
def main(opts):
    clock = Clock("import")
    world = join(opts)  # reads RANK, LOCAL_RANK, WORLD_SIZE; without them a world of one
    clock.lap("join")
    data = load_data(opts, world)
    order = ElasticSampler(data.train, opts.global_batch_size, world.replica, world.replicas, opts.seed,
                           slices=opts.virtual_ranks)
    task = find_task(opts)  # what is minimised and shown
    model = split(build_model(opts, data), opts, world, data, task)
    net = model.net  # this rank's stages, so that the optimizer holds their weights alone
    clock.lap("load")
    # --clip-grad-norm and --amp fp16 look at all stages
    state = TrainState(net, build_optimizer(net, opts), opts, len(data.train),
                       model.norm, world.all_sum, order.name, task)
    ledger = Ledger(opts.run_dir)
    audit = Audit(opts.run_dir, world.life, world.rank, on=opts.audit and world.stage == 0)  # one a pipeline
    store = CheckpointStore(opts, world, data.fingerprint, ledger)
    source = store.restore(state)  # the newest checkpoint that verifies; none is fine
    clock.lap("restore")
    with Log(opts, world, state.step, state.total_steps, (state.record, state.evaluated)) as log, \
            Rescue(store, state, world, ledger, closing=[log.close, clock.close]) as rescue:
        open_life(log, ledger, clock, opts, world, data, state, source, sum(model.parameters_of))
        for line in describe(model, -(-opts.global_batch_size // world.replicas), state.optimizer):
            log.note(line)
        while not state.finished:  # a finished run falls through and exits 0
            if rescue.told("stop-epoch"):
                rescue.leave()
            order.set_epoch(state.epoch, state.position)  # a new shuffle; skips what is already trained on
            net.train()
            for batch in clock.timed(batches(data.train, order, opts)):
                audit.begin(state.step + 1, state.epoch, state.position, batch.ids)
                totals = backward(model, batch, state, world)  # one gradient of one global batch
                state.finish_gradient(batch.size)  # clip; from here on this rank can make the step alone
                totals = torch.tensor([*totals.tolist(), store.overdue()], dtype=torch.float64)
                rescue.all_sum(totals)  # no stage updates before all of them can
                state.update(batch.size)  # optimizer, averages, counters: or nothing
                audit.done(state.whole)
                clock.stepped(state.step)
                if state.step % opts.log_every == 0:
                    log.step(state, state.note(totals[:-1]) | world.memory())
                if opts.check_every and state.step % opts.check_every == 0:
                    store.agree(state)
                if rescue.told("save") or store.due(state, totals[-1]):
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
