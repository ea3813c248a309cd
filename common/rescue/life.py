"""How a life begins: what a person reads first, and the refusal of a run that makes no progress."""
import os

import torch

from common.errors import UserError
from common.ledger import lives_of
from common.options import job_id, life_is_open
from common.sampler import permute
from common.world import devices_line

LIVES = 3         # without progress on one step
MANY = 512        # sample ids that an error still names one by one


def open_life(log, ledger, clock, opts, world, data, state, source, parameters=0):
    """Say what this life is, in at most six lines, and enter it in the ledger; call on every rank."""
    with world.all_or_none("opening"):
        if world.rank == 0:
            refuse_the_same_end(ledger, opts, data, state)
    pids = [int(p) for p in world.all_gather(torch.tensor([os.getpid()]))]
    parameters = parameters or sum(p.numel() for p in state.net.parameters())
    share = -(-opts.global_batch_size // world.replicas)
    micro = min(opts.micro_batch_size or share, share)
    what = "evaluating" if opts.eval_only else "complete: nothing left to train" if state.finished else \
        "going on" if state.step else "starting"
    parts = f"{world.replicas} x {share} or less, {micro} a forward"
    if opts.virtual_ranks:
        parts = (f"{opts.virtual_ranks} slices of {-(-opts.global_batch_size // opts.virtual_ranks)} or less, "
                 f"{-(-opts.virtual_ranks // world.replicas)} or less a {'pipeline' if world.stages > 1 else 'rank'}")
    log.start([
        f"run {opts.run_dir}   world {world.size} ({world.backend})   life {world.life}",
        devices_line(world),
        f"model {opts.model}: {parameters:,} parameters   data {opts.dataset}: {len(data.train):,} to train on, "
        f"{len(data.test):,} to test on",
        f"global batch {opts.global_batch_size} = {parts}   "
        f"{state.steps_per_epoch:,} steps an epoch, {state.total_steps:,} in all",
        f"{what} at step {state.step}, "
        f"epoch {min(state.epoch + 1, opts.epochs)}, position {state.position:,}" + (f", from {source}" if source else ""),
    ])
    if world.rank == 0:
        clock.open(ledger, f"{opts.run_dir}/profile/{world.life}.json" if opts.profile else None)
        ledger.event("life", life=world.life, world=world.size, restart=world.restart, step=state.step, epoch=state.epoch,
                     position=state.position, pids=pids, job=job_id(), began=clock.began, n=len(data.train), seed=opts.seed,
                     data=data.fingerprint[:12], global_batch_size=opts.global_batch_size, stages=world.stages, **clock.laps)
    life_is_open()


def refuse_the_same_end(ledger, opts, data, state):
    """Three lives in a row that began here and came to nothing: a fourth would too. Being told to stop is no
    failure.

    It is refused once: whoever starts the run again after that has mended something, or gets three lives to
    see that not.
    """
    try:
        lives = lives_of(opts.run_dir)
    except UserError:
        return  # a first life
    failed = []
    for events in reversed(lives):
        names = {event["event"] for event in events}
        further = any(event["step"] > state.step for event in events if type(event.get("step")) is int)
        mended = events[0].get("data", data.fingerprint[:12]) != data.fingerprint[:12]
        if mended or events[0]["step"] != state.step or further or state.finished or names & {"stop", "refused"}:
            break
        failed.append(events)
    if len(failed) < LIVES:
        return
    ledger.event("refused", step=state.step)
    first = next((e["why"] for events in reversed(failed) for e in events if e["event"] == "error"), "killed, no error was noted")
    batch = range(state.position, min(state.position + opts.global_batch_size, len(data.train)))
    ids = permute(batch, len(data.train), opts.seed, state.epoch).tolist()
    samples = ", ".join(map(str, ids[:MANY])) + (", ..." if len(ids) > MANY else "")
    raise UserError(f"no progress in {len(failed)} lives on step {state.step + 1}; the first error: {first}\n"
                    f"its samples: {samples} (of epoch {state.epoch + 1})\n"
                    "mend the cause (a bad sample? too little memory?), then start again", code=5)
