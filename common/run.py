"""A run while it trains: what the three scripts and `Elastic` do around each step. The verbs stay with them.

run = Run(opts)                             # who am I, with which data, in which order
if run.was_complete(): return               # an earlier life has trained to the end
state = run.restore(net, optimizer)         # the newest checkpoint that verifies; none is fine
with run.life(evaluate):                    # saves and leaves when asked, or when a peer dies
    while not run.progress.finished:
        run.order.set_epoch(run.progress.epoch, run.progress.position)
        for batch in run.batches():
            ...                             # backward
            run.sum_up(totals)              # over all ranks, where the step is logged
            run.agree()                     # all ranks: save? stop? may all update?
            state.update(batch.size)
            run.stepped(totals)             # logs, compares, saves, obeys
        run.end_epoch()                     # evaluates, counts the epoch, saves if it is worth it
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn, optim

from common.checkpoint import Damaged, checkpoints, describe, read_facts
from common.data import Batch, Data, batches, load_data
from common.device import gpus
from common.errors import UserError, blamed, say
from common.ledger import Audit, Clock, Log, deaths_of, named, newest_lives
from common.options import Options, read_options
from common.place import here, this_process, wait_for_survivors
from common.rescue import Rescue, note_that_it_trains, refuse_a_crash_loop, refuse_without_progress
from common.sampler import ElasticSampler
from common.store import CheckpointStore
from common.training import TrainState, odd_ranks
from common.world import gather, join, leave


class Run:
    """The nouns of a training: world, data, order; then state, store, log, rescue."""

    def __init__(self, opts: Options, own_data: tuple | None = None) -> None:
        self.opts = opts
        self.own_data = own_data
        self.clock = Clock()
        refuse_a_crash_loop()
        if opts.device != "cpu" and gpus():
            wait_for_survivors()  # they have the memory
        self.world = join(opts)  # without RANK and WORLD_SIZE a world of one

    def was_complete(self) -> bool:
        """Whether an earlier life has trained to the end; says so, before data and net take seconds."""
        line = complete(self.opts) if self.world.rank == 0 else ""
        if line:
            say(line)
        is_complete, *_ = gather(self.world, bool(line))
        if is_complete:
            leave(self.world)
        return is_complete

    @cached_property
    def data(self) -> Data:
        """What is trained and tested on."""
        return load_data(self.opts, self.own_data)

    @cached_property
    def order(self) -> ElasticSampler:
        """Which of these samples this rank trains on, and when."""
        opts = self.opts
        return ElasticSampler(
            self.data.train,
            opts.global_batch_size,
            self.world.rank,
            self.world.size,
            opts.seed,
            slices=opts.virtual_ranks,
        )

    def restore(self, net: nn.Module, optimizer: optim.Optimizer, **more: Any) -> TrainState:
        """The state to train on, of the newest checkpoint that verifies; `more` is for TrainState."""
        wait_for_survivors()  # not later: their state and ours might be too much
        opts = self.opts
        world = self.world
        self.scheduled = more.get("schedule") or opts.lr_schedule != "constant"
        self.state = TrainState(net, optimizer, opts, len(self.data.train), **more)
        self.progress = self.state.progress
        self.audit = Audit(opts.run_dir, world.life, world.rank, on=opts.audit)
        self.store = CheckpointStore(opts, world, str(self.data.fingerprint))
        self.ledger = self.store.ledger
        self.source = self.store.restore(self.state)
        return self.state

    @contextmanager
    def life(self, evaluate: Callable[[], dict] | None = None) -> Iterator[None]:
        """From the opening lines to the clean end; without an error all is saved, and all ranks leave."""
        self.evaluate = evaluate
        progress = self.progress
        self.log = Log(
            self.opts,
            self.world.rank,
            progress.step,
            progress.total_steps,
            (progress.record, progress.evaluated),
        )
        self.rescue = Rescue(self.store, on_exit=[self.log.close, self.clock.write_down])
        with closing(self.log), self.rescue, blamed():
            self._open()
            yield
            if evaluate and progress.evaluation_due:  # --eval-only, or stopped before the last one
                self.record(evaluate())
            self.store.save()  # a loop of one's own may be left at any step
            self.store.close()
            self.clock.write_down()
            if progress.finished:
                self.log.done(progress.step, progress.best)
            elif not self.opts.eval_only:
                self.log.note(f"left at step {progress.step} of {progress.total_steps}: it is saved")
        leave(self.world)

    # ---- around each step ----
    def batches(self) -> Iterator[Batch]:
        """Those of this epoch that are left, up to --max-steps."""
        for batch in self.clock.timed(batches(self.data.train, self.order, self.opts)):
            self.audit.begin(self.progress.step + 1, batch.ids)
            self.state.first_forward.begin()
            yield batch
            if self.progress.finished:
                return

    def sum_up(self, totals: Tensor) -> None:
        """Sums the totals over all ranks if this step is logged; the update comes later, so none is lost."""
        if self.progress.next_is_logged:
            self.state.wait_for_gpu()
            totals.copy_(self.world.all_sum(totals.cpu()))

    def agree(self) -> None:
        """All ranks: shall we save, shall we leave, may all of us update?

        Ranks that hold parts of one net ask at every step, as they save and leave at the same one; ranks that
        hold all of it ask at logged steps.
        """
        if self.progress.next_is_logged:
            self.rescue.consult()

    def cross_check(self, model: nn.Module) -> None:
        """All ranks vote on the bits of a slice (--cross-check), if it is time; a wrong one ends the run."""
        if self.opts.cross_check and model.checked is not None:
            self.store.count_votes(odd_ranks(model, self.data.train, self.state, self.world))

    def stepped(self, totals: Tensor) -> None:
        """After the update: logs, compares the replicas, saves when due, does what it is told."""
        self.log_step(totals)
        self.obey()

    def log_step(self, totals: Tensor) -> None:
        """Notes the step where it is due."""
        self.audit.done(self.progress.step)
        self.clock.stepped(self.progress.step)
        if self.progress.step % self.opts.log_every == 0:
            self.log.step(self.state.note(totals) | self.world.memory())

    def obey(self) -> None:
        """Compares the replicas and saves when it is due, leaves when it is told."""
        every = self.opts.check_every
        if every and self.progress.step % every == 0:
            self.store.compare_replicas()
        if self.rescue.save_asked or self.store.due():
            self.rescue.save_asked = False
            self.store.save()  # copies; a thread writes
        self.store.check()
        if self.rescue.leaves:
            self.rescue.leave()

    def end_epoch(self) -> None:
        """Evaluates if it is due; saves if a save is due, the evaluation is the best one, or the run ends."""
        if self.evaluate and self.progress.evaluation_due:
            self.record(self.evaluate())
        with self.state.lock:
            self.progress.end_epoch()
        if self.progress.best_now or self.progress.finished or self.store.due():
            self.store.save()

    def record(self, numbers: dict) -> None:
        """Keeps and logs an evaluation."""
        progress = self.progress
        self.clock.add("evaluation")
        self.state.record_evaluation(numbers)
        if self.world.rank == 0 and progress.best_now:
            self.ledger.event("best", best=progress.best)
        self.log.evaluation(progress.evaluated, numbers)
        if progress.impatient:
            self.log.note(
                f"stopped: no better evaluation since step {progress.best['step']} "
                f"(--patience {self.opts.patience})"
            )

    # ---- how a life begins ----
    def _open(self):
        """Prints what this life is, and enters it in the ledger."""
        self.data.train.note = self.ledger.event
        self.data.test.note = self.ledger.event
        last = []
        with self.world.all_or_none():
            if self.world.rank == 0:
                refuse_without_progress(newest_lives(self.opts.run_dir), self.state)
                last = next(newest_lives(self.opts.run_dir), [])
        if self.world.rank == 0:
            self._introduce(last)
            self._note_life()
        note_that_it_trains()

    def _introduce(self, last):
        """Prints how this life begins; one line if nothing has changed since `last`, the life before."""
        opts = self.opts
        size = self.world.size
        before = last[0] if last else {}  # how it began
        died = deaths_of(last, over=True) if last else []
        us = this_process()
        is_restart = before.get("job") == us["job"]
        lines = [] if is_restart and before["world"] == size else self._header()
        line = self._resumption()
        if is_restart:
            # survivors there have told of a death on their own machine; one line a machine
            elsewhere = {
                death["host"]: f"rank {death['rank']} on {death['host']} {death['cause']}"
                for death in died
                if death["host"] != us["host"]
            }
            lines = [*elsewhere.values(), *lines]
            moments = [event["stepped"] for event in named(last, "left")]
            seconds = max(0.0, time.time() - max(moments, default=last[-1]["t"]))
            line += f", after {seconds:.1f} s with {size} process{'es' * (size > 1)}"
        if self.scheduled and before.get("epochs", opts.epochs) != opts.epochs:  # its line may be damaged
            line += f"; --epochs was {before['epochs']}, now the rate's schedule is that of {opts.epochs}"
        deaths = [f"rank {death['rank']} {death['cause']}" for death in died]
        deaths += [f"step {event['step']} saved by rank {event['rank']}" for event in named(last, "rescue")]
        self.log.start([*lines, line], deaths)

    def _header(self):
        """What is trained, by whom, on what, in which batches."""
        opts = self.opts
        world = self.world
        data = self.data
        parameters = [p.numel() for p in self.state.net.parameters()]
        count = opts.virtual_ranks or world.size
        shares = "slice" if opts.virtual_ranks else "share"
        lines = [
            f"run {opts.run_dir}   world {world.size}   life {world.life}",
            f"devices {', '.join(map(str, world.devices))}   {torch.get_num_threads()} CPU threads a process",
            f"model {opts.model}: {sum(parameters):,} parameters   "
            f"data {opts.dataset}: {len(data.train):,} to train on, {len(data.test):,} to test on",
            f"global batch {opts.global_batch_size} = {count} {shares}{'s' * (count > 1)} of "
            f"{-(-opts.global_batch_size // count)} or less   "
            f"{self.progress.steps_per_epoch:,} steps an epoch, {self.progress.total_steps:,} in all",
        ]
        if self.scheduled and self.progress.total_steps < opts.epochs * self.progress.steps_per_epoch:
            lines.append(
                f"the rate's schedule is that of {opts.epochs} epochs, --max-steps ends before it does"
            )
        return lines

    def _resumption(self):
        """Where this life begins."""
        progress = self.progress
        if self.opts.eval_only:
            doing = "evaluating"
        elif progress.finished:
            doing = "complete: nothing left to train"
        else:
            doing = "resuming" if progress.step else "starting"
        epoch = min(progress.epoch + 1, self.opts.epochs)
        line = f"{doing} at step {progress.step}, epoch {epoch}, position {progress.position:,}"
        return f"{line}, from {self.source}" if self.source else line

    def _note_life(self):
        """Writes into the ledger what the reports and the audit need of this life."""
        pids, hosts, _ = zip(*self.rescue.watch.processes, strict=True)
        self.clock.ledger = self.ledger
        self.ledger.event(
            "life",
            world=self.world.size,
            restart=here().restart,
            job=this_process()["job"],
            pids=pids,
            hosts=hosts,
            step=self.progress.step,
            epoch=self.progress.epoch,
            position=self.progress.position,
            n=len(self.data.train),
            seed=self.opts.seed,
            global_batch_size=self.opts.global_batch_size,
            epochs=self.opts.epochs,
            began=self.clock.began,
        )


def complete(opts: Options) -> str:
    """One line, if the last life of this run ended well with a whole checkpoint of its last step; else ""."""
    if opts.eval_only or opts.resume != "auto":
        return ""
    with suppress(OSError, LookupError, StopIteration, Damaged, UserError):  # the store says what is wrong
        step, folder = checkpoints(opts.run_dir)[0]
        _, facts = read_facts(step, folder)
        ended = facts["epoch"] >= opts.epochs or 0 < opts.max_steps <= step
        if not ended:
            return ""
        last = next(newest_lives(opts.run_dir))
        # without "done" an evaluation may be saved, and not written down
        ended_well = any(event["step"] == step for event in named(last, "done"))
        same = not opts.compare(read_options(opts.run_dir))
        if ended_well and same and describe(step, folder)[0]:
            return f"{opts.run_dir} is complete at step {step}: nothing left to train, {folder.name} is whole"
    return ""
