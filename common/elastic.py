"""Elastic training inside a script of your own: the loop of train_ddp.py as an iterator.

    with Elastic(net=net, optimizer=optimizer, dataset=train_set, test_set=test_set, run_dir="runs/mine",
                 batch_size=64, epochs=3) as run:       # 64 samples a step, over all processes
        for batch in run:                               # epochs, order, audit, saves, rescue, stop
            loss = F.nll_loss(run.model(batch.x), batch.y, reduction="sum")
            run.step(loss, count=len(batch.y))          # backward, exact mean, update: whole or not at all
            if run.epoch_ended:
                run.report(**run.evaluate(judge))       # judge(batch) -> {"acc": (sum, count)}

Start it with torchrun, launch/local.sh or python; kill it, start it again with another number of processes.
From another folder: `python CLONE/launch/torchrun.py ... mine.py`, also where that has a `common/` of its
own; with plain torchrun `PYTHONSAFEPATH=1 PYTHONPATH=CLONE:. torchrun ... mine.py`. A rank without samples
gets a batch that counts nothing, and so does a life that has only a report to make up for: a script needs no
special case.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from common.data import Batch, map_tensors
from common.errors import UserError, blamed, did_you_mean, end
from common.models import check_net
from common.options import begin_life, read_arguments
from common.run import Run
from common.training import Gradient, autocast, distribute, evaluate, find_task, prepare, task_of
from common.world import gather

TAKEN = (  # fields of Options that take effect here
    "accept_data_change amp audit bad_samples best channels_last check_every clip_grad_norm debug "
    "device digest_every ema_decay epochs global_batch_size hang_timeout keep keep_every log_every max_steps "
    "micro_batch_size patience progress resume run_dir save_every save_seconds seed tensorboard tf32 threads "
    "virtual_ranks workers"
).split()


class Elastic:
    """A run while it trains: `with Elastic(...) as run`. Call `run.model`; `run.world` has the ranks."""

    def __init__(
        self,
        *,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset,
        run_dir: str | Path,
        test_set: Dataset | None = None,
        batch_size: int = 64,
        epochs: int = 1,
        seed: int = 0,
        schedule: Callable[[int, int], float] | None = None,
        **options: object,
    ) -> None:
        """`dataset` is map-style; `batch_size` counts the samples of a step over all processes.

        `schedule(step, total)` returns a factor of the rate, from these two alone. `options` are fields of
        Options that train_ddp.py has as flags: amp, clip_grad_norm, save_every, audit, keep, best, ...
        """
        self.net = net
        self.optimizer = optimizer
        self.sets = (dataset, dataset if test_set is None else test_set)
        self.schedule = schedule
        self.called = False
        self.trained = False
        self.kept = {}
        self.given = {
            "run_dir": run_dir,
            "global_batch_size": batch_size,
            "epochs": epochs,
            "seed": seed,
            "workers": 0,
        } | options

    def __enter__(self) -> "Elastic":
        self.life = self._live()
        self.life.__enter__()
        return self

    def __exit__(self, *error):
        self.life.__exit__(*error)

    @contextmanager
    def _live(self):
        """From the arguments to the clean end; mistakes are told as in a script, with names of arguments."""
        try:
            with blamed("Elastic"):
                self._begin()
            with self.run.life():
                try:
                    yield
                except SystemExit as exit:
                    if exit.code:
                        raise  # else it is a good end, as a break is
                self._end_step()
        except UserError as error:
            if self.given.get("debug"):
                raise
            text = str(error)
            for name in sorted(TAKEN, key=len, reverse=True):  # keep_every before keep
                text = text.replace(f"--{name.replace('_', '-')}", name)
            end(UserError(text, error.code))

    def _begin(self):
        begin_life()
        self._check_arguments()
        rate = float(max(group["lr"] for group in self.optimizer.param_groups))
        opts = read_arguments(
            self.given,
            {
                "task": "the script",
                "lr": rate,
                "model": type(self.net).__name__,
                "dataset": type(self.sets[0]).__name__,
                "optimizer": type(self.optimizer).__name__.lower(),
            },
        )
        self.run = Run(opts, self.sets)
        self.world = self.run.world
        check_net(self.net, opts.model)
        if not any(module.training for module in self.net.modules()):
            self.net.train()  # others' loaders return a net in evaluation mode
        prepare(self.net, opts, self.world, self.run.data, find_task(opts))
        self.wrapped = distribute(self.net, opts, self.world)  # rank 0's weights: a script may not seed
        self.state = self.run.restore(self.net, self.optimizer, schedule=self.schedule)
        self.progress = self.state.progress
        self.gradient = Gradient(self.wrapped, Batch([], 0), self.state, self.world)  # of no batch yet
        for group in self.state.groups:
            group["scale"] = float(group["lr"]) / (rate or 1.0)
        # a life died before it had reported
        self.report_due = self.progress.epoch_over and not self.progress.evaluated_now
        self.settings = self._settings()
        # which parts of the net train, and which evaluate; an evaluation may leave others
        self.modes = {module: module.training for module in self.net.modules()}

    def _check_arguments(self):
        for name in self.given:
            if name not in TAKEN:
                raise UserError(
                    f"Elastic: {name} cannot take effect in a loop of your own"
                    f"{did_you_mean(name, TAKEN)}\n"
                    "the script has the net, the optimizer and the loss"
                )

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left of this run, epoch after epoch; each is in the model exactly once."""
        self._end_step()  # of the batch at which a loop before was left
        while not self.progress.finished:
            self.run.order.set_epoch(self.progress.epoch, self.progress.position)
            self._set_modes()
            if self.report_due:
                self.report_due = False
                self.kept = {t: t.detach().clone() for t in (*self.net.parameters(), *self.net.buffers())}
                try:
                    yield from self._pieces(Batch([], 0))
                finally:  # also where the loop is left
                    self._put_back()
                    self.kept = {}
            for batch in self.run.batches():
                yield from self._pieces(batch)
                self._end_step()
                self.run.obey()  # not in run.step: what the loop changes after it belongs to the step
            reports = gather(self.world, [self.progress.best, self.progress.evaluated])
            self.progress.best, self.progress.evaluated = reports[0]  # a script may report on rank 0 only
            self.run.end_epoch()

    def _pieces(self, batch):
        """This rank's forwards of a global batch: one, or more with micro_batch_size or virtual_ranks.

        A rank without samples gets an example, which counts nothing.
        """
        gradient = self.gradient = Gradient(self.wrapped, batch, self.state, self.world)
        # others are skipped (bad_samples)
        readable = [part for part in gradient.parts if part[-1] is not None]
        gradient.parts = readable or [(self.world.rank, [], self.run.data.train.example())]
        for samples in gradient.pieces():
            self.called = False  # run.model, with this piece
            self.trained = False  # run.step
            yield Batch([(gradient.ids, samples)], batch.size)
            if batch.size and not (self.trained and self.gradient is gradient):
                raise UserError(
                    "a batch was not trained on, or two loops over run take turns\n"
                    "call run.step(loss, count) for each batch, in one loop"
                )

    def model(self, *inputs: object, **named: object) -> Any:
        """The net's output. Call it in place of the net: only then gradients are averaged over the ranks."""
        self.state.heartbeat += 1
        training = torch.is_grad_enabled()  # else it is an evaluation, maybe of one rank alone
        if not training:
            self._put_back()
        self.called |= training
        model: Any = self.gradient.net if training else self.net
        with autocast(self.state.opts, self.world.device):
            out = model(*inputs, **named)
        if self.state.opts.amp == "off":
            return out
        return map_tensors(lambda x: x.float() if x.dtype in (torch.float16, torch.bfloat16) else x, out)

    def _end_step(self):
        """Once the loop has changed after the step what it wants to: ranks have the same buffers again."""
        batch = self.gradient.batch
        is_whole = self.trained and self.gradient.is_last  # the script may leave its loop between two pieces
        if is_whole:
            self.state.statistics.average(self.world, len(batch.ids) / batch.size)
            with self.state.changing():
                self.state.statistics.commit()

    @torch.no_grad()
    def _put_back(self):
        """In a batch that is only there for a report: undoes what the loop has done in the life before."""
        for tensor, value in self.kept.items():
            tensor.copy_(value)

    def step(self, loss: Tensor, count: float | Tensor) -> None:
        """One step: `loss` is the sum over the samples of a batch, `count` the number of those that count.

        Of a batch in pieces the last one updates.
        """
        gradient = self.gradient
        state = self.state
        if self.kept:  # in a batch that is only there for a report
            return state.statistics.reset()
        self._check_step()
        weights = [p for p in state.names if p.requires_grad]
        loss = state.task.minimised({"loss": (loss, count)}, weights)  # a share may have nothing to learn
        counted = torch.as_tensor(count, dtype=torch.float64, device=self.world.device)
        totals = torch.stack([loss.detach().to(counted), counted])
        counts = bool(gradient.ids)
        self.trained = True
        gradient.add(loss * counts, totals * counts)
        if not counts:  # of an example nothing does
            state.statistics.reset()
        if gradient.is_last:
            totals = gradient.finish()
            self.run.sum_up(totals)
            self.run.agree()
            state.update(gradient.batch.size)
            self.settings = self._settings()
            self.run.log_step(totals)

    def _check_step(self):
        if not self.gradient.batch.size:
            raise UserError("run.step before the first batch\ncall it in a loop over run: for batch in run")
        if self.trained:
            raise UserError("run.step was called twice for one batch\nadd the losses, and call it once")
        if not self.called:
            raise UserError(
                "run.step without run.model: other ranks would lack this gradient\n"
                "call run.model(x) in place of the net"
            )
        for (name, before), (_, now) in zip(self.settings, self._settings(), strict=False):
            if now != before:
                raise UserError(
                    f"the script changes {name}, and neither a restart nor another rank would know that\n"
                    "for lr give Elastic(schedule=f), where f(step, steps in all) returns a factor; "
                    "for others train two runs"
                )
        if self.gradient.is_first and any(p.grad is not None for p in self.state.names):
            raise UserError(
                "a weight has a gradient before run.step, which computes it\n"
                "add up the losses, and give run.step their sum"
            )

    def _settings(self):
        """(name, value) of what decides how weights train: the run alone may change it."""
        settings = [("requires_grad", [p.requires_grad for p in self.state.names])]
        for group in self.state.groups:
            settings += [(name, value) for name, value in group.items() if name != "params"]
        return settings

    def _set_modes(self):
        """Those with which the run began."""
        for module, training in self.modes.items():
            module.training = training

    @property
    def epoch_ended(self) -> bool:
        """Whether this epoch or the run (max_steps) is complete: now evaluate and report."""
        return self.progress.epoch_over or self.progress.finished

    def evaluate(self, judge: Callable[[Batch], dict[str, tuple]]) -> dict[str, float]:
        """{"val_acc": sum / count, ...} of `judge(batch)` over `test_set`; call it on every rank.

        The ranks share the samples; each counts once, and no bit depends on the number of ranks.
        """
        if not self.gradient.is_last:
            raise UserError(
                "run.evaluate between two pieces of a batch: another rank may have fewer\n"
                "call it where run.epoch_ended, or once run.progress.step has grown"
            )
        task = task_of(lambda net, part, state: judge(Batch([([], part)], 0)), "judge")
        self._end_step()
        try:
            return evaluate(self.net, self.run.data.test, self.state, self.world, task)
        finally:
            self._set_modes()

    def report(self, **metrics: float) -> None:
        """Logs an evaluation; the best one keeps its checkpoint. Where ranks differ, rank 0's counts.

        The best is that of `best`, else of the highest "acc", else of the lowest "loss".
        """
        numbers = {name.removeprefix("val_"): float(value) for name, value in metrics.items()}
        self.state.task.shown = [*numbers]
        self.run.record({f"val_{name}": value for name, value in numbers.items()})
        if not self.epoch_ended and self.progress.best_now:
            self.run.rescue.save_asked = True
