"""Elastic training inside a script of your own: the loop of train_ddp.py as an iterator.

    with Elastic(net=net, optimizer=optimizer, dataset=train_set, test_set=test_set, run_dir="runs/mine",
                 batch_size=64, epochs=3) as run:       # 64 samples a step, over all processes
        for batch in run:                               # epochs, order, audit, saves, rescue, stop
            loss = F.nll_loss(run.model(batch.x), batch.y, reduction="sum")
            run.step(loss, count=len(batch.y))          # backward, exact mean, update: whole or not at all
            if run.epoch_ended:
                run.report(**run.evaluate(judge))       # judge(batch) -> {"acc": (sum, count)}

Start it with torchrun, launch/local.sh or python; kill it, start it again with another number of processes.
From another folder: `PYTHONPATH=CLONE torchrun ... mine.py`; where that has a `common/` of its own,
`PYTHONSAFEPATH=1 PYTHONPATH=CLONE:. torchrun ... mine.py`. A rank without samples gets a batch that counts
nothing: a script needs no special case.
"""
import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.data import Batch, Data
from common.errors import UserError, did_you_mean, end
from common.models import check_net
from common.options import Options, begin_life
from common.run import Run
from common.training import autocast, distribute, evaluate, factor, placed, seed
from common.world import gather_texts

TAKEN = (  # fields of Options that take effect here
    "accept_data_change", "amp", "audit", "augment", "bad_samples", "best", "channels_last", "check_every",
    "clip_grad_norm", "debug", "device", "digest_every", "ema_decay", "hang_timeout", "keep", "keep_every",
    "log_every", "max_steps", "patience", "progress", "resume", "save_every", "save_seconds", "tensorboard",
    "tf32", "threads", "workers")
RATES = ("the script changes the optimizer's rate, and a restart would not know that\n"
         "leave that to Elastic(schedule=f), where f(step, steps in all) returns a factor")


class Elastic(Run):
    """A run while it trains: `with Elastic(...) as run`. Call `run.model`; `run.world` has the ranks."""

    def __init__(self, *, net: nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, run_dir: str | Path,
                 test_set: Any = None, batch_size: int = 64, epochs: int = 1, seed: int = 0,
                 schedule: Callable[[int, int], float] | None = None, **options: Any) -> None:
        """`dataset` is map-style; `batch_size` counts the samples of a step over all processes.

        `schedule(step, total)` returns a factor of the rate, from these two alone. `options` are fields of
        Options that train_ddp.py has as flags: amp, clip_grad_norm, save_every, audit, keep, best, ...
        """
        self.net = net
        self.optimizer = optimizer
        self.sets = Data(dataset, dataset if test_set is None else test_set, known_classes=None)
        self.run_dir = Path(run_dir)
        self.schedule = schedule
        self.called = False   # run.model, with this batch
        self.trained = False  # run.step, with this batch
        self.given = {"global_batch_size": batch_size, "epochs": epochs, "seed": seed, "workers": 0} | options

    def __enter__(self) -> "Elastic":
        with self._errors():
            begin_life()
            _check(self.net, self.optimizer, self.given)
            rate = float(next(filter(None, self._rates()), 0.0))
            for group in self.optimizer.param_groups:
                group["scale"] = float(group["lr"]) / (rate or 1.0)
            self.opts = Options.checked(
                self.given, run_dir=self.run_dir, task="the script", lr=rate, model=type(self.net).__name__,
                dataset=type(self.sets.train).__name__, optimizer=type(self.optimizer).__name__.lower())
            with contextlib.ExitStack() as stack:
                self._begin(stack)
                self.stack = stack.pop_all()
        return self

    @contextlib.contextmanager
    def _errors(self):
        """Tells mistakes as a script does, by the names of arguments."""
        try:
            yield
        except UserError as error:
            if self.given.get("debug"):
                raise
            text = re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), str(error))
            end(UserError(text, error.code))

    def _begin(self, stack):
        super().__init__(self.opts, self.sets)
        check_net(self.net, self.opts.model)
        self.net.to(self.world.device).train()  # here a net may freeze parts of itself
        if self.world.size > 1:  # a script may not seed: all begin with the weights of rank 0
            for tensor in self.net.state_dict().values():
                bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
                tensor.copy_(self.world.broadcast(bits, 0).view(tensor.dtype).view(tensor.shape))
        self.restore(self.net, self.optimizer, rate=self._rate)
        self.wrapped = distribute(self.net, self.opts, self.world)
        stack.enter_context(self.life())
        self.rates = self._rates()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        left = error is None or isinstance(error, SystemExit) and not error.code  # sys.exit(), a break
        with self._errors():
            self.stack.__exit__(*(None, None, None) if left else (kind, error, trace))
            if isinstance(error, UserError):
                raise error

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left of this run, epoch after epoch; each is in the model exactly once."""
        state = self.state
        while not state.finished:
            self.order.set_epoch(state.epoch, state.position)
            self.net.train()
            if self.epoch_ended and state.evaluated.get("step") != state.step:
                yield self._prepared(Batch([], [], 0))  # a life died before it had reported
            for batch in self.batches():
                yield self._prepared(batch)
                if not self.trained:
                    raise UserError("a batch was not trained on\ncall run.step(loss, count) for each")
            reports = gather_texts(self.world, json.dumps([state.best, state.evaluated]))
            state.best, state.evaluated = json.loads(reports[0])  # a script may report on rank 0 only
            self.end_epoch()

    def model(self, *inputs: Any, **named: Any) -> Any:
        """The net's output. Call it in place of the net: only then gradients are averaged over the ranks."""
        self.state.progress += 1
        training = torch.is_grad_enabled()  # else it is an evaluation, maybe of one rank alone
        self.called |= training
        with autocast(self.opts, self.world.device):
            out = (self.wrapped if training else self.net)(*inputs, **named)
        return out.float() if isinstance(out, Tensor) and self.opts.amp != "off" else out

    def step(self, loss: Tensor, count: Any) -> None:
        """One step: `loss` is the sum over this rank's samples, `count` the number of those that count."""
        batch = self.batch
        state = self.state
        if not batch.size:
            return state.buffers.restore()
        self._check_step()
        samples = 0 if self.hollow else len(batch.ids)
        mean = loss * (self.world.size / batch.size * bool(samples))
        (state.scaler.scale(mean) if state.scaler else mean).backward()
        state.buffers.average(self.world, samples / batch.size)
        counted = torch.as_tensor(count, device=self.world.device)
        totals = torch.stack([loss.detach().double(), counted.double()]) * bool(samples)
        state.count(totals[1], batch.size, self.world.all_sum)
        self.share(totals)
        state.update(batch.size)
        self.trained = True
        self.rates = self._rates()
        self.stepped(totals)

    def _check_step(self):
        if self.trained:
            raise UserError("run.step was called twice for one batch\nadd the losses, and call it once")
        if any(p.grad is not None for p in self.state.names):
            raise UserError("there are gradients before run.step, which calls backward itself\n"
                            "add the losses; set gradients from before the loop to None")
        if not self.called:
            raise UserError("run.step without run.model: other ranks would lack this gradient\n"
                            "call run.model(x) in place of the net")
        if self.rates != self._rates():
            raise UserError(RATES)

    @property
    def epoch_ended(self) -> bool:
        """Whether this epoch or the run (max_steps) is complete: now evaluate and report."""
        return self.state.epoch_over or self.state.finished

    def evaluate(self, judge: Callable[[Batch], dict[str, tuple[Any, Any]]]) -> dict[str, float]:
        """{"val_acc": sum / count, ...} of `judge(batch)` over `test_set`; call it on every rank.

        The ranks share the samples; each counts once, and no bit depends on the number of ranks.
        """
        state = self.state
        script = state.task
        state.task = copy.copy(script)
        state.task.function = lambda net, part, state: judge(Batch([(1, part)], [], 0))
        self.net.eval()
        try:
            with torch.no_grad():
                first = placed(self.data.test.fetch([0]), self.world.device, self.opts)
                state.task.learn(state.task(self.net, first, state))
            return evaluate(self.net, self.data.test, state, self.world)
        finally:
            state.task = script
            self.net.train()

    def report(self, **metrics: float) -> None:
        """Logs an evaluation; the best one keeps its checkpoint. Where ranks differ, rank 0's counts."""
        try:
            numbers = {"val_" + name.removeprefix("val_"): float(value) for name, value in metrics.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"run.report: {error}\nwanted: a number for each name") from error
        self.record(numbers)

    def _prepared(self, batch):
        self.called = False
        self.trained = False
        self.hollow = not batch.parts or batch.parts[0][1] is None  # all skipped (bad_samples)
        if self.hollow:  # two, for BatchNorm cannot train on one
            split = self.data.train
            batch = batch._replace(parts=[(0, split.fetch(2 * [getattr(split, "first", 0)]))])
        parts = [(n, placed(part, self.world.device, self.opts)) for n, part in batch.parts]
        self.batch = batch._replace(parts=parts)
        seed(self.world, self.opts.seed, "step", self.state.step, self.world.rank)  # dropout: never stored
        return self.batch

    def _rate(self, planned):
        """The optimizer's own rate, times the factor that `schedule` returns for a step."""
        if self.schedule is None:
            return self.opts.lr
        total = self.opts.epochs * -(-len(self.data.train) // self.opts.global_batch_size)
        return self.opts.lr * factor(self.schedule(planned, max(1, total)), "schedule", planned)

    def _rates(self):
        return [group["lr"] for group in self.optimizer.param_groups]


def _check(net, optimizer, given):
    """UserError for arguments with which a run cannot train, or cannot resume."""
    unknown = [name for name in given if name not in (*TAKEN, "global_batch_size", "epochs", "seed")]
    if unknown:
        raise UserError(f"Elastic: {unknown[0]} cannot take effect in a loop of your own"
                        f"{did_you_mean(unknown[0], TAKEN)}\n"
                        "the script has the net, the optimizer and the loss")
    wrapped = isinstance(net, DataParallel | DistributedDataParallel) or hasattr(net, "_orig_mod")
    if wrapped or not isinstance(net, nn.Module):
        raise UserError(f"Elastic: net is a {type(net).__name__}\n"
                        "give the bare nn.Module: it is wrapped here")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"Elastic: optimizer is a {type(optimizer).__name__}\n"
                        "wanted: one torch.optim.Optimizer; it may have several groups")
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if held - {*net.parameters()}:
        raise UserError("Elastic: the optimizer has weights that are not the net's\n"
                        "make it from net.parameters(), of the net that is given here")
    for name, p in net.named_parameters():
        if p.requires_grad and p not in held:
            raise UserError(f"Elastic: {name} trains, but is in no group of the optimizer\n"
                            "what another one does differs between ranks, and is in no checkpoint\n"
                            "add it to a group, or set its requires_grad to False")
    if any("initial_lr" in group for group in optimizer.param_groups):  # torch's schedulers set it
        raise UserError(RATES)
