"""How a life begins: what a person reads first, and the end of a job that makes no progress."""

import contextlib
import time
from itertools import chain

import torch

from common.data import Data
from common.errors import UserError
from common.ledger import Clock, Ledger, Life, Log, deaths_of, lives_of, named
from common.options import Options
from common.place import here, note_that_it_waits, this_process
from common.rescue.watch import State
from common.sampler import ElasticSampler
from common.world import World

LIVES_IN_VAIN = 3  # in a row: they could not train, or began on one step and ended with an error
LIVES_KILLED = 10  # in a row on one step: all made steps, and were killed before they saved
SAMPLES_NAMED = 512  # in an error
OPENED = "opened"  # in the agent's folder: the newest of its lives that could train
ENDED_WELL = {"stop", "refused", "done"}  # events
FAILED = {"error", "hang"}  # events


def open_life(
    log: Log,
    ledger: Ledger,
    clock: Clock,
    opts: Options,
    world: World,
    data: Data,
    state: State,
    source: str | None,
    parameters: int,
    processes: list[list],
) -> None:
    """Prints what this life is, and enters it in the ledger; call on every rank.

    A life with as many processes as the one before it in the same job says one line.
    """
    data.train.note = data.test.note = ledger.event
    lives = []
    with world.all_or_none():
        if world.rank == 0:
            with contextlib.suppress(UserError):  # this life is the first
                lives = lives_of(opts.run_dir)
            refuse_without_progress(lives, opts, data, state)
    if world.rank == 0:
        job = this_process()["job"]
        lines = header_of(opts, world, data, state, parameters)
        line = resumption(opts, state, source)
        deaths = []
        if lives:
            last = lives[-1]
            deaths = [f"rank {death['rank']} {death['cause']}" for death in deaths_of(last, over=True)]
            deaths += [
                f"step {event['step']} saved by rank {event['rank']}" for event in named(last, "rescue")
            ]
            if last[0].get("job") == job:
                moments = [event["stepped"] for event in named(last, "left")]
                seconds = max(0.0, time.time() - max(moments, default=last[-1]["t"]))
                line += f", after {seconds:.1f} s with {world.size} process{'es' * (world.size > 1)}"
                if last[0]["world"] == world.size:
                    lines = []
        log.start([*lines, line], deaths)
        saved = named(chain(*lives), "save", "rescue")
        if saved and not state.step:  # a disk is not mounted, say
            step = saved[-1]["step"]
            log.note(
                f"{opts.run_dir}: step {step} was saved, but no checkpoint is left; training begins again"
            )
        clock.ledger = ledger
        ledger.event(
            "life",
            life=world.life,
            world=world.size,
            restart=world.restart,
            job=job,
            pids=[pid for pid, _, _ in processes],
            hosts=[host for _, host, _ in processes],
            step=state.step,
            epoch=state.epoch,
            position=state.position,
            n=len(data.train),
            seed=opts.seed,
            global_batch_size=opts.global_batch_size,
            stages=world.stages,
            epochs=opts.epochs,
            began=clock.began,
        )
    place = here()
    if place.speaks and place.notes:
        (place.notes / OPENED).write_text(str(place.restart))
    note_that_it_waits(False)


def header_of(opts: Options, world: World, data: Data, state: State, parameters: int) -> list[str]:
    """What is trained, by whom, on what, in which batches."""
    parameters = parameters or sum(p.numel() for p in state.net.parameters())
    count = opts.virtual_ranks or world.replicas
    shares = "slices" if opts.virtual_ranks else "shares"
    return [
        f"run {opts.run_dir}   world {world.size}   life {world.life}",
        f"devices {', '.join(map(str, world.devices))}   {torch.get_num_threads()} CPU threads a process",
        f"model {opts.model}: {parameters:,} parameters   "
        f"data {opts.dataset}: {len(data.train):,} to train on, {len(data.test):,} to test on",
        f"global batch {opts.global_batch_size} = {count} {shares} of "
        f"{-(-opts.global_batch_size // count)} or less   "
        f"{state.steps_per_epoch:,} steps an epoch, {state.total_steps:,} in all",
    ]


def resumption(opts: Options, state: State, source: str | None) -> str:
    """Where this life begins."""
    if opts.eval_only:
        doing = "evaluating"
    elif state.finished:
        doing = "complete: nothing left to train"
    else:
        doing = "resuming" if state.step else "starting"
    epoch = min(state.epoch + 1, opts.epochs)
    line = f"{doing} at step {state.step}, epoch {epoch}, position {state.position:,}"
    return f"{line}, from {source}" if source else line


# ---- the end of a crash loop ----------------------------------------------------------------------
def refuse_a_crash_loop() -> None:
    """Exit code 5 if three lives in a row have ended before they could train; call it before anything fails.

    An agent would restart them for ever. It counts the restarts, and its folder says which of them have
    opened: each machine judges its own lives.
    """
    place = here()
    if place.notes is None:
        return
    opened = place.notes / OPENED
    failed = place.restart - 1 - (int(opened.read_text()) if opened.exists() else -1)
    if failed >= LIVES_IN_VAIN:
        raise UserError(
            f"{failed} lives in a row ended before they could train; their errors are above\n"
            "mend the cause, then start again",
            code=5,
        )


def refuse_without_progress(lives: list[Life], opts: Options, data: Data, state: State) -> None:
    """Exit code 5 if life after life begins on this step, and ends; the next start has as many again.

    A step that was saved and then withdrawn is no progress: the next life began on the same step.
    """
    in_vain = 0
    failed = []
    for life in reversed(lives):
        names = {event["event"] for event in life}
        if life[0]["step"] != state.step or names & ENDED_WELL:
            break
        failed.append(life)
        in_vain += bool(names & FAILED) or "first_step" not in names
    if state.finished or in_vain < LIVES_IN_VAIN and len(failed) < LIVES_KILLED:
        return
    errors = [event["why"] for event in named(chain(*reversed(failed)), "error")]
    first = [*errors, "killed, no error was noted"][0]
    order = ElasticSampler(data.train, opts.global_batch_size, seed=opts.seed)
    order.set_epoch(state.epoch, state.position)
    samples = ", ".join(map(str, next(iter(order))[:SAMPLES_NAMED]))
    raise UserError(
        f"no progress in {len(failed)} lives on step {state.step + 1}; the first error: {first}\n"
        f"its samples: {samples} (of epoch {state.epoch + 1})\n"
        "mend the cause (a bad sample? too little memory?), then start again",
        code=5,
    )
