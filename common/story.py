"""What a life says of itself when it begins, and whether there is anything left to train.

From a run and the life before it to lines for a person, and an event for the reports and the audit.
"""

import time
from contextlib import suppress
from typing import Any

import torch

from common.checkpoint import Damaged, checkpoints, read_facts, threads, verify
from common.errors import UserError
from common.ledger import Life, named, newest_lives
from common.options import Options, commit, extra, read_options
from common.place import here, this_process
from common.training import OWN


def complete(opts: Options) -> str:
    """Return a line if this run's last life ended well with a whole checkpoint of its last step; else ""."""
    if opts.eval_only or opts.resume != "auto":
        return ""
    with suppress(OSError, LookupError, StopIteration, Damaged, UserError):  # the store says what is wrong
        step, folder = checkpoints(opts.run_dir)[0]
        _, facts = read_facts(step, folder)
        last = next(newest_lives(opts.run_dir))
        # without "done" an evaluation may be saved, and not written down
        ended_well = any(event["step"] == step for event in named(last, "done"))
        is_last = facts["epoch"] >= opts.epochs or 0 < opts.max_steps <= step
        is_same = not opts.compare(read_options(opts.run_dir))
        if is_last and ended_well and is_same:
            verify(step, folder, count=threads())
            return (
                f"{opts.run_dir} is complete at step {step}: nothing left to train, {folder.name} is whole\n"
                "--epochs N trains on, --run-dir NEW begins another"
            )
    return ""


def introduce(run: Any, last: Life) -> None:
    """Print how a life begins; one line if nothing has changed since `last`, the life before."""
    opts = run.opts
    size = run.world.size
    before = last[0] if last else {}  # how it began
    us = this_process()
    is_restart = before.get("job") == us["job"]
    lines = [] if is_restart and before["world"] == size else header(run)
    line = resumption(run)
    if is_restart:
        # survivors have printed deaths on their own machine; one line for each other machine
        died = {death["host"]: death for death in extra("deaths")(last, over=True)}
        died.pop(us["host"], None)
        lines = [f"rank {death['rank']} on {host} {death['cause']}" for host, death in died.items()] + lines
        moments = [event["stepped"] for event in named(last, "left")]
        seconds = max(0.0, time.time() - max(moments, default=last[-1]["t"]))
        line += f", after {seconds:.1f} s with {size} process{'es' * (size > 1)}"
    if run.state.scheduled and before.get("epochs", opts.epochs) != opts.epochs:  # its line may be damaged
        line += f"; --epochs was {before['epochs']}, now the rate's schedule is that of {opts.epochs}"
    run.log.start([*lines, line])
    for text in getattr(run.placed, "describe", list)():
        run.log.note(text)


def header(run: Any) -> list[str]:
    """Return lines: what is trained, by whom, on what, in which batches."""
    opts = run.opts
    world = run.world
    data = run.data
    parameters = sum(p.numel() for p in run.net.parameters())
    lines = [
        f"run {opts.run_dir}   world {world.size}   life {world.life}",
        f"devices {', '.join(map(str, world.devices))}   {torch.get_num_threads()} CPU threads a process",
        f"model {opts.model}: {parameters:,} parameters   "
        f"data {opts.dataset}: {len(data.train):,} to train on, {len(data.test):,} to test on",
        f"global batch {opts.global_batch_size} (shares: {opts.virtual_ranks or world.size})   "
        f"{run.progress.steps_per_epoch:,} steps an epoch, {run.progress.total_steps:,} in all",
    ]
    own = opts.task == OWN or any(".py:" in str(value) for value in opts.to_json().values())
    if own and not extra("rehearsed")(opts):
        lines.insert(0, "this program was not rehearsed: python launch/rehearse.py ...")
    if run.state.scheduled and run.progress.total_steps < opts.epochs * run.progress.steps_per_epoch:
        lines.append(f"the rate's schedule is that of {opts.epochs} epochs, --max-steps ends before it does")
    return lines


def resumption(run: Any) -> str:
    """Return a line: where a life begins."""
    progress = run.progress
    if run.opts.eval_only:
        doing = "evaluating"
    elif progress.finished:
        doing = "complete: nothing left to train"
    else:
        doing = "resuming" if progress.step else "starting"
    epoch = min(progress.epoch + 1, run.opts.epochs)
    line = f"{doing} at step {progress.step}, epoch {epoch}, position {progress.position:,}"
    return f"{line}, from {run.source}" if run.source else line


def life_event(run: Any) -> dict[str, Any]:
    """Return what the reports and the audit need of a life."""
    progress = run.progress
    processes = run.rescue.watch.processes
    return {
        "world": run.world.size,
        "restart": here().restart,
        "job": this_process()["job"],
        "commit": commit(),
        "pids": [process["pid"] for process in processes],
        "hosts": [process["host"] for process in processes],
        "starts": [process["process"][1] for process in processes],  # in ticks since boot
        **{name: getattr(progress, name) for name in ("step", "epoch", "position", "turns", "turn")},
        "n": len(run.data.train),
        "seed": progress.order[1],
        "global_batch_size": run.opts.global_batch_size,
        "epochs": run.opts.epochs,
        "began": run.clock.began,
    }
