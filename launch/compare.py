"""How far two runs of one program are apart, over what rounding makes of it.

From tensors to a verdict: each step of a run is noted as sketches. `bits` finds the first place where two runs
have other bits. `Noise` is how far rounding alone leads, tensor by tensor and step by step; `far` finds the
first place where a run is much farther away.
"""

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
ROWS_LOUD = 1e-4  # of a weight, for rows of metrics.jsonl: an answer may flip
SMALL = 1e-3  # what is smaller has the noise of this
ROWS = "metrics.jsonl: "  # begins the name of a number


class Sketch(NamedTuple):
    """What is kept of a tensor."""

    numbers: np.ndarray  # all of them, or random sums
    size: float
    noise: float  # of rounding once
    bits: tuple


def sketch_of(tensor: torch.Tensor, ulp: float = 0.0) -> Sketch:
    """`ulp` is that of a coarser type in which the net computes."""
    flat = tensor.detach().cpu().flatten()
    bits = (flat.dtype, tensor.shape, fingerprint_of([flat]))
    real = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    ulp = max(ulp, torch.finfo(real.dtype).eps) if real.is_floating_point() else 1e-7
    numbers = real.double()
    size = numbers.abs().max().item() if len(real) else 0.0
    if len(real) > WHOLE_NUMBERS:
        size = numbers.norm().item()
        draws = torch.Generator().manual_seed(len(real))
        numbers *= torch.randint(0, 2, numbers.shape, generator=draws, dtype=torch.int8) * 2 - 1
        numbers = torch.nn.functional.pad(numbers, (0, -len(real) % SUMS)).view(-1, SUMS).sum(0)
    return Sketch(numbers.numpy(), size, ulp * max(size, SMALL), bits)


def number_of(value: float) -> Sketch:
    return Sketch(np.array([value]), abs(value), 2e-7 * max(abs(value), 0.01), (str(value),))


def apart(one: Sketch, other: Sketch) -> float:
    if one.numbers.shape != other.numbers.shape:
        return np.inf
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(one.numbers - other.numbers), initial=0.0))


class Gap(NamedTuple):
    """Where two runs part."""

    step: int
    name: str
    off: float = np.inf
    size: float = 0.0
    noise: float = 0.0

    def __str__(self):
        made = f", rounding makes {self.noise:.2g}" if self.noise else ""
        return f"{self.name} is off by {self.off:.2g} of {self.size:.2g}{made}"


@dataclass
class Run:
    """What was noted of a program's lives."""

    steps: dict[int, dict[str, Sketch]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    unlike: Gap | None = None  # the first tensor of which two ranks have other bits
    said: str = ""
    ended: bool = False  # well

    @property
    def error(self) -> str:
        """What the program said of its mistake."""
        text = self.said.rpartition("error: ")[2] if "error: " in self.said else self.said[-200:]
        return "\n".join(line.strip() for line in text.splitlines()[:3])

    def pairs(self, other: "Run"):
        """(step, name, sketch, the other's sketch) of what both have, in order of time."""
        for step in sorted(self.steps.keys() & other.steps.keys()):
            for name, sketch in self.steps[step].items():
                if name in other.steps[step]:
                    yield step, name, sketch, other.steps[step][name]

    def lacks(self, other: "Run") -> Gap | None:
        """The first step that only one of two has reached."""
        ends = sorted({max(self.steps), max(other.steps, default=0)})
        return Gap(ends[0] + 1, "the whole step") if len(ends) > 1 else None

    def differs(self, other: "Run") -> Gap | None:
        """The first place with other bits."""
        for step, name, one, two in self.pairs(other):
            if one.bits != two.bits:
                return Gap(step, name, apart(one, two), one.size)
        return self.lacks(other)


class Noise:
    """How far rounding leads from a run: `rounded` and `others` differ from it in rounding alone."""

    def __init__(self, run: Run, rounded: Run, *others: Run) -> None:
        self.run = run
        self.made = {(step, name): sketch.noise for step, name, sketch, _ in run.pairs(run)}
        for other in (rounded, *others):
            for step, name, one, two in run.pairs(other):
                self.made[step, name] = max(self.made[step, name], apart(one, two))
        largest: dict[str, float] = {}
        for step, name in self.made:
            largest[name] = self.made[step, name] = max(self.made[step, name], largest.get(name, 0.0))
        self.grown: dict[int, float] = {}  # of the middle weight, by one ulp
        moved: dict[int, list[float]] = {}
        for step, name, one, two in run.pairs(rounded):
            if name in run.facts["weights"]:
                moved.setdefault(step, []).append(apart(one, two) / (one.size or 1.0))
                self.grown[step] = max(median(moved[step]), self.grown.get(step - 1, 0.0))

    @property
    def loud(self) -> int | None:
        """The step from which nothing can be compared."""
        return next((step for step in sorted(self.grown) if self.grown[step] > LOUD), None)

    def gaps(self, other: Run):
        """(distance over noise, Gap) of all that can be compared."""
        for step, name, one, two in self.run.pairs(other):
            loud = self.grown.get(step, 1.0) > (ROWS_LOUD if name.startswith(ROWS) else LOUD)
            if name[0] != "/" and not loud:  # no text of a memory
                made = self.made[step, name]
                off = apart(one, two)
                yield off / made, Gap(step, name, off, one.size, made)

    def far(self, other: Run) -> Gap | None:
        """The first place where the other run is much farther away than rounding leads."""
        return next((gap for ratio, gap in self.gaps(other) if ratio > LIMIT), self.run.lacks(other))

    def times(self, other: Run) -> float:
        """The largest distance over the noise."""
        return max((ratio for ratio, _ in self.gaps(other)), default=0.0)
