"""Programs as users write them, each beside a loop in plain PyTorch (`Program.plain`).

A row is a subclass of Program, which is a classifier; it overrides what its users write otherwise:

    class Clamped(Program):
        doors = ("loop",)                      # Elastic; "script": train_ddp.py

        def after(self, net, optimizer, step):
            nn.utils.clip_grad_value_(net.parameters(), 0.1)

It is killed twice, in three worlds (2, 3 and 1 processes), and must have the weights, the losses and the
evaluations of the plain loop; or, with `refused`, be refused in three lines before its first step. A row that
nobody has mended yet says so: `red`.
"""

import re

import pytest
import torch
from jobs import lives, rows
from program import ALONE, LIVES, Program, differences, lived, loop, order, script, trained
from torch import nn


class Classifier(Program):
    """As it is."""


class Column(Program):
    """Regression of [N, 1]."""

    def net(self):
        return nn.Linear(6, 1)

    def sample(self, draw):
        x = torch.randn(6, generator=draw)
        return x, x[:1] + 5

    def scores(self, out, y):
        return {"loss": ((out - y).square().sum(), y.numel()), "mae": ((out - y).abs().sum(), y.numel())}


class Noise(Program):
    """A denoiser: its loss draws the noise."""

    draws = True
    doors = ("script",)
    flags = {"virtual_ranks": 4}
    red = "36.1"

    def scores(self, out, y):
        return super().scores(out + torch.randn_like(out), y)


class Dampened(Program):
    """SGD(dampening=...)"""

    refused = "dampening"
    red = "36.7"

    def optimizer(self, net):
        return torch.optim.SGD(net.parameters(), self.rate, momentum=0.9, dampening=0.5)


class Clamped(Program):
    """Weights that are clamped after each step."""

    doors = ("loop",)
    red = "36.4"

    @torch.no_grad()
    def after(self, net, optimizer, step):
        for p in net.parameters():
            p.clamp_(-0.2, 0.2)


# ---- the bench --------------------------------------------------------------------------------------
def refusal(program, door, folder, size):
    """What is wrong with the refusal of so many processes; empty if nothing is."""
    codes, said = lived(program, door, folder, size)
    text = "\n".join(said)
    errors = re.findall(r"^error: .*(?:\n       .*)*", text, re.MULTILINE)
    log = folder / "run/metrics.jsonl"
    steps = [row["step"] for row in rows(folder / "run") if "loss" in row] if log.exists() else []
    wrong = []
    if 2 not in codes or not {*codes} <= {1, 2}:
        wrong.append(f"exit codes {codes}")
    if not any(re.search(program.refused, error) for error in errors):
        wrong.append(f"no error says {program.refused!r}")
    if "Traceback" in text or any(error.count("\n") > 2 for error in errors):
        wrong.append("more than three lines")
    if max(steps, default=0) > program.right:
        wrong.append(f"{max(steps)} steps were made")
    return f"{size} processes: {', '.join(wrong)}\n{text}" if wrong else ""


def fault(program, door, folder):
    """What is wrong with a program; empty if nothing is."""
    program.net()  # imports what it needs: here once, not in each rank
    for size in program.refused_at if program.refused else ():
        wrong = refusal(program, door, folder / f"refused {size}", size)
        if wrong:
            return wrong
    if program.refused and 1 in program.refused_at:
        return ""
    found, said = trained(program, door, folder / "killed", ALONE if program.refused else LIVES)
    if not re.search(program.told, said):
        return f"no line says {program.told!r}\n{said}"
    if program.told and not program.refused:
        return ""
    if program.draws:
        wanted, _ = trained(program, door, folder / "alone", ALONE)
    else:
        wanted = program.plain(list(order()))
    exact = program.draws and "virtual_ranks" in program.flags
    lines = differences(found, wanted, 0 if exact else program.tolerance)
    if lines:
        lines += [
            f"from step {life['step'] + 1} on: world {life['world']}" for life in lives(folder / "killed/run")
        ]
    return "\n".join(lines) or program.check(folder / "killed/run")


def marks(row):
    return [pytest.mark.xfail(strict=True, reason=row.red)] * bool(row.red)


@pytest.mark.parametrize(
    ("row", "door"),
    [
        pytest.param(row(), door, id=f"{row.__name__.lower()}-{door.__name__}", marks=marks(row))
        for row in Program.rows
        for door in (script, loop)
        if door.__name__ in row.doors
    ],
)
def test_a_program_has_the_numbers_of_a_plain_loop_or_is_refused(row, door, tmp_path):
    wrong = fault(row, door, tmp_path)
    if wrong:
        pytest.fail(wrong, pytrace=False)
