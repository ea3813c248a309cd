"""A learning rate that changes with the steps: --lr-schedule, --warmup-epochs, a loop's own schedule."""

import math

from common.errors import UserError
from common.extras.own_files import call_user


def learning_rate(step, opts, steps_per_epoch, schedule=None):
    """Return the rate of a step: a pure function, so nothing is stored and nothing is lost with a node.

    `schedule` is that of a loop of one's own: a function of (step, steps in all), as --lr-schedule names one.
    """
    warmup = opts.warmup_epochs * steps_per_epoch
    total = max(1, opts.epochs * steps_per_epoch)
    if schedule:
        return opts.lr * factor(schedule(step, total), step)
    if ".py" in opts.lr_schedule:
        return opts.lr * factor(call_user(opts.lr_schedule, step, total, opts, first=True), step)
    if step < warmup:
        return opts.lr * (step + 1) / (warmup + 1)
    if opts.lr_schedule == "cosine":
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return opts.min_lr + (opts.lr - opts.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if opts.lr_schedule == "step":  # a tenth after each third of the run
        return max(opts.min_lr, opts.lr * 0.1 ** min(2, 3 * step // total))
    return opts.lr


def factor(value, step):
    """Return what a user's schedule returned; UserError unless it is a factor."""
    if not isinstance(value, (int, float)) or not 0 <= value < 1e300:
        raise UserError(
            f"the schedule returned {value!r} for step {step}\n"
            "wanted: a factor of the learning rate, a number from 0"
        )
    return value
