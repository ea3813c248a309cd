"""How a life begins: what a person reads first, and the refusal of a run that makes no progress."""
import functools
import itertools
import os
import socket
import sys
import time
from typing import Any

from common.errors import UserError, say
from common.ledger import Clock, Ledger, Log, history, lives_of
from common.options import Options, life_is_open, this_process
from common.sampler import ElasticSampler
from common.world import World, gather_texts

LIVES_WITHOUT_PROGRESS = 3  # on one step
SAMPLES_NAMED = 512         # in an error
LONGEST_PAUSE_SECONDS = 60  # before a life that begins where the three before it began
ENDED_WELL = {"stop", "refused", "done"}  # events


def open_life(log: Log, ledger: Ledger, clock: Clock, opts: Options, world: World, data: Any, state: Any,
              source: Any, parameters: int = 0) -> None:
    """Prints what this life is, in at most six lines, and enters it in the ledger; call on every rank."""
    order = ElasticSampler(data.train, opts.global_batch_size, seed=opts.seed).order
    data.train.note = data.test.note = ledger.event
    with world.all_or_none("opening"):
        if world.rank == 0:
            refuse_without_progress(ledger, opts, data, state)
            _pause(opts, state)
    who = [text.split(" ") for text in gather_texts(world, f"{os.getpid()} {socket.gethostname()}")]
    pids, hosts = [int(pid) for pid, _ in who], [host for _, host in who]
    parameters = parameters or sum(p.numel() for p in state.net.parameters())
    doing = "evaluating" if opts.eval_only else "complete: nothing left to train" if state.finished else \
        "resuming" if state.step else "starting"
    count = opts.virtual_ranks or world.replicas
    parts, job = f"{count} {'slices' if opts.virtual_ranks else 'shares'}", this_process()["job"]
    past = history(opts.run_dir, job, state.step, clock.began) if world.rank == 0 else {}
    log.start([
        f"run {opts.run_dir}   world {world.size} ({world.backend})   life {world.life}",
        world.devices_line(),
        f"model {opts.model}: {parameters:,} parameters   "
        f"data {opts.dataset}: {len(data.train):,} to train on, {len(data.test):,} to test on",
        f"global batch {opts.global_batch_size} = {parts} of {-(-opts.global_batch_size // count)} or less   "
        f"{state.steps_per_epoch:,} steps an epoch, {state.total_steps:,} in all",
        f"{doing} at step {state.step}, epoch {min(state.epoch + 1, opts.epochs)}, "
        f"position {state.position:,}" + (f", from {source}" if source else ""),
    ], clock, world=world.size, lives=past.get("lives", 0) + 1, lost=past.get("lost", 0))
    if world.rank == 0:
        if state.step == 0 and past["saved"] and past["saved"][0] > 0:  # a disk is not mounted, say
            log.note(f"{opts.run_dir}: step {past['saved'][0]} was saved, but no checkpoint is left; "
                     "training begins again")
        died, stepped = past["death"] or ("", 0.0)
        clock.open(ledger, f"{opts.run_dir}/profile/{world.life}.json" if opts.profile else None,
                   (lambda: log.note(f"{died}; training again after {max(0.0, time.time() - stepped):.1f} s"))
                   if died else None, past["past"])
        ledger.event("life", life=world.life, world=world.size, restart=world.restart, step=state.step,
                     epoch=state.epoch, position=state.position, pids=pids, hosts=hosts, job=job,
                     began=clock.began, n=len(data.train), seed=opts.seed, data=data.fingerprint[:12],
                     global_batch_size=opts.global_batch_size, stages=world.stages, order=order.name,
                     options=opts.given(), **clock.laps)
        if opts.audit:
            ledger.order(order.name, order.facts)
        ledger.saved = past["saved"] or ledger.saved
        ledger.status.start(functools.partial(_look, log, ledger, clock, state, {
            "world": world.size, "hosts": sorted(set(hosts)), "life": world.life, "restarts": past["lives"]}))
    life_is_open()


def _look(log, ledger, clock, state, facts):
    """The fields of status.json; see `Status`."""
    step, when = ledger.saved
    now = "saving" if state.saving else "evaluating" if clock.evaluating else \
        "training" if clock.first else "starting"
    return facts | {
        "state": now, "step": state.step, "total": state.total_steps, "epoch": state.epoch,
        "eta_s": round(log.eta(state.step), 1), "last_save_step": step, "samples_per_s": round(log.rate, 1),
        "last_save_age_s": round(time.time() - when, 1), "goodput": round(clock.shares()["goodput"], 4)}


def note_slow(rescue, rank, text):
    """Prints that a rank is slow, and notes it in the ledger."""
    say(text, sys.stderr)
    rescue.ledger.event("straggler", life=rescue.world.life, rank=rank, step=rescue.state.step)


def _pause(opts, state):
    """Waits if the last lives began here too: they made steps, and died before these were saved."""
    end = time.monotonic() + (0 if state.finished else pause_seconds(_lives(opts), state.step))
    while time.monotonic() < end:
        state.progress += 1  # this is no hang
        time.sleep(0.1)


def pause_seconds(lives, step):
    """1, 2, 4 and so on, if three, four, five lives in a row began at this step and died."""
    over = len(_begun_at(step, lives)) - LIVES_WITHOUT_PROGRESS
    return min(2 ** over, LONGEST_PAUSE_SECONDS) if over >= 0 else 0


def _begun_at(step, lives):
    """The lives in a row, newest first, that began at this step and died."""
    return list(itertools.takewhile(
        lambda events: events[0]["step"] == step and not {event["event"] for event in events} & ENDED_WELL,
        reversed(lives)))


def _lives(opts):
    try:
        return lives_of(opts.run_dir)
    except UserError:
        return []  # this life is the first


def refuse_without_progress(ledger, opts, data, state):
    """Exit code 5 if three lives in a row made no progress on this step; the next start has three again."""
    def in_vain(events):
        further = any(event["step"] > state.step for event in events if type(event.get("step")) is int)
        return not further and events[0].get("data", data.fingerprint[:12]) == data.fingerprint[:12]

    failed = list(itertools.takewhile(in_vain, _begun_at(state.step, _lives(opts))))
    if state.finished or len(failed) < LIVES_WITHOUT_PROGRESS:
        return
    ledger.event("refused", step=state.step)
    errors = (event["why"] for events in reversed(failed) for event in events if event["event"] == "error")
    order = ElasticSampler(data.train, opts.global_batch_size, seed=opts.seed)
    order.set_epoch(state.epoch, state.position)
    ids = next(iter(order))
    samples = ", ".join(map(str, ids[:SAMPLES_NAMED])) + (", ..." if len(ids) > SAMPLES_NAMED else "")
    first = next(errors, "killed, no error was noted")
    raise UserError(f"no progress in {len(failed)} lives on step {state.step + 1}; the first error: {first}\n"
                    f"its samples: {samples} (of epoch {state.epoch + 1})\n"
                    "mend the cause (a bad sample? too little memory?), then start again", code=5)
