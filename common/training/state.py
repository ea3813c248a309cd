"""The state of a run between two steps: all that a checkpoint holds, and the only place where counters move.

Not stored is what follows from (options, step): order, learning rate, draws of dropout and augmentation.
"""
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from common.errors import UserError
from common.models import tied_names
from common.options import Options
from common.training.buffers import Buffers
from common.training.optimizer import finish_gradient, learning_rate, make_state
from common.training.task import Task, best_of, find_task
from common.training.unsaved import Unsaved
from common.training.updates import OwnTime, Updates


class TrainState:
    """Net, optimizer, averages and counters; `lock` is held while a step changes them."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, opts: Options, samples: int,
                 norm: Callable = torch.nn.utils.get_total_norm, all_sum: Callable | None = None,
                 order: str = "", task: Task | None = None, rate: Callable | None = None):
        self.task = task or find_task(opts)
        self.judge, self.sign = best_of(opts, self.task)  # the metric whose best evaluation is kept
        self.net, self.optimizer, self.opts, self.samples = net, optimizer, opts, samples
        self.steps_per_epoch = -(-samples // opts.global_batch_size)
        self.rate = rate or (lambda planned: learning_rate(planned, opts, self.steps_per_epoch))
        self.step = self.epoch = self.position = 0  # position: samples of this epoch trained on so far,
        self.order = [samples, opts.seed, order] if order else [samples, opts.seed]  # in this order
        self.best: dict[str, Any] = {self.judge: None, "step": 0}
        self.record: dict[str, Any] = {}  # of the last logged step; saved, as rank 0 may die before it logs
        self.evaluated: dict[str, Any] = {}  # the last evaluation, likewise
        self.scaler = torch.amp.GradScaler() if opts.amp == "fp16" else None
        self.stepped, self.saving = time.time(), False  # the last step's end; whether a save waits
        self.lock, self.half_updated, self.progress = threading.RLock(), False, 0  # progress of any kind
        self.images: dict[str, Any] = {}  # the store's buffers: a save may be copying into them
        self.verdict: UserError | None = None  # why this state may never be saved
        self.norm, self.all_sum = norm, all_sum  # over all ranks, where each has a part of the net
        self.ready, self.divisor = 0, None  # size of the batch whose gradient is ready; what to divide it by
        self.names = {p: name for name, p in net.named_parameters()}
        self.tied = tied_names(net)  # for --export
        self.ema = {n: p.detach().clone() for n, p in net.named_parameters()} if opts.ema_decay else {}
        self.own_weights: dict[str, torch.Tensor] = {}  # the net's own, while it holds the averaged ones
        self.buffers, self.unsaved = Buffers(net), Unsaved(net)
        self._set_rate()
        make_state(optimizer)
        gpu = next((p.device for p in self.names if p.is_cuda), None)
        self.updates, self.own = Updates(gpu), OwnTime(gpu)
        # Before its update a rank waits for its GPU if it holds a part of the net, whose rescue needs a whole
        # gradient, or if the optimizer is not fused: such a one counts on the CPU, or reads the GPU.
        self.waits = bool(all_sum) or not all(group.get("fused") for group in optimizer.param_groups)

    @property
    def planned(self) -> int:
        """Steps up to this position; `step` is larger if an epoch has begun again."""
        left = -(-(self.samples - self.position) // self.opts.global_batch_size)
        return (self.epoch + 1) * self.steps_per_epoch - left

    def _set_rate(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.planned) * group.get("scale", 1.0)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Weights change only in this block: it waits for a save that copies them, and none begins in it."""
        with self.lock:
            for image in self.images.values():
                image.wait()
            with self.updates.one(self._counters):
                yield

    def count(self, own: torch.Tensor, size: int, add: Callable) -> None:
        """Notes the divisor that the gradient still lacks; call it on all ranks, over which `add` sums."""
        if not self.task.ahead:
            total = add(own.clone())
            self.divisor = torch.where(total == 0, 1.0, total / size)

    def finish_gradient(self, size: int) -> None:
        """Overflow check, division, clipping: ranks that hold parts of a net need each other up to here."""
        finish_gradient(self)
        if self.updates.gpu and self.waits:
            torch.cuda.synchronize()
        self.updates.settle(self.updates.ahead)
        self.ready = size

    def update(self, size: int) -> None:
        """One optimizer step for a global batch of `size` samples; a save sees all of it or nothing."""
        if not self.ready:
            self.finish_gradient(size)
        self._set_rate()
        with self.changing():
            if self.half_updated:
                raise self.verdict or RuntimeError("no step follows: the rescue has made this one already")
            self.half_updated = True  # stays True if the body raises: half a step is never saved
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            if self.ema:
                own = [p.detach() for p in self.names]
                torch._foreach_lerp_(list(self.ema.values()), own, 1 - self.opts.ema_decay)
            self.buffers.take()
            self.step += 1
            self.position += size
            self.progress += 1
            self.stepped = time.time()
            self.ready, self.half_updated, self.divisor = 0, False, None
            vars(self.optimizer).pop("grad_scale", None)
        for p in self.names:  # not zero_grad: the optimizer need not have all weights
            p.grad = None
        self.unsaved.look()

    def note(self, totals: torch.Tensor) -> dict[str, Any]:
        """The record of the last step, from the totals of its batch; raises if the loss is not finite."""
        self.record = {"step": self.step, "epoch": self.epoch, **self.task.metrics(totals),
                       "lr": self.rate(self.planned - 1)}
        if not math.isfinite(loss := (totals[0] + 0 * totals[1]).item()):
            self.condemn(f"step {self.step}: the loss is {loss} (every rank saw the same)")
        return self.record

    def condemn(self, fact: str) -> NoReturn:
        """Ends the run with a UserError: this state is never saved, and a restart begins before it."""
        kept = max((self.opts.run_dir / "checkpoints").glob("step-*"), default=None)
        what, where = (f"nothing after {kept.name} is", f" --resume {kept}") if kept else ("nothing is", "")
        self.verdict = UserError(
            f"{fact}, {what} kept\nlower --lr in another run: --run-dir NEW{where} --lr X\n"
            "or clip there with --clip-grad-norm, or look at the samples with --audit", code=5)
        self.half_updated = True
        raise self.verdict

    def record_evaluation(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Keeps this evaluation, and the best one; returns `metrics`."""
        with self.lock:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
            self.evaluated = {"step": self.step} | numbers
            old, new = self.best[self.judge], numbers.get(self.judge, math.nan)
            if math.isfinite(new) and (old is None or (new - old) * self.sign > 0):
                self.best = {self.judge: new, "step": self.step}
        return metrics

    def end_epoch(self) -> None:
        """Counts the epoch, unless --max-steps has ended it before its last sample."""
        if self.epoch_over:
            with self.lock:
                self.epoch, self.position = self.epoch + 1, 0

    # ---- how far the run is -----------------------------------------------------------------------
    @property
    def total_steps(self) -> int:
        whole = self.step - self.planned + self.opts.epochs * self.steps_per_epoch
        return min(whole, self.opts.max_steps or whole)

    @property
    def finished(self) -> bool:
        return (self.opts.eval_only or self.epoch >= self.opts.epochs or self.impatient
                or self.step >= self.total_steps and not self.epoch_over)

    @property
    def impatient(self) -> bool:
        """--patience: the evaluation of this step is one of so many that are no better than the best."""
        between = max(1, self.opts.eval_every) * self.steps_per_epoch
        worse = (self.step - self.best["step"]) // between
        return 0 < self.opts.patience <= worse and self.evaluated.get("step") == self.step

    @property
    def epoch_over(self) -> bool:
        return self.position >= self.samples

    @property
    def evaluation_due(self) -> bool:
        at_epoch = self.epoch_over and (self.epoch + 1) % (self.opts.eval_every or math.inf) == 0
        return self.evaluated.get("step") != self.step and (self.step >= self.total_steps or at_epoch)

    @property
    def evaluation_missing(self) -> bool:
        """--eval-only, or the last step of the run is saved without its evaluation."""
        ended = self.finished and self.step == self.total_steps
        return self.opts.eval_only or ended and self.evaluated.get("step") != self.step

    @property
    def whole(self) -> int:
        """The newest step whose update is made: on a GPU `step` may be ahead of it."""
        waiting = self.updates.waiting()
        return waiting[0]["step"] if waiting else self.step

    # ---- what a checkpoint holds: two sets of named tensors and one dict of facts -----------------
    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """{"model": ..., "optimizer": ...}: live tensors by name, without `module.` or `_orig_mod.`."""
        return {part: {n: t.to_local() if hasattr(t, "to_local") else t for n, t in named.items()}
                for part, named in self._named().items()}

    def rows(self) -> dict[str, tuple[int, int]]:
        """{name: (first row, rows of the whole)} where this rank has only some (train_mp.py --shard)."""
        found = {n: t for named in self._named().values() for n, t in named.items() if hasattr(t, "to_local")}
        each = {n: -(-len(t) // t.device_mesh.size()) for n, t in found.items()}
        return {n: (min(each[n] * t.device_mesh.get_local_rank(), len(t)), len(t)) for n, t in found.items()}

    def _named(self):
        held = self.buffers.committed | self.own_weights
        model = {n: held.get(n, t) for n, t in self.net.state_dict().items()}
        optimizer = {f"{self.names[p]}/{key}": value for p, values in self.optimizer.state.items()
                     for key, value in values.items() if torch.is_tensor(value)}
        optimizer |= {f"{n}/ema": t for n, t in self.ema.items()}
        return {"model": model, "optimizer": optimizer}

    def facts(self) -> dict[str, Any]:
        """The counters and records of the newest whole step, ready for JSON."""
        waiting = self.updates.waiting()
        counters = waiting[0] if waiting else self._counters()
        return counters | {"scaler": self.scaler.state_dict() if self.scaler else None}

    def _counters(self):
        return {"step": self.step, "epoch": self.epoch, "position": self.position, "order": self.order,
                "tied": self.tied, "best": self.best, "record": self.record, "judged": self.evaluated}

    def snapshot(self) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
        """(tensors, facts) of the newest whole step, for a rescue that holds the lock; a GPU's are copied."""
        while True:
            waiting, facts = self.updates.waiting(), self.facts()
            # cpu() keeps their strides: for other ones the GPU would have to load a kernel
            found = {part: {n: t.cpu() for n, t in named.items()} for part, named in self.tensors().items()}
            if waiting is None or not waiting[1].query():  # else that update has begun meanwhile
                return found, facts

    @torch.no_grad()
    def load(self, facts: dict[str, Any]) -> None:
        """Sets the counters to those in `facts`; the tensors are in place already.

        If samples now come in another order, the epoch begins again, unless it was complete.
        """
        self.buffers.restore()
        self.step, self.epoch, self.position = facts["step"], facts["epoch"], facts["position"]
        if (order := facts.get("order", self.order)) != self.order:
            self.position = self.samples if len(order) > 1 and self.position >= order[0] else 0
        self.record, self.evaluated = facts["record"], facts.get("judged", {})
        if self.best.keys() == facts["best"].keys():  # --best may name another metric from now on
            self.best = facts["best"]
        if self.scaler and facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])
