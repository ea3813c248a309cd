"""The state of a run between two steps: all that a checkpoint holds, and how a step changes it.

From a gradient to a checkpoint: `update` waits for what the backward (step.py) has launched, clips, and
changes weights, averages, buffers and progress under the lock, all of it or nothing. Under the same lock a
save, or a survivor's rescue, copies what `tensors` and `facts` return.

A collective may hang. The loop waits for it without the lock, and asks: behind a call that blocks in a GPU's
driver the rescue's calls would wait. So an update has nothing before it that may hang, and a rescue waits for
one event, `updated`, behind the last update.

Not stored is what follows from (options, step): order, learning rate, draws of dropout and augmentation.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from common.checkpoint import checkpoints, facts_of
from common.device import devices_of, mark, wait_by_polling
from common.errors import UserError, blamed
from common.options import Options, extra
from common.sampler import seed
from common.sealed import Facts
from common.training.modes import Modes, Snapshot
from common.training.optimizer import check_groups, groups_of, named_state, take_state, turns_of, weights_of
from common.training.progress import Progress
from common.training.statistics import Statistics
from common.training.tasks import OWN, Task, best_of
from common.world import World, has_peers


class Stateful(Protocol):
    """What a loop may keep: a scheduler, an average of the net, a few lines of one's own."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class TrainState:
    """Net, optimizer, averages and progress; `lock` is held while a step changes them."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        opts: Options,
        samples: int,
        task: Task,
        schedule: Callable[[int, int], float] | None = None,
        memory: dict[str, Stateful] | None = None,
        shuffled: bool = True,
    ):
        self.net = net
        self.optimizer = optimizer
        self.opts = opts
        self.task = task
        self.progress = Progress(opts, samples, len(turns_of(optimizer)), shuffled)
        if self.task.names:
            best_of(opts, self.task)  # a wrong --best is an error before the first step
        self.names = {p: name for name, p in net.named_parameters()}
        self.devices = devices_of(net)
        self.device = self.devices[0]
        kind = extra("fp16") if opts.amp == "fp16" else torch.amp.GradScaler
        self.scaler = kind(self.device.type, enabled=opts.amp == "fp16")
        self.statistics = Statistics(net)
        self.averages = extra("ema_decay")(self, opts.ema_decay) if opts.ema_decay else None
        self.own: dict[nn.Parameter, Tensor] = {}  # while an evaluation lends the net others: its own weights
        Modes(net).set()
        self.modes = Modes(net)  # with which an epoch begins
        self.lock = threading.RLock()
        self.updated: list[torch.Event | None] = []  # of each device, after all that has changed weights
        self.invalid: UserError | None = None  # why this state may neither be saved nor updated
        self.heartbeat = 0  # moves with work of any kind: if that of no rank does, the run hangs
        self.ends_epoch = False  # from the last step of an epoch on
        self.is_open = False  # the last step: the loop may change after it what belongs to it
        self.schedule = schedule
        self.scheduled = bool(schedule or opts.lr_schedule != "constant" or opts.warmup_epochs)
        check_groups(optimizer, net)
        if self.scheduled:
            self.set_rate()  # an optimizer may look at it in its first step alone
        self.memory = None  # torch's own optimizers keep tensors of weights, and nothing else
        if memory or opts.task == OWN or ".py" in opts.optimizer:
            self.memory = extra("memory")(optimizer, self.names, self.scheduled, memory or {})
        self.note_versions()

    # ---- one step ----
    @property
    def weights(self) -> list[nn.Parameter]:
        """Return those that train in this step."""
        return weights_of(turns_of(self.optimizer)[self.progress.turn])

    def marks(self) -> list[torch.Event | None]:
        return [*map(mark, self.devices)]

    def wait_for_gpu(self) -> None:
        """Wait for all that the GPU was given, where a peer may die; call it without the lock."""
        if has_peers():
            for event in self.marks():
                wait_by_polling(event)

    def wait_for_update(self) -> None:
        """Wait for all that has changed weights: for a rescue, which holds the lock."""
        for event in self.updated:
            wait_by_polling(event)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock: what a checkpoint holds changes only in such a block, and in `update`."""
        self.wait_for_gpu()
        with self.lock:
            yield
            self.updated = self.marks()

    def end_step(self, world: World, weight: float) -> None:
        """Take what the loop has changed after a step: it belongs to the step."""
        try:
            self.statistics.average(world, weight)
        finally:  # also if a peer has died behind its update
            with self.lock:
                self._commit()
                self.updated = self.marks()

    def end_epoch(self) -> None:
        """Take what the loop has done at the end of an epoch, and count it: both or none."""
        with self.changing():
            self._commit()
            self.progress.end_epoch()
            self.ends_epoch = False

    def _commit(self):
        self.statistics.commit()
        if self.memory:
            self.memory.commit()
        self.note_versions()

    def set_rate(self) -> None:
        """Set the learning rate that the schedule has for this step, in all groups."""
        progress = self.progress
        self.rate = extra("schedule")(progress.planned, self.opts, progress.steps_per_epoch, self.schedule)
        for group in groups_of(self.optimizer):
            group["lr"] = self.rate * group.get("scale", 1.0)

    def update(self, size: int) -> None:
        """Make one optimizer step for a global batch of `size` samples; a save sees all of it or nothing."""
        self.finish_gradient()
        if self.scheduled:  # else the loop may change it
            self.set_rate()
        with self.lock:  # not `changing`: a rescue would wait for a dead collective
            if self.invalid:
                raise self.invalid
            try:
                self._update(size)
            except BaseException:
                self.invalidate(UserError("the weights are not those of one step", code=1))
                raise
            self.updated = self.marks()
        for p in self.names:  # the optimizer need not have all of them
            p.grad = None

    def finish_gradient(self) -> None:
        """Leave the gradient to the weights of this turn; check for overflow, and clip."""
        self.wait_for_gpu()
        if self.progress.turns > 1:
            self.optimizer.begin(self.progress.turn)
        if self.scaler.is_enabled():
            self.scaler.unscale(self.optimizer, self.device)
        if self.opts.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.names, self.opts.clip_grad_norm)

    def _update(self, size):
        self.refuse_moved_weights()
        seed(self.opts.seed, "update", self.progress.step)  # if the optimizer draws, all ranks draw alike
        with blamed(f"optimizer {self.opts.optimizer}"):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.averages:
            self.averages.update()
        self.statistics.commit()
        if self.memory:
            self.memory.commit("settings")  # of the optimizer: the loop has not come back
        self.progress.count(size)
        self.is_open = True
        self.note_versions()
        self.heartbeat += 1

    def invalidate(self, error: UserError) -> UserError:
        """Refuse to save or update this state from now on: a rescue and an update raise this error."""
        self.invalid = error
        return error

    def diverged(self, fact: str) -> UserError:
        """Invalidate a state that is not finite: a restart begins before it."""
        resume = f" --resume {self.opts.run_dir}" if checkpoints(self.opts.run_dir) else ""
        return self.invalidate(
            UserError(
                f"{fact}; nothing after the newest checkpoint is kept\n"
                f"lower --lr in another run: --run-dir NEW{resume} --lr X\n"
                "or clip there with --clip-grad-norm, or look at the samples with --audit",
                code=5,
            )
        )

    def note(self, totals: Tensor) -> Facts:
        """Return the record of the last step, from its totals; raises if the loss is not finite."""
        progress = self.progress
        rate = self.rate if self.scheduled else groups_of(self.optimizer)[0]["lr"]
        place = {"step": progress.step, "epoch": progress.epoch}
        progress.record = place | self.task.metrics(totals) | {"lr": rate}
        loss, count = totals[:2].tolist()
        if not math.isfinite(loss + count):
            raise self.diverged(f"step {progress.step}: the loss is {loss + count} (every rank saw the same)")
        return progress.record

    # ---- evaluations ----
    def record_evaluation(self, metrics: Facts) -> None:
        """Keep this evaluation, and the best one."""
        metric, sign = best_of(self.opts, self.task)
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        with self.lock:
            self.progress.evaluate(numbers, metric, sign, f"val_{self.task.names[0]}")

    def modes_now(self) -> Modes:
        """Return the modes that the loop has set; those before, if the whole net evaluates."""
        return Modes(self.net) if self.net.training else self.modes

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Lend the net its averages, in evaluation mode; nothing of it is left, no checkpoint has it."""
        modes = self.modes_now()
        with self.changing():
            before = Snapshot(self.net, self.names if self.averages else ())
            self.own = before.weights
            if self.averages:
                self.averages.lend()
            self.net.eval()
            merged = {} if self.averages else before.moved()
        try:
            yield
        finally:
            with self.changing():
                modes.restore()
                self.own = {}
                before.put_back(self.names, merged)
            if before.weights:  # counted as changes, though they were undone
                self.note_versions()

    # ---- between two steps: torch counts each change of a tensor in place ----
    def note_versions(self) -> None:
        """Note what the weights are: they change in the next step alone, or at the end of an epoch."""
        self.versions = [p._version for p in self.names]

    @property
    def changed_weights(self) -> list[str]:
        """Return the names of the weights that something has changed since."""
        pairs = zip(self.names.items(), self.versions, strict=True)
        return [name for (p, name), known in pairs if p._version != known]

    def refuse_moved_weights(self) -> None:
        """Raise a UserError if a forward, or what is before it, has changed weights: ranks may differ."""
        if self.changed_weights:
            raise UserError(
                f"{self.changed_weights[0]} is changed by a forward, or before it; "
                "only a step may change weights\n"
                "make it a buffer; or change it in a hook (optimizer.register_step_post_hook), "
                "or after run.step in a loop of your own"
            )

    # ---- what a checkpoint holds: two sets of named tensors and one dict of facts ----
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return {"model": ..., "optimizer": ...}: live tensors by name, without `module.`, `_orig_mod.`."""
        if self.ends_epoch and self.changed_weights:
            raise UserError(
                "the loop has changed weights at the end of an epoch: a life that begins there would again\n"
                "the checkpoint before it stands",
                code=1,
            )
        model = self.net.state_dict()
        model |= {name: b for name, b in self.statistics.committed.items() if name in model}
        model |= {
            name: self.own[p]
            for name, p in self.net.named_parameters(remove_duplicate=False)
            if p in self.own
        }
        optimizer = self.averages.named() if self.averages else {}
        optimizer |= named_state(self.optimizer, self.names)
        if self.memory:
            optimizer |= self.memory.tensors()
        return {"model": model, "optimizer": optimizer}

    def facts(self) -> Facts:
        """Return progress and records, ready for JSON."""
        return self.progress.facts() | {"scaler": self.scaler.state_dict() or None} | facts_of(self.net)

    @torch.no_grad()
    def load(self, facts: Facts, remembered: dict[str, Tensor]) -> None:
        """Take the facts of a checkpoint, and what it has beside the net, whose tensors are in place."""
        if self.averages:
            self.averages.load(remembered)
        of_weights = {name: t for name, t in remembered.items() if name[0] != "/" and name[-4:] != "/ema"}
        take_state(self.optimizer, self.names, of_weights)
        if self.memory:
            self.memory.load(remembered)
        self.statistics.reset()
        self.progress.load(facts)
        if facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])
        self.note_versions()
