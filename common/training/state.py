"""The state of a run between two steps: all that a checkpoint holds, and how a step changes it.

Not stored is what follows from (options, step): order, learning rate, draws of dropout and augmentation.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from common.data import Batch
from common.errors import UserError, blamed, say
from common.models import facts_of
from common.options import Options
from common.place import here
from common.sampler import seed
from common.training.optimizer import (
    check_groups,
    divide,
    groups_of,
    learning_rate,
    local,
    make_state,
    parts_of,
    unscale,
)
from common.training.tasks import Task, best_of, find_task
from common.training.unsaved import warn_of_unsaved
from common.world import World, fingerprint_of

Facts = dict[str, Any]  # ready for JSON


class Stages(Protocol):
    """What a state asks of a net whose parts are on several ranks or devices."""

    world: World
    judge: Callable[..., dict | None]

    def norm(self, gradients: list[Tensor]) -> Tensor: ...


class Averages(dict[str, Tensor]):
    """--ema-decay: the averaged weights by name; `own` are the net's weights while it has the averages."""

    own: dict[str, Tensor] = {}


class TrainState:
    """Net, optimizer, averages and counters; `lock` is held while a step changes them."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        opts: Options,
        samples: int,
        task: Task | None = None,
        schedule: Callable[[int, int], float] | None = None,
        stages: Stages | None = None,
    ):
        self.net = net
        self.optimizer = optimizer
        self.opts = opts
        self.task = task or find_task(opts)
        self.stages = stages
        self.rate = lambda planned: learning_rate(planned, opts, self.steps_per_epoch, schedule)
        self.step = 0
        self.epoch = 0
        self.position = 0  # samples of this epoch trained on so far
        self.samples = samples
        self.best: Facts = {"step": 0}
        best_of(opts, self.task)  # a wrong --best is told before the first step
        self.record = {}  # of the last logged step; saved, as rank 0 may die before it logs
        self.evaluated = {}  # the last evaluation, likewise
        self.scaler = torch.amp.GradScaler(enabled=opts.amp == "fp16")  # else it does nothing
        self.names = {p: name for name, p in net.named_parameters()}
        self.buffers = Buffers(net)
        self.ema = Averages()
        if opts.ema_decay:
            for p, name in self.names.items():
                kind = torch.promote_types(p.dtype, torch.float32)  # in 16 bits they would stand still
                self.ema[name] = p.detach().to(kind, copy=True)
        self.lock = threading.RLock()
        self.verdict: UserError | None = None  # why this state may neither be saved nor updated
        self.stepped = time.time()  # the end of the last step
        self.progress = 0  # of any kind: if no rank's number moves, the run hangs
        self.rate(0)  # a schedule of one's own that fails does so before the first step
        check_groups(optimizer, net)
        make_state(optimizer)
        warn_of_unsaved(net, parts_of(optimizer)[-1])
        gpu = next((p.device for p in self.names if p.is_cuda), None)
        self.updates = Updates(gpu)

    # ---- one step ----
    @contextmanager
    def changing(self) -> Iterator[None]:
        """Weights change only in this block: it waits for a save that copies them, and none begins in it."""
        updates = self.updates
        with self.lock:
            for image in updates.images.values():
                image.wait()
            before = self.counters()
            begun = updates.mark()
            yield
            if begun:
                updates.launched = before, begun, updates.mark()

    def average(self, totals: Tensor, batch: Batch, world: World) -> None:
        """After the backward, on every rank: the mean of all ranks, of buffers and of what a task counts."""
        self.buffers.average(world, len(batch.ids) / batch.size)
        self.count(totals[1], batch.size, world.all_sum)

    def count(self, counted: Tensor, size: int, add: Callable[[Tensor], Tensor]) -> None:
        """Ends the mean where a task counts other things than samples; `add` sums over all ranks."""
        if not self.task.ahead:
            total = add(counted.clone())
            divide(self.gradients, torch.where(total == 0, 1.0, total / size))

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer, and of the optimizers that it holds."""
        return groups_of(self.optimizer)

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.names if p.grad is not None]

    def finish_gradient(self, size: int) -> None:
        """Overflow check and clipping: ranks that hold parts of a net need each other up to here."""
        clip = self.opts.clip_grad_norm
        if (clip or self.stages) and self.scaler.is_enabled():
            unscale(self)
        if clip:
            norm_of = self.stages.norm if self.stages else torch.nn.utils.get_total_norm
            torch.nn.utils.clip_grads_with_norm_(self.names, clip, norm_of(self.gradients))
        fused = all(group.get("fused") for group in self.groups)
        if self.updates.gpu and (self.stages or not fused):
            # In stages a rescue needs this gradient whole. Optimizers that are not fused count on the CPU, or
            # read the GPU.
            torch.cuda.synchronize()
        self.updates.settle()  # without the lock, as a collective may hang
        self.updates.ready = size

    def update(self, size: int) -> None:
        """One optimizer step for a global batch of `size` samples; a save sees all of it or nothing."""
        if not self.updates.ready:
            self.finish_gradient(size)
        rate = self.rate(self.planned)
        for group in self.groups:
            group["lr"] = rate * group.get("scale", 1.0)
        self.buffers.check_weights()
        with self.changing():
            if self.verdict:
                raise self.verdict
            self.distrust()  # it stays so if the update fails
            seed(self.opts.seed, "update", self.step)  # an optimizer that draws does so alike on all ranks
            with blamed(f"optimizer {self.opts.optimizer}"):
                self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.ema:
                averages = list(self.ema.values())
                weights = [p.detach().to(a.dtype) for p, a in zip(self.names, averages, strict=True)]
                torch._foreach_lerp_(averages, weights, 1 - self.opts.ema_decay)
            self.buffers.take()
            self.step += 1
            self.position += size
            self.progress += 1
            self.updates.ready = 0
            self.stepped = time.time()
            self.verdict = None
        for p in self.names:  # the optimizer need not have all of them
            p.grad = None

    def note(self, totals: Tensor) -> Facts:
        """The record of the last step, from the totals of its batch; raises if the loss is not finite."""
        self.record = {
            "step": self.step,
            "epoch": self.epoch,
            **self.task.metrics(totals),
            "lr": self.rate(self.planned - 1),
        }
        loss, count = totals[:2].tolist()
        if not math.isfinite(loss + count):
            self.condemn(f"step {self.step}: the loss is {loss + count} (every rank saw the same)")
        return self.record

    def condemn(self, fact: str) -> NoReturn:
        """Ends the run with a UserError: this state is never saved, and a restart begins before it."""
        last = max((self.opts.run_dir / "checkpoints").glob("step-*"), default=None)
        resume = f" --resume {last}" if last else ""
        self.verdict = UserError(
            f"{fact}; nothing after the newest checkpoint is kept\n"
            f"lower --lr in another run: --run-dir NEW{resume} --lr X\n"
            "or clip there with --clip-grad-norm, or look at the samples with --audit",
            code=5,
        )
        raise self.verdict

    def distrust(self) -> None:
        """From now on this state is neither saved nor updated: a rescue and an update raise the verdict."""
        self.verdict = UserError("the weights are not those of one step", code=1)

    def record_evaluation(self, metrics: Facts) -> None:
        """Keeps this evaluation, and the best one: of equals the last, if its loss is lower."""
        name, sign = best_of(self.opts, self.task)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        value = numbers.get(name, math.nan)
        loss = numbers.get(f"val_{self.task.names[0]}", 0.0)
        best = self.best.get(name)  # --best may name another metric from now on
        better = best is None or (sign * value, -loss) > (sign * best, -(self.best["loss"] or 0.0))
        with self.lock:
            self.evaluated = {"step": self.step} | numbers
            if math.isfinite(value) and better:
                self.best = {name: value, "loss": loss, "step": self.step}

    def end_epoch(self) -> None:
        """Counts the epoch, unless --max-steps has ended it before its last sample."""
        if self.epoch_over:
            with self.lock:
                self.epoch += 1
                self.position = 0

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside this block the net has the averaged weights (--ema-decay), outside its own.

        A checkpoint has its own in any case: they are copied before the first weight changes.
        """
        if not self.ema:
            yield
            return
        self.updates.settle()  # without the lock, as a collective may hang
        own = {name: p.detach().clone() for p, name in self.names.items()}
        self._fill(self.ema, own)
        try:
            yield
        finally:
            self._fill(own, {})

    @torch.no_grad()
    def _fill(self, weights, own):
        """Puts these weights into the net; afterwards `own` is what a checkpoint has in their place."""
        with self.changing():
            self.ema.own = self.ema.own or own
            for p, name in self.names.items():
                p.copy_(weights[name])
            if self.updates.gpu:
                torch.cuda.synchronize()
            self.ema.own = own

    # ---- how far the run is ----
    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.opts.global_batch_size)

    @property
    def planned(self) -> int:
        """Steps up to this position; `step` is larger if an epoch has begun again."""
        left = -(-(self.samples - self.position) // self.opts.global_batch_size)
        return (self.epoch + 1) * self.steps_per_epoch - left

    @property
    def total_steps(self) -> int:
        whole = self.step - self.planned + self.opts.epochs * self.steps_per_epoch
        return min(whole, self.opts.max_steps or whole)

    @property
    def finished(self) -> bool:
        return (
            self.opts.eval_only
            or self.epoch >= self.opts.epochs
            or self.impatient
            or self.step >= self.total_steps
            and not self.epoch_over
        )

    @property
    def impatient(self) -> bool:
        """--patience: the evaluation of this step is one of so many that are no better than the best."""
        between = max(1, self.opts.eval_every) * self.steps_per_epoch
        worse = (self.step - self.best["step"]) // between
        at_epoch = self.position in (0, self.samples)  # a script may report in between, on one rank
        return 0 < self.opts.patience <= worse and self.evaluated_now and at_epoch

    @property
    def epoch_over(self) -> bool:
        return self.position >= self.samples

    @property
    def evaluation_due(self) -> bool:
        """At the end of an epoch or of the run, or --eval-only."""
        every = self.opts.eval_every
        at_epoch = self.epoch_over and every and (self.epoch + 1) % every == 0
        ended = bool(at_epoch or self.step >= self.total_steps)
        return self.opts.eval_only or ended and not self.evaluated_now

    @property
    def evaluated_now(self) -> bool:
        return self.evaluated.get("step") == self.step

    # ---- what a checkpoint holds: two sets of named tensors and one dict of facts ----
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """{"model": ..., "optimizer": ...}: live tensors by name, without `module.` or `_orig_mod.`."""
        parts = {}
        for part, named in self._named().items():
            parts[part] = {name: local(tensor) for name, tensor in named.items()}
        return parts

    def rows(self) -> dict[str, tuple[int, int]]:
        """{name: (first row, rows of the whole)} where this rank has only some (train_mp.py --shard)."""
        rows = {}
        for named in self._named().values():
            for name, tensor in named.items():
                if local(tensor) is not tensor:
                    mesh = tensor.device_mesh
                    count = len(tensor)
                    each = -(-count // mesh.size())
                    rows[name] = min(each * mesh.get_local_rank(), count), count
        return rows

    def _named(self):
        committed = self.buffers.committed
        model = {name: committed.get(name, tensor) for name, tensor in self.net.state_dict().items()}
        for name, p in self.net.named_parameters(remove_duplicate=False):
            model[name] = self.ema.own.get(self.names[p], model[name])
        optimizer = {f"{name}/ema": average for name, average in self.ema.items()}
        for i, part in enumerate(parts_of(self.optimizer)):
            for p, values in part.state.items():
                for key, value in values.items():
                    if torch.is_tensor(value):
                        optimizer[f"{self.names[p]}/{f'{i}.' if i else ''}{key}"] = value
        return {"model": model, "optimizer": optimizer}

    def facts(self) -> Facts:
        """The counters and records of the newest whole step, ready for JSON."""
        return self.counters() | {"scaler": self.scaler.state_dict() or None} | facts_of(self.net)

    def counters(self) -> Facts:
        """Those of the newest step whose update is made: on a GPU `step` may be ahead of it."""
        if self.updates.launched:
            before, begun, made = self.updates.launched
            try:
                if not begun.query():
                    return before
                made.synchronize()
            except RuntimeError:  # the GPU is broken: nobody knows what it has made
                return before
        return {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "order": [self.samples, self.opts.seed],
            "best": self.best,
            "record": self.record,
            "evaluated": self.evaluated,
        }

    @property
    def whole(self) -> int:
        """The newest step whose update is made."""
        return self.counters()["step"]

    def snapshot(self) -> tuple[dict[str, dict[str, Tensor]], Facts]:
        """(tensors, facts) of the newest whole step, for a rescue that holds the lock; a GPU's are copied."""
        while True:
            facts = self.facts()
            parts = {}
            for part, named in self.tensors().items():
                # with their strides: for other ones the GPU would have to load a kernel
                parts[part] = {name: tensor.cpu() for name, tensor in named.items()}
            if self.whole == facts["step"]:  # else an update has begun meanwhile
                return parts, facts

    @torch.no_grad()
    def load(self, facts: Facts) -> None:
        """Sets the counters to those in `facts`; the tensors are in place already.

        If samples now come in another order, the epoch begins again, unless it was complete.
        """
        self.buffers.restore()
        if facts["order"] != self.counters()["order"]:
            whole = facts["position"] >= facts["order"][0]
            facts = facts | {"position": self.samples if whole else 0}
        self.step = facts["step"]
        self.epoch = facts["epoch"]
        self.position = facts["position"]
        self.record = facts["record"]
        self.evaluated = facts["evaluated"]
        self.best = facts["best"]
        if facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])


class Buffers:
    """A net's buffers (running statistics, counters), which a forward changes without a gradient.

    `committed` holds those of the last whole step, by name: a checkpoint takes these. Replicas, and slices of
    --virtual-ranks, change floating-point buffers by the mean over all samples, counters by what one of them
    counts: right for running means and for numbers of forwards, as torch's own layers keep them. Changes are
    computed in double precision, which holds every counter below 2**53.
    """

    def __init__(self, net):
        self.net = net
        self.marks = None  # of the weights, until the first step of a life is made
        named = dict(net.named_buffers(remove_duplicate=False))
        self.committed = {path: b.detach().clone() for path, b in named.items()}
        self.places = []  # instead of tensors, because a module may replace a tensor
        self.sums = {}  # {name: its place in `views`} of buffers that may be no running means
        for path in named:
            owner, _, name = path.rpartition(".")
            module = net.get_submodule(owner)
            self.places.append((module._buffers, name))
            if not (isinstance(module, _NormBase) or type(module).__module__.startswith("torch.")):
                self.sums[path] = len(self.places) - 1
        numbers = _numbers(named.values())
        sizes = [b.numel() for b in numbers]
        self.numel = sum(sizes)
        self.kinds = {b.dtype for b in numbers}
        device = numbers[0].device if numbers else None
        self.flat = torch.empty(self.numel, dtype=torch.float64, device=device)
        self.views = [row.view(b.shape) for row, b in zip(self.flat.split(sizes), numbers, strict=True)]
        self.means = self._flat([torch.full_like(b, b.is_floating_point()) for b in numbers]).bool()

    def take(self):
        """The live buffers become those of the last whole step."""
        _copy(self.committed.values(), self._live())

    def restore(self):
        _copy(self._live(), self.committed.values())

    def renew(self):
        """Like `restore`, into new tensors: the backward of slices in flight may still need the old ones."""
        renewed = {}  # a buffer may have two names
        for (owner, name), committed in zip(self.places, self.committed.values(), strict=True):
            owner[name] = renewed.setdefault(owner[name], committed.clone())

    def note_weights(self):
        """Before the first forward of a life: `check_weights` compares."""
        if self.marks is None:
            self.marks = self._marks()

    def check_weights(self):
        """UserError if the first forward has changed a weight: a rescue would save it, ranks may differ."""
        if self.marks:
            now = self._marks()
            for name, mark in self.marks.items():
                if now[name] != mark:
                    raise UserError(
                        f"{name} is changed by a forward, or before it; only a step may change weights\n"
                        "make it a buffer; or change it in a hook (optimizer.register_step_post_hook), "
                        "or after run.step in a loop of your own"
                    )
            self.marks = {}

    def _marks(self):
        return {name: fingerprint_of([local(p)]) for name, p in self.net.named_parameters()}

    def average(self, world, weight):
        """All replicas' buffers change by the mean of their changes, weighted by samples."""
        if self.numel and world.replicas > 1:
            self.apply(world.sum_over_replicas(self.moves(weight, world.replica == world.replicas - 1)))

    @torch.no_grad()
    def moves(self, weight, counts, kind=torch.float64):
        """How a forward has changed the buffers, by its weight in the mean, as one flat tensor."""
        base = self._flat(self.committed.values()).clone()
        new = self._flat(self._live())
        # equal values did not change; infinity less infinity is nan; a change from infinity counts from 0
        moved = (new - base.masked_fill(base.isinf(), 0.0)).masked_fill_(new == base, 0.0).to(kind)
        return moved.mul_(torch.where(self.means, weight, float(counts)).to(kind))

    @torch.no_grad()
    def apply(self, moved):
        """Sets the live buffers to the committed ones plus their summed changes."""
        self.flat.copy_(moved)
        changed = [path for path, i in self.sums.items() if self.views[i].any()]
        self.sums = {}
        if changed and here().speaks:
            say(
                f"warning: a forward changes {', '.join(changed[:3])}: a buffer gets the mean of the ranks' "
                "changes, a counter one rank's\n"
                "         right for a running mean, not for a sum or a table: count these in a --task",
                sys.stderr,
            )
        base = self._flat(self.committed.values())
        base.masked_fill_(base.isinf() & (moved != 0), 0.0).add_(moved.to(base))
        _copy(_numbers(self._live()), self.views)

    def _live(self):
        live = []
        for (owner, name), (path, committed) in zip(self.places, self.committed.items(), strict=True):
            live.append(owner[name])
            if owner[name].shape != committed.shape:
                raise UserError(
                    f"buffer {path} is now {tuple(owner[name].shape)}, it was {tuple(committed.shape)}\n"
                    "a buffer keeps its shape: hold what follows the batch in a plain attribute"
                )
        return live

    def _flat(self, buffers):
        _copy(self.views, _numbers(buffers))
        return self.flat


def _copy(targets, sources):
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _numbers(buffers):
    """The buffers; a complex one as pairs of real numbers."""
    return [torch.view_as_real(b) if b.is_complex() else b for b in buffers]


class Updates:
    """The next update's gradient, and the last update, for which the program does not wait on a GPU.

    In the GPU's stream it stands behind the collectives of its gradient. If one of these hangs, it never
    runs; and while this process lives nothing aborts a collective. So an event comes before it and one after
    it: until the first of them has come, the weights are those of the step before.
    """

    def __init__(self, gpu):
        self.gpu = gpu  # None on CPUs, where an update is made at once
        self.side = torch.cuda.Stream(gpu) if gpu else None
        self.launched = None  # the last one: (facts before it, event before it, event after it)
        self.images = {}  # the store's buffers: a save may be copying into them
        self.ready = 0  # size of the batch whose gradient is ready

    def mark(self):
        return torch.cuda.current_stream().record_event() if self.gpu else None

    def settle(self):
        """Waits until the last update is made."""
        if self.launched:
            self.launched[2].synchronize()

    def aside(self):
        """For a rescue: a stream of its own; the usual one may stand behind a dead collective."""
        return torch.cuda.stream(self.side) if self.side else nullcontext()
