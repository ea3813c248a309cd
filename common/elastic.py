"""Elastic training inside a script of your own: the loop of train_ddp.py as an iterator.

    with Elastic(net=net, optimizer=optimizer, dataset=train_set, run_dir="runs/mine", epochs=3) as run:
        for batch in run:                               # epochs, order, audit, saves, rescue, stop
            loss = F.nll_loss(run.model(batch.x), batch.y, reduction="sum")
            run.step(loss, count=len(batch.y))          # backward, exact mean, update: whole or not at all
            if run.epoch_ended:
                run.report(val_acc=test(run))

Start it with torchrun, launch/local.sh or python; kill it, start it again with another number of processes.
A rank without samples gets a batch that counts nothing, so a script needs no special case.
"""
import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.checkpoint import CheckpointStore
from common.data import Batch, Data, batches, load_data
from common.errors import UserError, did_you_mean, end, refuse
from common.ledger import Audit, Clock, Ledger, Log
from common.models import check_net
from common.options import Options, begin_life
from common.rescue import Rescue, open_life
from common.sampler import ElasticSampler
from common.training import TrainState, distribute, factor, placed, seed
from common.world import join, leave, send

TAKEN = (  # fields of Options that take effect here
    "accept_data_change", "audit", "augment", "bad_samples", "best", "channels_last", "check_every",
    "clip_grad_norm", "debug", "device", "digest_every", "ema_decay", "hang_timeout", "keep", "keep_every",
    "log_every", "log_to", "max_steps", "memory_tier", "patience", "profile", "progress", "resume",
    "save_every", "save_seconds", "tensorboard", "tf32", "threads", "workers")
RATES = ("the script changes the optimizer's rate, and a restart would not know that\n"
         "leave that to Elastic(schedule=f), where f(step, steps in all) returns a factor")


class Elastic:
    """A run while it trains: `with Elastic(...) as run`. Call `run.model`; `run.world` has the ranks."""

    def __init__(self, *, net: nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, run_dir: str | Path,
                 batch_size: int = 64, epochs: int = 1, seed: int = 0, schedule: Callable | None = None,
                 **options: Any):
        """`dataset` is map-style. `schedule(step, total)` returns a factor of the rate, from these two alone.

        `options` are fields of Options that train_ddp.py has as flags: save_every, audit, keep, best, ...
        """
        self.clock, self.net, self.optimizer, self.dataset = Clock("import"), net, optimizer, dataset
        self.run_dir, self.schedule, self.debug = run_dir, schedule, options.get("debug")
        self.called = self.stepped = False  # run.model, run.step: with this batch
        self.given = {"global_batch_size": batch_size, "epochs": epochs, "seed": seed, "workers": 0} | options

    def __enter__(self) -> "Elastic":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until it means "save"; before that it would kill
        with self._errors():
            begin_life()
            _refuse_odd(self.net, self.optimizer, self.given)
            model, dataset, kind = (type(part).__name__ for part in (self.net, self.dataset, self.optimizer))
            rate = float(next(filter(None, self._rates()), 0.0))
            for group in self.optimizer.param_groups:
                group["scale"] = float(group["lr"]) / (rate or 1.0)
            self.opts = Options.checked(
                self.given, run_dir=Path(self.run_dir), model=model, dataset=dataset, task="the script",
                optimizer=kind.lower(), lr=rate)
            with contextlib.ExitStack() as self.stack:
                self._begin()
                self.stack = self.stack.pop_all()
        return self

    @contextlib.contextmanager
    def _errors(self):
        try:
            yield
        except UserError as error:
            if self.debug:
                raise
            end(error, notebook=True)

    def _begin(self):
        opts, clock = self.opts, self.clock
        self.world = world = join(opts)
        clock.lap("join")
        self.data = load_data(opts, world, Data(self.dataset, self.dataset, known_classes=None))
        self.order = ElasticSampler(self.data.train, opts.global_batch_size, world.rank, world.size,
                                    opts.seed)
        check_net(self.net, opts.model)
        self.net.to(world.device).train()  # here a net may freeze parts of itself
        for tensor in self.net.state_dict().values() if world.size > 1 else ():  # a script may not seed
            own = tensor.detach().contiguous().view(-1).view(torch.uint8)
            tensor.copy_(world.broadcast(own, 0).view(tensor.dtype).view(tensor.shape))
        clock.lap("load")
        state = self.state = TrainState(self.net, self.optimizer, opts, len(self.data.train),
                                        order=self.order.name, rate=self._rate)
        self.ledger, self.audit = Ledger(opts.run_dir), Audit(
            opts.run_dir, world.life, world.rank, on=opts.audit)
        self.store = CheckpointStore(opts, world, self.data.fingerprint, self.ledger)
        source = self.store.restore(state)
        clock.lap("restore")
        self.wrapped = distribute(self.net, opts, world)
        log = self.log = Log(opts, world, state.step, state.total_steps, (state.record, state.evaluated))
        self.rescue = Rescue(self.store, state, world, self.ledger, closing=[log.close, clock.close])
        self.stack.enter_context(log), self.stack.enter_context(self.rescue)
        self.stack.push(self._close)
        open_life(log, self.ledger, clock, opts, world, self.data, state, source)
        self.rates = self._rates()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        left = error is None or isinstance(error, SystemExit) and not error.code  # sys.exit(), a break
        with self._errors():
            self.stack.__exit__(*(None, None, None) if left else (kind, error, trace))
            if isinstance(error, UserError):
                raise error
        if left:
            leave(self.world)

    def _close(self, kind, error, trace):
        if error is None:  # the loop is over, or the script has left it
            self.store.save(self.state)
            self.store.close()
            self.clock.close()

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left of this run, epoch after epoch; each is in the model exactly once."""
        state = self.state
        while not state.finished:
            if self.rescue.told("stop-epoch"):
                self.rescue.leave()
            self.order.set_epoch(state.epoch, state.position)
            self.net.train()
            if self.epoch_ended and state.evaluated.get("step") != state.step:
                yield self._begin_step(Batch([], [], 0))  # a life died before it had reported
            for batch in self.clock.timed(batches(self.data.train, self.order, self.opts)):
                self.audit.begin(state.step + 1, state.epoch, state.position, batch.ids)
                yield self._begin_step(batch)
                refuse((not self.stepped, "a batch was not trained on\ncall run.step(loss, count) for each"))
                if state.step >= state.total_steps:  # max_steps
                    break
            told = send(self.world, json.dumps([state.best, state.evaluated]).encode(), 0)
            state.best, state.evaluated = json.loads(told)  # a script may report on rank 0 only
            state.end_epoch()
            self.store.save(state)

    def model(self, *inputs: Any, **named: Any) -> Any:
        """The net's output. Call it in place of the net: only then gradients are averaged over the ranks."""
        self.state.progress += 1
        self.called |= torch.is_grad_enabled()  # else it is an evaluation, maybe of one rank alone
        return (self.wrapped if torch.is_grad_enabled() else self.net)(*inputs, **named)

    def step(self, loss: Tensor, count: Any) -> None:
        """One step: `loss` is the sum over this rank's samples, `count` the number of those that count."""
        batch, state, world = self.batch, self.state, self.world
        if not batch.size:
            return state.buffers.restore()
        refuse(
            (self.stepped, "run.step was called twice for one batch\nadd the losses, and call it once"),
            (any(p.grad is not None for p in state.names), "there are gradients before run.step, which calls "
             "backward itself\nadd the losses; set gradients from before the loop to None"),
            (not self.called, "run.step without run.model: other ranks would lack this gradient\n"
             "call run.model(x) in place of the net"),
            (self.rates != self._rates(), RATES))
        own = 0 if self.hollow else len(batch.ids)
        (loss * (world.size / batch.size * bool(own))).backward()
        state.buffers.average(world, own / batch.size)
        numbers = (torch.as_tensor(number, device=world.device) for number in (loss, count))
        self.totals = torch.stack([number.detach().double() for number in numbers]) * bool(own)
        state.count(self.totals[1], batch.size, world.all_sum)
        if (state.step + 1) % self.opts.log_every == 0:
            self.rescue.all_sum(self.totals)  # and what RUN/control/ asks for
        state.update(batch.size)
        self.stepped, self.rates = True, self._rates()
        self._end_step()

    @property
    def epoch_ended(self) -> bool:
        """Whether this epoch or the run (max_steps) is complete: now evaluate and report."""
        return self.state.epoch_over or self.state.finished

    def report(self, **metrics: float) -> None:
        """Logs an evaluation; the best one keeps its checkpoint. Where ranks differ, rank 0's counts."""
        try:
            numbers = {"val_" + name.removeprefix("val_"): float(value) for name, value in metrics.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"run.report: {error}\nwanted: a number for each name") from error
        self.log.evaluation(self.state, self.state.record_evaluation(numbers))

    def _begin_step(self, batch):
        self.called = self.stepped = False
        self.hollow = not batch.parts or batch.parts[0][1] is None  # all skipped (bad_samples)
        if self.hollow:  # two, for BatchNorm cannot train on one
            split = self.data.train
            batch = batch._replace(parts=[(0, split.fetch(2 * [getattr(split, "first", 0)]))])
        self.batch = batch._replace(parts=[(n, placed(part, self.world.device, self.opts))
                                           for n, part in batch.parts])
        seed(self.world, self.opts.seed, "step", self.state.step, self.world.rank)  # dropout: never stored
        return self.batch

    def _end_step(self):
        state, store, opts = self.state, self.store, self.opts
        self.audit.done(state.whole)
        self.clock.stepped(state.step)
        if state.step % opts.log_every == 0:
            self.log.step(state, state.note(self.totals))
        if opts.check_every and state.step % opts.check_every == 0:
            store.agree(state)
        if self.rescue.told("save") or store.due(state):
            store.save(state)
        store.check()
        if self.rescue.asked:
            self.rescue.leave()

    def _rate(self, planned):
        """The optimizer's own rate, times the factor that `schedule` returns for a step."""
        if self.schedule is None:
            return self.opts.lr
        total = self.opts.epochs * -(-len(self.data.train) // self.opts.global_batch_size)
        return self.opts.lr * factor(self.schedule(planned, max(1, total)), "schedule", planned)

    def _rates(self):
        return [group["lr"] for group in self.optimizer.param_groups]


def _refuse_odd(net, optimizer, given):
    """UserError for arguments with which a run cannot train, or cannot resume."""
    odd = next((name for name in given if name not in (*TAKEN, "global_batch_size", "epochs", "seed")), "")
    wrapped = isinstance(net, (DataParallel, DistributedDataParallel)) or hasattr(net, "_orig_mod")
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    refuse(
        (odd, f"Elastic: {odd} cannot take effect in a loop of your own{did_you_mean(odd, TAKEN)}\n"
         "the script has the net, the optimizer and the loss"),
        (wrapped or not isinstance(net, nn.Module),
         f"Elastic: net is a {type(net).__name__}\ngive the bare nn.Module: it is wrapped here"),
        (not groups, f"Elastic: optimizer is a {type(optimizer).__name__}\n"
         "wanted: one torch.optim.Optimizer; it may have several groups"),
        ({p for group in groups for p in group["params"]} - {*getattr(net, "parameters", tuple)()},
         "Elastic: the optimizer has weights that are not the net's\n"
         "make it from net.parameters(), of the net that is given here"),
        (any("initial_lr" in group for group in groups), RATES))  # torch's schedulers set it
