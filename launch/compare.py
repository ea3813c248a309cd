"""How far two runs of one program are apart, over what rounding makes of it.

A run is noted as sketches of all tensors after each step. `differs` finds the first place where two runs have
other bits. `Noise` is how far rounding alone leads, tensor by tensor and step by step; `far` finds the first
place where a run is much farther away.
"""

import functools
import math
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from common.world import fingerprint_of

WHOLE_NUMBERS = 4096  # a tensor with no more is kept; of a larger one there are random sums
SUMS = 16
LIMIT = 1000.0  # times the noise: right programs have 18 or less, wrong ones 100,000 and more
LOUD = 0.01  # of a weight: where one ulp has grown to it, nothing can be compared
ROWS_LOUD = 1e-4  # of a weight: for numbers of the log, where an answer may flip
SMALL = 1e-3  # what is smaller has the noise of this
ROW = "metrics.jsonl: "  # begins the name of a number of the log


class Sketch(NamedTuple):
    """What is kept of a tensor."""

    numbers: np.ndarray  # all of them, or random sums
    size: float
    noise: float  # of rounding once
    bits: tuple


def sketch_of(tensor: torch.Tensor, ulp: float = 0.0) -> Sketch:
    """`ulp` is that of a coarser type in which the net computes."""
    tensor = tensor.detach().cpu()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    bits = (tensor.dtype, tensor.shape, fingerprint_of([flat]))
    ulp = max(ulp, torch.finfo(flat.dtype).eps if flat.is_floating_point() else 1e-7)
    if not flat.is_floating_point() or len(flat) <= WHOLE_NUMBERS:
        flat = flat.double()
    if len(flat) > WHOLE_NUMBERS:
        size = flat.norm(dtype=torch.float64).item()
        signed = torch.nn.functional.pad(flat * signs(len(flat)), (0, -len(flat) % SUMS))
        flat = signed.view(-1, SUMS).sum(0, dtype=torch.float64)
    else:
        size = flat.abs().max().item() if len(flat) else 0.0
    return Sketch(flat.numpy(), size, ulp * max(size, SMALL), bits)


@functools.cache
def signs(count: int) -> torch.Tensor:
    """As many random signs, the same ones each time; not by torch, whose draws may be silenced."""
    return torch.from_numpy(np.random.default_rng(count).integers(0, 2, count, dtype=np.int8) * 2 - 1)


def apart(one: Sketch, other: Sketch) -> float:
    if one.numbers.shape != other.numbers.shape:
        return math.inf
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(abs(one.numbers - other.numbers), initial=0.0))


class Gap(NamedTuple):
    """Where two runs part."""

    step: int
    name: str
    off: float = math.inf
    size: float = 0.0
    noise: float = 0.0

    def __str__(self):
        return f"{self.name} is off by {self.off:.2g} of {self.size:.2g}, rounding makes {self.noise:.2g}"


@dataclass
class Run:
    """What was noted of a program's lives."""

    steps: dict[int, dict[str, Sketch]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    unlike: Gap | None = None  # the first tensor of which two ranks have other bits
    error: str = ""  # what the program said last, if it did not end well

    def pairs(self, other: "Run"):
        """(step, name, sketch, the other's sketch) of what both have, in order of time."""
        for step in sorted(self.steps.keys() & other.steps.keys()):
            for name, sketch in self.steps[step].items():
                if name in other.steps[step]:
                    yield step, name, sketch, other.steps[step][name]

    def lacks(self, other: "Run") -> Gap | None:
        """The first step that only one of two has reached."""
        first, last = sorted([max(self.steps), max(other.steps, default=0)])
        return Gap(first + 1, "the whole step") if first < last else None

    def differs(self, other: "Run") -> Gap | None:
        """The first place with other bits."""
        for step, name, one, two in self.pairs(other):
            if one.bits != two.bits:
                return Gap(step, name, apart(one, two), one.size, one.noise)
        return self.lacks(other)


class Noise:
    """How far rounding leads from a run: `rounded` and `others` differ from it in rounding alone."""

    def __init__(self, run: Run, rounded: Run, *others: Run) -> None:
        self.run = run
        self.made: dict[tuple[int, str], float] = {}  # never less than a step before
        for other in (run, rounded, *others):
            largest: dict[str, float] = {}
            for step, name, one, two in run.pairs(other):
                largest[name] = max(one.noise, apart(one, two), largest.get(name, 0.0))
                self.made[step, name] = max(largest[name], self.made.get((step, name), 0.0))
        moved: dict[int, list[float]] = {}
        for step, name, one, two in run.pairs(rounded):
            if name in run.facts["weights"]:
                moved.setdefault(step, []).append(apart(one, two) / (one.size or 1.0))
        self.grown = {step: median(shares) for step, shares in moved.items()}  # one ulp, in the middle weight

    def loud(self, limit: float = LOUD) -> float:
        """The step from which nothing can be compared."""
        return min((step for step in self.grown if self.grown[step] > limit), default=math.inf)

    def far(self, other: Run) -> Gap | None:
        """The first place where the other run is much farther away than rounding leads."""
        ends = {False: self.loud(), True: self.loud(ROWS_LOUD)}
        for step, name, one, two in self.run.pairs(other):
            gap = Gap(step, name, apart(one, two), one.size, self.made[step, name])
            is_text = name[0] == "/"  # of a memory
            if gap.off > LIMIT * gap.noise and step < ends[name.startswith(ROW)] and not is_text:
                return gap
        return self.run.lacks(other)
