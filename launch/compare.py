"""How far two runs of one program are apart, over what rounding makes of it.

A run is noted as sketches of all tensors after each step, {step: {name: Sketch}}. `parted` finds the first
place where two runs part: in a bit, or by much more than rounding alone leads, tensor by tensor.
"""

import functools
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from common.world import fingerprint_of

SUMS = 256  # a tensor with no more numbers is kept; of a larger one there are so many random sums
LIMIT = 1000.0  # times the noise: right programs have 18 or less, wrong ones 100,000 and more
SMALL = 1e-3  # what is smaller has the noise of this
ROW = "metrics.jsonl: "  # begins the name of a number of the log


class Sketch(NamedTuple):
    """What is kept of a tensor."""

    numbers: torch.Tensor
    size: float
    noise: float  # of rounding once
    bits: int


class Gap(NamedTuple):
    """Where two runs part."""

    step: int
    text: str


def sketch_of(tensor: torch.Tensor) -> Sketch:
    tensor = tensor.detach().cpu()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    ulp = torch.finfo(flat.dtype).eps if flat.is_floating_point() else 1e-7
    signed = torch.nn.functional.pad(flat.double() * signs(len(flat)), (0, SUMS - len(flat) % SUMS))
    sums = signed.view(-1, SUMS).sum(0)
    size = largest(sums)
    return Sketch(sums, size, ulp * max(size, SMALL), fingerprint_of([flat]))


@functools.cache
def signs(count):
    """Return as many random signs, the same ones each time; not by torch, whose draws may be silenced."""
    return torch.from_numpy(np.random.default_rng(count).integers(0, 2, count, dtype=np.int8) * 2 - 1)


def largest(numbers):
    return numbers.abs().nan_to_num().max().item()


def apart(one, other):
    return largest(one.numbers - other.numbers)


def parted(one: dict, other: dict, rounded: dict | None = None) -> Gap | None:
    """Find the first place with other bits; with `rounded`, which rounding alone has changed: far apart."""
    for step in sorted(one.keys() & other.keys()):
        led = (rounded or one).get(step, {})
        growth = grown(one[step], led)
        for name, sketch in one[step].items():
            theirs = other[step].get(name, sketch)
            noise = max(sketch.noise, growth * sketch.size, apart(sketch, led.get(name, sketch)))
            off = apart(sketch, theirs)
            is_far = off > LIMIT * noise and name[0] != "/"  # a text, of a memory
            if sketch.bits != theirs.bits and (is_far or not rounded):
                return Gap(
                    step, f"{name} is off by {off:.2g} of {sketch.size:.2g}, rounding makes {noise:.2g}"
                )
    last, later = sorted([max(one, default=0), max(other, default=0)])
    return Gap(last + 1, "the whole step is missing") if last < later and not rounded else None


def grown(sketches, rounded):
    """Measure how far rounding leads in the middle tensor, as a part of it: there may be chaos."""
    led = [
        apart(sketch, rounded.get(name, sketch)) / (sketch.size or 1.0) for name, sketch in sketches.items()
    ]
    return median(led or [0.0])
