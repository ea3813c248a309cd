"""Elastic training inside a script of your own: the loop of train_ddp.py as an iterator.

    with Elastic(net=net, optimizer=optimizer, dataset=train_set, run_dir="runs/mine", epochs=3) as run:
        for batch in run:                               # epochs, order, audit, saves, rescue, stop
            loss = F.nll_loss(run.model(batch.x), batch.y, reduction="sum")
            run.step(loss, count=len(batch.y))          # backward, exact mean, update: whole or not at all
            if run.epoch_ended:
                run.report(val_acc=test(run))

Start it with torchrun, launch/local.sh or python; kill it, start it again with another number of processes.
A batch may be empty, see common/README.md: the sum of nothing is 0, so a script needs no special case.
"""
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoint import CheckpointStore
from common.data import Batch, Data, batches, leaves, load_data, map_tensors
from common.errors import UserError, fail
from common.ledger import Audit, Clock, Ledger, Log
from common.models import check_net
from common.options import Options, begin_life
from common.rescue import Rescue, open_life
from common.sampler import ElasticSampler
from common.training import TrainState, distribute, factor, placed, seed
from common.world import join, leave

UNUSED = ("amp", "compile", "task", "virtual_ranks", "micro_batch_size", "model", "optimizer", "lr_schedule")


class Elastic:
    """A run, held while it trains. `run.model` is the net to train, `run.world` the ranks of this life."""

    def __init__(self, *, net: nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, run_dir: str | Path,
                 batch_size: int = 64, epochs: int = 1, seed: int = 0, schedule: Callable | None = None,
                 **options: Any):
        """`dataset` is map-style; `schedule(step, total)` a factor of the optimizer's rate, a pure function.

        `options` are fields of Options that train_ddp.py has as flags: save_every, audit, keep, best, ...
        """
        if refused := sorted({*options} & {*UNUSED}):
            raise TypeError(f"{refused[0]}: not here; the script has the net, the optimizer and the loss")
        self.clock, self.net, self.schedule, self.dataset = Clock("import"), net, schedule, dataset
        self.optimizer, self.rate = optimizer, float(optimizer.param_groups[0]["lr"])
        for group in optimizer.param_groups:
            group["scale"] = float(group["lr"]) / self.rate if self.rate else 1.0
        self.opts = Options(run_dir=Path(run_dir), model=type(net).__name__, dataset=type(dataset).__name__,
                            global_batch_size=batch_size, epochs=epochs, seed=seed, task="the script",
                            optimizer=type(optimizer).__name__.lower(), lr=self.rate,
                            **({"workers": 0} | options))
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> "Elastic":
        try:
            begin_life()
            self._begin()
        except UserError as error:
            self.stack.close()
            fail(error)
        return self

    def _begin(self):
        opts, clock = self.opts, self.clock
        self.world = world = join(opts)
        clock.lap("join")
        self.data = load_data(opts, world, Data(self.dataset, self.dataset, known_classes=None))
        self.order = ElasticSampler(self.data.train, opts.global_batch_size, world.rank, world.size,
                                    opts.seed)
        check_net(self.net, opts.model)
        self.net.to(world.device)
        clock.lap("load")
        state = self.state = TrainState(self.net, self.optimizer, opts, len(self.data.train),
                                        order=self.order.name, rate=self._rate)
        self.ledger = Ledger(opts.run_dir)
        self.audit = Audit(opts.run_dir, world.life, world.rank, on=opts.audit)
        self.store = CheckpointStore(opts, world, self.data.fingerprint, self.ledger)
        source = self.store.restore(self.state)
        clock.lap("restore")
        self.wrapped = distribute(self.net, opts, world)
        self.log = self.stack.enter_context(
            Log(opts, world, state.step, state.total_steps, (state.record, state.evaluated)))
        self.rescue = self.stack.enter_context(Rescue(
            self.store, self.state, world, self.ledger, closing=[self.log.close, clock.close]))
        open_life(self.log, self.ledger, clock, opts, world, self.data, self.state, source)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:  # also where the script has left its loop before the end
            self.store.save(self.state)
            self.store.close()
            self.clock.close()
        self.stack.__exit__(kind, error, trace)
        if isinstance(error, UserError):
            fail(error)
        if error is None:
            leave(self.world)

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left of this run, epoch after epoch; each is in the model exactly once."""
        state = self.state
        while not state.finished:
            if self.rescue.told("stop-epoch"):
                self.rescue.leave()
            self.order.set_epoch(state.epoch, state.position)
            self.net.train()
            if self.epoch_ended and state.evaluated.get("step") != state.step:
                yield self._begin_step(Batch([self._nothing()], [], 0))  # a life died before it had reported
            for batch in self.clock.timed(batches(self.data.train, self.order, self.opts)):
                self.audit.begin(state.step + 1, state.epoch, state.position, batch.ids)
                step = state.step
                yield self._begin_step(batch if batch.parts else batch._replace(parts=[self._nothing()]))
                if state.step == step:
                    raise RuntimeError("a batch was not trained on: call run.step(loss, count) once for each")
                if state.finished:  # max_steps
                    break
            state.end_epoch()
            self.store.save(state)

    def model(self, *inputs: Any, **named: Any) -> Any:
        """The net's output; called once a step, so that gradients are averaged over the ranks."""
        self.state.progress += 1
        tensors = leaves([*inputs, *named.values()])
        if tensors and not len(tensors[0]):
            def nothing(net):
                weights = [p.flatten()[:0].sum() for p in net.parameters() if p.requires_grad]
                return tensors[0].new_zeros(0, 1, dtype=torch.float32) + sum(weights)

            return self.wrapped(nothing) if self.batch.size and self.world.size > 1 else nothing(self.net)
        return self.wrapped(*inputs, **named)

    def step(self, loss: Tensor, count: Any) -> None:
        """One step of the global batch: `loss` is summed over this rank's samples, of which `count` count."""
        batch, state, world = self.batch, self.state, self.world
        if not batch.size:
            return
        (loss * (world.size / batch.size)).backward()
        state.buffers.average(world, len(batch.ids) / batch.size)
        numbers = (torch.as_tensor(number, device=world.device) for number in (loss, count))
        self.totals = torch.stack([number.detach().double() for number in numbers])
        state.count(self.totals[1], batch.size, world.all_sum)
        if (state.step + 1) % self.opts.log_every == 0:
            self.rescue.all_sum(self.totals)  # and what RUN/control/ asks for
        state.update(batch.size)
        self._end_step()

    @property
    def epoch_ended(self) -> bool:
        """Whether all samples of this epoch are trained on: the moment to evaluate and to report."""
        return self.state.epoch_over

    def report(self, **metrics: float) -> None:
        """Logs an evaluation, the same numbers on all ranks; the best one keeps its checkpoint."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self.log.evaluation(self.state, self.state.record_evaluation(numbers))

    # ---- one step ---------------------------------------------------------------------------------
    def _begin_step(self, batch):
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
        """The optimizer's own rate, times what `schedule` says of a step."""
        if self.schedule is None:
            return self.opts.lr
        total = self.opts.epochs * -(-len(self.data.train) // self.opts.global_batch_size)
        return self.opts.lr * factor(self.schedule(planned, max(1, total)), "schedule", planned)

    def _nothing(self):
        """The part of a batch without samples."""
        return 0, map_tensors(lambda t: t[:0], self.data.train.fetch([0]))
