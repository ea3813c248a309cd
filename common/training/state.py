"""The state of a run between two steps: all that a checkpoint holds, and how a step changes it.

Not stored is what follows from (options, step): order, learning rate, draws of dropout and augmentation.
"""
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.models import facts_of_data, tied_names
from common.options import Options
from common.training.optimizer import finish_gradient, learning_rate, make_state
from common.training.tasks import Task, best_of, find_task
from common.training.unsaved import warn_of_unsaved
from common.world import World


class Phase(Enum):
    """What the tensors and counters of a TrainState are; only a WHOLE one is saved or updated."""

    WHOLE = "of one step"
    UPDATING = "in the middle of an update; they stay so if it fails"
    RESCUED = "of the step that a rescue has made in place of the loop"
    DISTRUSTED = "wrong: a loss that is no number, replicas that differ, a rank that computes wrongly"


class Stages(Protocol):
    """What a state asks of a net whose parts are on several ranks or devices."""

    world: World

    def norm(self, gradients: list[Tensor]) -> Tensor: ...


class Averages(dict[str, Tensor]):
    """--ema-decay: the averaged weights by name; `in_net` while they have changed places with the net's."""

    in_net = False


class TrainState:
    """Net, optimizer, averages and counters; `lock` is held while a step changes them."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, opts: Options, samples: int,
                 task: Task | None = None, rate: Callable[[int], float] | None = None,
                 stages: Stages | None = None):
        self.net = net
        self.optimizer = optimizer
        self.opts = opts
        self.task = task or find_task(opts)
        self.stages = stages
        self.rate = rate or (lambda planned: learning_rate(planned, opts, self.steps_per_epoch))
        self.step = 0
        self.epoch = 0
        self.position = 0  # samples of this epoch trained on so far, in this order:
        self.order = [samples, opts.seed]
        self.best: dict[str, Any] = {best_of(opts, self.task)[0]: None, "loss": None, "step": 0}
        self.record: dict[str, Any] = {}  # of the last logged step; saved, as rank 0 may die before it logs
        self.evaluated: dict[str, Any] = {}  # the last evaluation, likewise
        self.scaler = torch.amp.GradScaler() if opts.amp == "fp16" else None
        self.names = {p: name for name, p in net.named_parameters()}
        self.buffers = Buffers(net)
        self.ema = Averages()
        if opts.ema_decay:
            self.ema.update((name, p.detach().clone()) for p, name in self.names.items())
        self.lock = threading.RLock()
        self.phase = Phase.WHOLE
        self.verdict: UserError | None = None  # why it is distrusted
        self.progress = 0  # of any kind: a rank whose number stands still hangs
        self._set_rate()
        make_state(optimizer)
        warn_of_unsaved(net, optimizer)
        fused = all(group.get("fused") for group in optimizer.param_groups)
        gpu = next((p.device for p in self.names if p.is_cuda), None)
        # An optimizer that is not fused counts on the CPU, or reads the GPU; a part of a net is rescued with
        # a whole gradient.
        self.updates = Updates(gpu, waits=bool(stages) or not fused)

    def _set_rate(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.planned) * group.get("scale", 1.0)

    # ---- one step ----
    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Weights change only in this block: it waits for a save that copies them, and none begins in it."""
        with self.lock:
            for image in self.updates.images.values():
                image.wait()
            with self.updates.one(self._counters()):
                yield

    def count(self, counted: Tensor, size: int, add: Callable[[Tensor], Tensor]) -> None:
        """Notes by what the gradient must still be divided; call it on all ranks, over which `add` sums."""
        if not self.task.ahead:
            total = add(counted.clone())
            self.updates.divisor = torch.where(total == 0, 1.0, total / size)

    def finish_gradient(self, size: int) -> None:
        """Overflow check, division, clipping: ranks that hold parts of a net need each other up to here."""
        finish_gradient(self)
        self.updates.begin(size)

    def update(self, size: int) -> None:
        """One optimizer step for a global batch of `size` samples; a save sees all of it or nothing."""
        if not self.updates.ready:
            self.finish_gradient(size)
        self._set_rate()
        with self.changing():
            if self.phase is not Phase.WHOLE:
                raise self.verdict or RuntimeError(f"no step follows: the weights are {self.phase.value}")
            self.phase = Phase.UPDATING
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            if self.ema:
                weights = [p.detach() for p in self.names]
                torch._foreach_lerp_(list(self.ema.values()), weights, 1 - self.opts.ema_decay)
            self.buffers.take()
            self.step += 1
            self.position += size
            self.progress += 1
            self.updates.end()
            self.phase = Phase.WHOLE
        for p in self.names:  # not zero_grad: the optimizer need not have all weights
            p.grad = None

    def note(self, totals: Tensor) -> dict[str, Any]:
        """The record of the last step, from the totals of its batch; raises if the loss is not finite."""
        self.record = {"step": self.step, "epoch": self.epoch, **self.task.metrics(totals),
                       "lr": self.rate(self.planned - 1)}
        loss, count = totals[:2].tolist()
        if not math.isfinite(loss) or not math.isfinite(count):
            wrong = count if math.isfinite(loss) else loss
            self.condemn(f"step {self.step}: the loss is {wrong} (every rank saw the same)")
        return self.record

    def condemn(self, fact: str) -> NoReturn:
        """Ends the run with a UserError: this state is never saved, and a restart begins before it."""
        kept = max((self.opts.run_dir / "checkpoints").glob("step-*"), default=None)
        stands = f"nothing after {kept.name} is" if kept else "nothing is"
        resume = f" --resume {kept}" if kept else ""
        verdict = UserError(
            f"{fact}, {stands} kept\nlower --lr in another run: --run-dir NEW{resume} --lr X\n"
            "or clip there with --clip-grad-norm, or look at the samples with --audit", code=5)
        self.distrust(verdict)
        raise verdict

    def distrust(self, verdict: UserError | None = None) -> None:
        """From now on this state is neither saved nor updated."""
        self.verdict = verdict
        self.phase = Phase.DISTRUSTED

    def rescued(self) -> None:
        """A rescue has made the step that the loop was about to make."""
        self.phase = Phase.RESCUED

    @property
    def savable(self) -> bool:
        return self.phase is Phase.WHOLE

    @property
    def stepped(self) -> float:
        """The time at which the last step ended."""
        return self.updates.made_at

    def record_evaluation(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Keeps this evaluation, and the best one: of equals the last, if its loss is lower."""
        name, sign = best_of(self.opts, self.task)
        with self.lock:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
            self.evaluated = {"step": self.step} | numbers
            value, best = numbers.get(name, math.nan), self.best[name]
            loss = numbers.get(f"val_{self.task.names[0]}")
            lower = loss is not None and self.best["loss"] is not None and loss < self.best["loss"]
            better = best is None or (value - best) * sign > 0 or value == best and lower
            if math.isfinite(value) and better:
                self.best = {name: value, "loss": loss, "step": self.step}
        return metrics

    def end_epoch(self) -> None:
        """Counts the epoch, unless --max-steps has ended it before its last sample."""
        if self.epoch_over:
            with self.lock:
                self.epoch += 1
                self.position = 0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside this block the net has the averaged weights (--ema-decay), outside its own."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self):
        if not self.ema:
            return
        self.updates.settle()
        with self.lock:
            with self.changing():
                for p, name in self.names.items():
                    weight = p.clone()
                    p.copy_(self.ema[name])
                    self.ema[name].copy_(weight)
                self.ema.in_net = not self.ema.in_net
            self.updates.settle()  # under the lock: after the other one, nothing in it can hang

    # ---- how far the run is ----
    @property
    def samples(self) -> int:
        return self.order[0]

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
        every = self.opts.eval_every
        at_epoch = self.epoch_over and every and (self.epoch + 1) % every == 0
        return self.evaluated.get("step") != self.step and bool(at_epoch or self.step >= self.total_steps)

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

    # ---- what a checkpoint holds: two sets of named tensors and one dict of facts ----
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """{"model": ..., "optimizer": ...}: live tensors by name, without `module.` or `_orig_mod.`."""
        return {part: {n: t.to_local() if hasattr(t, "to_local") else t for n, t in named.items()}
                for part, named in self._named().items()}

    def rows(self) -> dict[str, tuple[int, int]]:
        """{name: (first row, rows of the whole)} where this rank has only some (train_mp.py --shard)."""
        shards = {name: tensor for named in self._named().values() for name, tensor in named.items()
                  if hasattr(tensor, "to_local")}
        each = {n: -(-len(t) // t.device_mesh.size()) for n, t in shards.items()}
        return {n: (min(each[n] * t.device_mesh.get_local_rank(), len(t)), len(t)) for n, t in shards.items()}

    def _named(self):
        elsewhere = dict(self.buffers.committed)
        averages: dict[str, Tensor] = self.ema
        if self.ema.in_net:
            averages = {name: p.detach() for p, name in self.names.items()}
            for name, p in self.net.named_parameters(remove_duplicate=False):
                elsewhere[name] = self.ema[self.names[p]]
        model = {name: elsewhere.get(name, tensor) for name, tensor in self.net.state_dict().items()}
        optimizer = {f"{self.names[p]}/{key}": value for p, values in self.optimizer.state.items()
                     for key, value in values.items() if torch.is_tensor(value)}
        return {"model": model, "optimizer": optimizer | {f"{n}/ema": t for n, t in averages.items()}}

    def facts(self) -> dict[str, Any]:
        """The counters and records of the newest whole step, ready for JSON."""
        waiting = self.updates.waiting()
        counters = waiting[0] if waiting else self._counters()
        return counters | {"scaler": self.scaler.state_dict() if self.scaler else None,
                           "tied": tied_names(self.net), "data": facts_of_data(self.net)}

    def _counters(self):
        return {"step": self.step, "epoch": self.epoch, "position": self.position, "order": self.order,
                "best": self.best, "record": self.record, "judged": self.evaluated}

    def snapshot(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """(tensors, facts) of the newest whole step, for a rescue that holds the lock; a GPU's are copied."""
        while True:
            waiting, facts = self.updates.waiting(), self.facts()
            # cpu() keeps their strides: for other ones the GPU would have to load a kernel
            copies = {part: {n: t.cpu() for n, t in named.items()} for part, named in self.tensors().items()}
            if waiting is None or not waiting[1].query():  # else that update has begun meanwhile
                return copies, facts

    @torch.no_grad()
    def load(self, facts: dict[str, Any]) -> None:
        """Sets the counters to those in `facts`; the tensors are in place already.

        If samples now come in another order, the epoch begins again, unless it was complete.
        """
        self.buffers.restore()
        self.step = facts["step"]
        self.epoch = facts["epoch"]
        self.position = facts["position"]
        samples = facts["order"][0]
        if facts["order"] != self.order:
            self.position = self.samples if self.position >= samples else 0
        self.record = facts["record"]
        self.evaluated = facts["judged"]
        if self.best.keys() == facts["best"].keys():  # --best may name another metric from now on
            self.best = facts["best"]
        if self.scaler and facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])


class Buffers:
    """A net's buffers (running statistics, counters), which a forward changes without a gradient.

    `committed` holds those of the last whole step, by name: a checkpoint takes these. Replicas, and slices of
    --virtual-ranks, change floating-point buffers by the mean over all samples, counters by what one of them
    counts. Changes are computed in double precision, which holds every counter below 2**53.
    """

    def __init__(self, net: nn.Module):
        self.committed = {name: b.detach().clone() for name, b in net.named_buffers()}
        # Places instead of tensors, because a module may replace a tensor; found once, as it takes time.
        places: dict[int, list] = {id(b): [] for b in net.buffers()}
        for module in net.modules():
            for name, b in module._buffers.items():
                if b is not None:
                    places[id(b)].append((module._buffers, name))
        self.places = list(places.values())
        numbers = _numbers(self.committed.values())
        sizes = [b.numel() for b in numbers]
        self.numel = sum(sizes)
        device = numbers[0].device if numbers else None
        self.flat = torch.empty(self.numel, dtype=torch.float64, device=device)
        self.views = [piece.view(b.shape) for piece, b in zip(self.flat.split(sizes), numbers, strict=True)]
        self.means = torch.empty(self.numel, dtype=torch.bool, device=device)
        for piece, b in zip(self.means.split(sizes), numbers, strict=True):
            piece.fill_(b.is_floating_point())

    def take(self) -> None:
        """The live buffers become those of the last whole step."""
        _copy(self.committed.values(), self._live())

    def restore(self) -> None:
        _copy(self._live(), self.committed.values())

    def renew(self) -> None:
        """Like `restore`, into new tensors: the backward of slices in flight may still need the old ones."""
        for places, committed in zip(self.places, self.committed.values(), strict=True):
            buffer = committed.clone()
            for owner, name in places:
                owner[name] = buffer

    def average(self, world: World, weight: float) -> None:
        """All replicas' buffers change by the mean of their changes, weighted by samples."""
        if self.numel and world.replicas > 1:
            self.apply(world.sum_over_replicas(self.moves(weight, world.replica == 0)))

    @torch.no_grad()
    def moves(self, weight: float, counts: bool, kind: torch.dtype = torch.float64) -> Tensor:
        """How a forward has changed the buffers, by its weight in the mean, as one flat tensor."""
        base = self._flat(self.committed.values()).clone()
        new = self._flat(self._live())
        # equal values did not change; of two infinities the difference would be nan
        moved = (new - base).masked_fill_(new == base, 0.0).to(kind)
        return moved.mul_(torch.where(self.means, weight, float(counts)).to(kind))

    @torch.no_grad()
    def apply(self, moved: Tensor) -> None:
        """Sets the live buffers to the committed ones plus their summed changes."""
        self._flat(self.committed.values()).add_(moved.to(self.flat))
        _copy(_numbers(self._live()), self.views)

    def _live(self):
        return [owner[name] for (owner, name), *_ in self.places]

    def _flat(self, buffers):
        _copy(self.views, _numbers(buffers))
        return self.flat


def _copy(targets, sources):
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _numbers(buffers):
    """The buffers; a complex one as pairs of real numbers."""
    return [torch.view_as_real(b) if b.is_complex() else b for b in buffers]


AHEAD = 2  # updates that the program may launch before the GPU has made them


class Updates:
    """The next update's gradient, and those that a GPU has still to make: the program does not wait for them.

    An update stands in the GPU's stream behind the collectives of its gradient. If one of these hangs, the
    update never runs; and while this process lives nothing aborts a collective. Each leaves an event before
    and after it: the weights are those before the first one that has not begun, once the others have ended.
    """

    def __init__(self, gpu: torch.device | None, waits: bool = False):
        self.gpu = gpu  # None on CPUs, where an update is made at once
        self.waits = waits  # for the GPU, before each update
        self.ahead = AHEAD if gpu else 0
        self.side = torch.cuda.Stream(gpu) if gpu else None
        self.launched: list[tuple] = []  # (facts before it, event before it, event after it) of each
        self.images: dict[str, Any] = {}  # the store's buffers: a save may be copying into them
        self.ready = 0  # size of the batch whose gradient is ready
        self.divisor: Tensor | None = None  # what that gradient must still be divided by
        self.made_at = time.time()  # the end of the last one

    def begin(self, size: int) -> None:
        """The gradient of a batch is whole; waits, without the lock, as a collective may hang."""
        if self.gpu and self.waits:
            torch.cuda.synchronize()
        self.settle(self.ahead)
        self.ready = size
        self.divisor = None

    def end(self) -> None:
        self.ready = 0
        self.made_at = time.time()

    @contextlib.contextmanager
    def one(self, facts: dict[str, Any]) -> Iterator[None]:
        """Around the kernels of an update; `facts` are those of the state before it."""
        if self.gpu is None:
            yield
            return
        stream = torch.cuda.current_stream()
        begun = stream.record_event()
        yield
        self.launched.append((facts, begun, stream.record_event()))

    def waiting(self) -> tuple[dict[str, Any], Any] | None:
        """(facts, event) from before the first update that has not begun; waits for those that have."""
        for facts, begun, ended in list(self.launched):
            if not begun.query():
                return facts, begun
            ended.synchronize()
        return None

    def settle(self, left: int = 0) -> None:
        """Waits until all but `left` are made."""
        while len(self.launched) > left:
            self.launched[0][2].synchronize()
            del self.launched[0]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """For a rescue: a stream of its own; the usual one may stand behind a dead collective."""
        if self.gpu is None:
            yield
            return
        with torch.cuda.device(self.gpu), torch.cuda.stream(self.side):
            yield
