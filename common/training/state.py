"""Everything a checkpoint holds, as named parts; the only place where counters move.

What can be derived from (options, step) is not here: order, learning rate, dropout and augmentation
randomness.
"""
import contextlib
import math
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

from common.errors import UserError
from common.options import Options
from common.training.optimizer import learning_rate


class TrainState:
    """Net, optimizer, averages and counters between two steps; `lock` is held while they move from one step
    to the next.
    """

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, opts: Options, samples: int,
                 norm: Callable = torch.nn.utils.get_total_norm, all_sum: Callable | None = None):
        self.net, self.optimizer, self.opts, self.samples = net, optimizer, opts, samples
        self.steps_per_epoch = -(-samples // opts.global_batch_size)
        self.order = [samples, opts.seed]  # in another one a position means nothing
        self.scaler = torch.amp.GradScaler() if opts.amp == "fp16" else None
        self.step = self.epoch = self.position = 0  # position: samples of this epoch already trained on
        self.best = {"val_acc": -1.0, "step": 0}
        self.progress, self.own_seconds = 0, 0.0  # for the pulse: any progress; work that waits for nobody
        self.stepped = time.time()  # for the ledger: when the last step was whole
        self.record = {}  # the last logged step: its writer may have died before that
        self.evaluated = {}  # the last evaluation, likewise
        self.lock, self.half_updated = threading.RLock(), False
        self.images = {}  # the store's: a save may still be copying into them
        self.verdict = None  # why it may never be saved, as an error for a person
        self.norm, self.all_sum = norm, all_sum  # of gradients, over all ranks: given where each has a part of the net
        self.ready = 0  # samples whose gradient is here, clipped: only to be used
        self.names = {p: name for name, p in net.named_parameters()}
        self.ema = {n: p.detach().clone() for n, p in net.named_parameters()} if opts.ema_decay else {}
        self.own_weights = {}  # the weights, while the net wears their averages
        # Forward moves running statistics in mid-step; a checkpoint takes these copies, which the last whole
        # step left.
        self.buffers = {n: b.detach().clone() for n, b in net.named_buffers()}

    @property
    def planned(self):
        """Steps that lead to this position; `step` counts more of them where an epoch has begun again."""
        left = -(-(self.samples - self.position) // self.opts.global_batch_size)
        return (self.epoch + 1) * self.steps_per_epoch - left

    @property
    def lr(self):
        return learning_rate(self.planned, self.opts, self.steps_per_epoch)

    @contextlib.contextmanager
    def changing(self):
        """Whoever changes weights does it in here: no save begins meanwhile, and what one has begun to copy
        is copied.
        """
        with self.lock:
            for image in self.images.values():
                image.wait()
            yield

    def finish_gradient(self, size):
        """The last that a step needs others for, where each has a part of the net: whether it overflows, and
        how long it is.
        """
        if self.scaler and (self.opts.clip_grad_norm or self.all_sum):
            none = torch.zeros((), device=next(iter(self.names)).device)
            self.scaler.scale(none)  # its first call: not all have a loss
            self.scaler.unscale_(self.optimizer)
            if self.all_sum:  # a step that one of them skips, all skip
                found = self.scaler._found_inf_per_device(self.optimizer)
                overflows = self.all_sum(sum((f.to(none.device) for f in found.values()), none)).clamp_(max=1.0)
                for other in found.values():  # their sum goes to the optimizer, which knows 0 and 1 alone
                    other.zero_()
                found[none.device] = overflows
        if self.opts.clip_grad_norm:
            norm = self.norm([p.grad for p in self.names if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(self.names, self.opts.clip_grad_norm, norm)
        if self.net_is_on_gpu():
            torch.cuda.synchronize()  # no update may be queued behind a collective that can hang
        self.ready = size

    def update(self, size):
        """One optimizer step of a global batch of `size` samples: all of it or, for whoever saves meanwhile,
        nothing.
        """
        if not self.ready:
            self.finish_gradient(size)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        with self.changing():
            if self.half_updated:
                raise self.verdict or RuntimeError("no step follows: the rescue has made this one already")
            self.half_updated = True  # stays True if the body raises: half a step is no state
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            if self.ema:
                torch._foreach_lerp_(list(self.ema.values()), [p.detach() for p in self.names], 1 - self.opts.ema_decay)
            self.take_buffers()
            self.step += 1
            self.position += size
            self.progress += 1
            self.stepped = time.time()
            self.ready, self.half_updated = 0, False
        self.optimizer.zero_grad(set_to_none=True)

    def note(self, totals, size):
        """The record of the step just made, from [summed loss, hits] of its global batch; kept, as its writer
        may die.
        """
        loss, hits = totals.tolist()
        self.record = {"step": self.step, "epoch": self.epoch, "loss": loss / size, "acc": hits / size,
                       "lr": learning_rate(self.planned - 1, self.opts, self.steps_per_epoch)}
        if not math.isfinite(loss):
            self.condemn(f"step {self.step}: the loss is {loss} (every rank saw the same)")
        return self.record

    def condemn(self, fact):
        """Raise what a person can do; this state is never saved, no step follows it, and a restart goes back
        to before it.
        """
        kept = max((self.opts.run_dir / "checkpoints").glob("step-*"), default=None)
        what, where = (f"nothing after {kept.name} is", f" --resume {kept}") if kept else ("nothing is", "")
        # The learning rate decides the result, so with another one it is another run.
        self.verdict = UserError(f"{fact}, {what} kept\nlower --lr in another run: --run-dir NEW{where} --lr X\n"
                                 "or clip there with --clip-grad-norm, or look at the samples with --audit", code=5)
        self.half_updated = True
        raise self.verdict

    def record_evaluation(self, metrics):
        """Remember this evaluation, and the best one; returns what it was given."""
        with self.lock:
            self.evaluated = {"step": self.step, "val_loss": metrics["val_loss"], "val_acc": metrics["val_acc"]}
            if metrics["val_acc"] > self.best["val_acc"]:
                self.best = {"val_acc": metrics["val_acc"], "step": self.step}
        return metrics

    def end_epoch(self):
        """On to the next epoch, if this one's samples have all been trained on (--max-steps may have ended it
        earlier).
        """
        if self.epoch_over:
            with self.lock:
                self.epoch, self.position = self.epoch + 1, 0

    # ---- how far the run is -----------------------------------------------------------------------
    @property
    def total_steps(self):
        whole = self.step - self.planned + self.opts.epochs * self.steps_per_epoch
        return min(whole, self.opts.max_steps or whole)

    @property
    def finished(self):
        return self.opts.eval_only or self.epoch >= self.opts.epochs or self.step >= self.total_steps and not self.epoch_over

    @property
    def epoch_over(self):
        return self.position >= self.samples

    @property
    def evaluation_due(self):
        every = self.opts.eval_every
        return self.evaluated.get("step") != self.step and (
            self.step >= self.total_steps or self.epoch_over and every and (self.epoch + 1) % every == 0)

    @property
    def evaluation_missing(self):
        """--eval-only, or the last step of the run is saved without its evaluation."""
        ended = self.finished and self.step == self.total_steps
        return self.opts.eval_only or ended and self.evaluated.get("step") != self.step

    @property
    def records(self):
        """Lines of the log that the process which should have written them may not have."""
        return self.record, self.evaluated

    def net_is_on_gpu(self):
        return next(iter(self.names)).is_cuda

    @torch.no_grad()
    def take_buffers(self):
        for name, buffer in self.net.named_buffers():
            self.buffers[name].copy_(buffer)

    # ---- what a checkpoint sees: two sets of named tensors and one dict of facts ------------------
    def tensors(self):
        """{"model": ..., "optimizer": ...}: live tensors under bare names, without `module.` or `_orig_mod.`.
        """
        return {part: {n: t.to_local() if hasattr(t, "to_local") else t for n, t in named.items()}
                for part, named in self._named().items()}

    def sharded(self):
        """Names of which this rank has some rows (train_mp.py --shard), in both sets."""
        return {n for named in self._named().values() for n, t in named.items() if hasattr(t, "to_local")}

    def _named(self):
        held = self.own_weights
        model = {n: held[n] if n in held else self.buffers.get(n, t) for n, t in self.net.state_dict().items()}
        optimizer = {f"{self.names[p]}/{key}": value for p, values in self.optimizer.state.items()
                     for key, value in values.items() if torch.is_tensor(value)}
        optimizer |= {f"{n}/ema": t for n, t in self.ema.items()}
        return {"model": model, "optimizer": optimizer}

    def facts(self):
        scaler = self.scaler.state_dict() if self.scaler else None
        return {"step": self.step, "epoch": self.epoch, "position": self.position, "order": self.order, "best": self.best,
                "record": self.record, "judged": self.evaluated, "scaler": scaler}

    @torch.no_grad()
    def load(self, tensors, facts):
        """apply(capture()) is the identity: `tensors` and `facts` as the two methods above gave them.

        In another order than that of `facts` no position is the same: the epoch begins again, unless it was
        complete.
        """
        for part, live in self.tensors().items():
            for name, tensor in live.items():
                tensor.copy_(tensors[part][name])
        for name, buffer in self.net.named_buffers():
            buffer.copy_(self.buffers[name])
        self.step, self.epoch, self.position = facts["step"], facts["epoch"], facts["position"]
        if (order := facts.get("order", self.order)) != self.order:
            self.position = self.samples if len(order) == 2 and self.position >= order[0] else 0
        self.best, self.record, self.evaluated = facts["best"], facts["record"], facts.get("judged", {})
        if self.scaler and facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])
