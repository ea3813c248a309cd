"""Numbers and tensors of all ranks, for a loop of one's own: `run.mean`, `run.gather`, differing reports."""

import math

import torch

from common.errors import UserError, warn
from common.world import gather


def mean(run, value, count=None):
    """Return the mean of all ranks' means of `count` things."""
    own = own_samples(run, "mean")
    if own is not None:
        count = own and (own if count is None else count)
    weight = 1.0 if count is None else float(count)
    total = torch.tensor([float(value) * weight if weight else 0.0, weight], dtype=torch.float64)
    total, weight = run.world.all_sum(total).tolist()
    return total / weight if weight else math.nan


def rows(run, tensor):
    """Return the rows of all ranks, one after the other."""
    own = tensor.detach().to("cpu", copy=True)
    if own_samples(run, "gather") == 0:
        own = own[:0]  # of samples that count nothing
    counts = gather(run.world, len(own))
    total = own.new_zeros(sum(counts), *own.shape[1:])
    total.split(counts)[run.world.rank].copy_(own)
    whole = total.view(torch.uint8) if total.dtype in (torch.bool, torch.bfloat16) else total
    run.world.all_sum(whole)  # every other rank has zeros there
    return total.to(tensor.device)


def warn_of_other_reports(reports):
    """Warn if two ranks report different numbers of a step, and return whether; rank 0 may report alone."""
    first = reports[0]
    for rank, report in enumerate(reports):
        for name, value in report.items():
            expected = first.get(name)
            same = str(value) == str(expected)  # as nan
            same = same or expected is not None and math.isclose(value, expected, rel_tol=1e-6)
            if report["step"] == first.get("step") and not same:
                warn(
                    f"rank 0 reports {name} {expected}, rank {rank} {value}: rank 0's counts\n"
                    "run.mean(value, count) and run.gather(tensor) have those of all ranks"
                )
                return True
    return False


def own_samples(run, name):
    """Return how many samples of this batch this rank has; None outside of a batch."""
    if not run.in_batch:
        return None
    way_out = "call it before run.step, or at the end of an epoch"
    if run.trained:
        raise UserError(
            f"run.{name} after run.step: what follows from it would be lost with another rank\n{way_out}"
        )
    if run.opts.micro_batch_size or run.opts.virtual_ranks not in (0, run.world.size):
        raise UserError(
            f"run.{name} in a batch that comes in pieces: ranks may have other numbers of them\n"
            f"{way_out}, without pieces"
        )
    return len(run.gradient.ids)
