"""How far a run is: numbers alone, no tensor.

From a position to the end: `update` (state.py) counts steps and samples; `planned`, `total_steps`, `finished`
and `evaluation_due` follow from them and the options; `evaluate` keeps the best; a checkpoint holds `facts`.
"""

import math
import time

SAVED = ("step", "epoch", "position", "turn", "order", "best", "record", "evaluated")  # in a checkpoint


class Progress:
    """Steps, epochs, samples and evaluations of a run."""

    def __init__(self, opts, samples, turns=1, shuffled=True):
        self.opts = opts
        self.order = [samples, opts.seed if shuffled else None]  # what decides the samples' order
        self.turns = turns  # steps with each batch
        self.turn = 0
        self.samples = samples  # in an epoch
        self.step = 0
        self.epoch = 0
        self.position = 0  # samples of this epoch trained on so far
        self.best = {"step": 0}
        self.record = {}  # of the last logged step; saved, as rank 0 may die before it logs
        self.evaluated = {}  # the last evaluation, likewise
        self.stepped = time.time()  # the end of the last step of this life

    # ---- in a checkpoint ----
    def facts(self):
        return {name: getattr(self, name) for name in SAVED}

    def load(self, facts):
        """Resume there; if samples now come in another order, an epoch that was begun begins again."""
        order = self.order
        for name in SAVED:
            setattr(self, name, facts[name])
        if self.order != order:
            samples, _ = self.order
            self.position = self.samples if self.position >= samples else 0
            self.turn = 0
            self.order = order

    # ---- steps and epochs ----
    def count(self, size):
        """Count a step of so many samples."""
        self.step += 1
        self.turn = (self.turn + 1) % self.turns
        if not self.turn:
            self.position += size
        self.stepped = time.time()

    @property
    def steps_per_epoch(self):
        return -(-self.samples // self.opts.global_batch_size)

    @property
    def planned(self):
        """Return the steps up to this position; `step` is larger if an epoch has begun again."""
        left = -(-(self.samples - self.position) // self.opts.global_batch_size)
        return (self.epoch + 1) * self.steps_per_epoch - left

    @property
    def total_steps(self):
        left = self.opts.epochs * self.steps_per_epoch - self.planned
        whole = self.step - self.turn + left * self.turns
        return min(whole, self.opts.max_steps or whole)

    @property
    def epoch_over(self):
        return self.position >= self.samples

    def end_epoch(self):
        """Count the epoch, unless --max-steps has ended it before its last sample."""
        if self.epoch_over:
            self.epoch += 1
            self.position = 0

    @property
    def finished(self):
        steps_are_used_up = self.step >= self.total_steps and not self.epoch_over
        epochs_are_used_up = self.epoch >= self.opts.epochs
        return self.opts.eval_only or epochs_are_used_up or steps_are_used_up or self.impatient

    # ---- evaluations ----
    def evaluate(self, numbers, metric, sign, loss):
        """Keep these numbers, and the best evaluation: `sign` is -1 if a lower metric is better.

        Of equals the last one is the best if its loss is lower. --best may name another metric from now on.
        """
        value = numbers.get(metric, math.nan)
        found = {metric: value, "loss": numbers.get(loss, 0.0), "step": self.step}
        self.evaluated = {"step": self.step} | numbers
        best = self.best.get(metric)
        if value == best:
            is_better = found["loss"] < (self.best["loss"] or 0.0)
        else:
            is_better = math.isfinite(value) and (best is None or sign * value > sign * best)
        if is_better:
            self.best = found

    @property
    def evaluated_now(self):
        return self.evaluated.get("step") == self.step

    @property
    def best_now(self):
        """Return whether the evaluation of this step is the best one."""
        return self.evaluated_now and self.best["step"] == self.step

    @property
    def evaluation_due(self):
        """Return whether an epoch or the run ends, or --eval-only."""
        every = self.opts.eval_every
        at_epoch = self.epoch_over and every and (self.epoch + 1) % every == 0
        at_end = self.step >= self.total_steps
        return self.opts.eval_only or (bool(at_epoch or at_end) and not self.evaluated_now)

    @property
    def impatient(self):
        """Return whether this step's evaluation is one of --patience that are no better than the best."""
        between = max(1, self.opts.eval_every) * self.steps_per_epoch * self.turns
        worse = (self.step - self.best["step"]) // between
        at_epoch = self.position in (0, self.samples)  # a script may report in between, on one rank
        return 0 < self.opts.patience <= worse and self.evaluated_now and at_epoch
