"""What a person sees of a run: lines or a bar. A closed pipe or a full disk costs lines, never a step."""
import os
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from common.errors import Outlet
from common.ledger.board import Board
from common.ledger.clock import Clock
from common.ledger.lines import Metrics
from common.options import Options

FORMATS = {"lr": ".2e", "loss": ".4f", "acc": ".3f"}
DRAW_EVERY_SECONDS = 0.1
BAR = 10                 # characters


class Log:
    """Tells on rank 0 how the run goes; call it on every rank, the others stay silent.

    `state_step` is the step this life resumed at, `total_steps` the last step of the run. `records` are the
    lines of the last logged step and evaluation, kept in the checkpoint: the process may have died before
    writing them.
    """

    def __init__(self, opts: Options, world: Any, state_step: int = 0, total_steps: int = 0,
                 records: Iterable[dict[str, Any]] = ()) -> None:
        self.opts, self.total, self.first = opts, total_steps, state_step
        self.speaks = world.rank == 0
        if not self.speaks:
            return
        self.console = Console(opts, total_steps)
        self.metrics = Metrics(opts.run_dir, state_step, self.note)
        self.board = Board(opts, state_step, self.note)
        self.rate = 0.0  # samples a second
        self.start(())
        for record in records:
            if record.get("step", state_step + 1) <= state_step:
                self._keep(record)

    def start(self, lines: Iterable[str], clock: Clock | None = None, **facts: int) -> None:
        """Print the lines, once; samples/s count from here. `facts` (world, lives, lost) are for the bar."""
        if self.speaks:
            self.clock, self.facts = clock, facts
            for text in lines:
                self.note(text)
            self.began = time.monotonic()
            self.previous = self.began, self.first  # time and step of the line before

    def step(self, state: Any, record: Mapping[str, Any]) -> None:
        """Log a step: `record` holds numbers by name (loss, lr, acc, ...); tensors are read here."""
        if not self.speaks:
            return
        values = _numbers(record)
        (before, step), self.previous = self.previous, (time.monotonic(), state.step)
        seconds = self.previous[0] - before
        self.rate = (state.step - step) * self.opts.global_batch_size / seconds if seconds > 0 else 0.0
        norm, shares = getattr(state, "grad_norm", None), self.clock.shares() if self.clock else {}
        self._keep({"step": state.step, "epoch": state.epoch} | values, self.facts | shares | (
            {} if norm is None else {"grad_norm": float(norm)}) | {"samples_per_s": self.rate})
        parts = {name: f"{name} {values[name]:{_format(name, values[name])}}"
                 for name in dict.fromkeys((*FORMATS, *values))
                 if name not in ("step", "epoch") and isinstance(values.get(name), (int, float))}
        if self.rate:
            parts["rate"] = f"{self.rate:,.0f} samples/s"
        short = [part for name, part in parts.items() if name != "lr"]
        self.console.at = self._at(state)
        self.console.step("  ".join(parts.values()), "  ".join(
            [*short, *(f"{name} {value}" for name, value in self.facts.items())]))

    def _at(self, state):
        where = f"epoch {state.epoch + 1}/{self.opts.epochs}  step {state.step}"
        if self.total:
            where += f"/{self.total}  eta {timedelta(seconds=round(self.eta(state.step)))}"
        return state.step, where

    def eta(self, step: int) -> float:
        """Seconds until the last step, at the pace of this life."""
        return max(0.0, (self.total - step) * (time.monotonic() - self.began) / max(1, step - self.first))

    def evaluation(self, state: Any, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation, as {"val_acc", "val_loss"}."""
        if not self.speaks:
            return
        if self.clock:
            self.clock.evaluated()
        values = _numbers(metrics)
        self._keep({"step": state.step} | {n: v for n, v in values.items() if not isinstance(v, list)})
        self.console.at = self._at(state)  # the last step is evaluated, and not always logged
        shown = [f"{name} " + (f"{value:.4f}" if isinstance(value, float) else str(value).replace(",", ""))
                 for name, value in values.items() if isinstance(value, float | list)]
        self.note("  ".join([f"step {state.step}", *shown]))
        if getattr(state, "impatient", False):
            self.note(f"stopped: no better evaluation since step {state.best['step']} "
                      f"(--patience {self.opts.patience})")
        # the time of an evaluation does not count as time of steps
        self.previous = time.monotonic(), state.step

    def note(self, text: str) -> None:
        if self.speaks:
            self.console.line(text)

    def close(self) -> None:
        """Write what is left; may be called twice."""
        if self.speaks:
            self.board.close()
            self.metrics.lines.close()
            self.console.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _keep(self, line, facts=()):
        if self.metrics.write(line):
            self.board.put(line, facts)


def _format(name, value):
    return FORMATS.get(name, "," if isinstance(value, int) else ".4g")


def _numbers(record):
    return {name: value.item() if hasattr(value, "item") else value for name, value in record.items()}


class Console:
    """Lines on stdout, or one bar below them on a terminal; it counts the steps of the whole run."""

    def __init__(self, opts, total):
        self.out, self.total = Outlet(sys.stdout), total
        self.at, self.text, self.drawn = (0, ""), "", 0.0  # step and its place; numbers; last drawn
        able = self.out.isatty() and os.environ.get("TERM") != "dumb"
        self.bar = opts.progress == "on" or opts.progress == "auto" and able

    def step(self, text, short):
        """Show a step: `text` as a line, or `short` in the bar."""
        if not self.bar:
            return self.line(f"{self.at[1]}  {text}")
        self.text = short
        if time.monotonic() - self.drawn > DRAW_EVERY_SECONDS:
            self._show(self._bar())

    def line(self, text):
        self._show(f"{text}\n{self._bar()}")

    def close(self):
        """A full bar stays on the terminal; the next life replaces any other."""
        self._show(self._bar() + "\n" if self.text and self.at[0] >= self.total else "")
        self.text = ""

    def _show(self, text):
        """Write this in place of the bar, over which other processes may have written."""
        self.out.write(("\r\x1b[K" if self.text else "") + text)
        self.out.flush()

    def _bar(self):
        if not self.text:
            return ""
        (step, where), self.drawn = self.at, time.monotonic()
        share = min(1.0, step / self.total) if self.total else 0.0
        full = int(share * BAR)
        text = f"{share:4.0%}|{'█' * full}{' ' * (BAR - full)}| {where}  {self.text}"
        return text[:self._columns() - 1]

    def _columns(self):
        try:  # some terminals report a width of 0 (serial lines)
            return os.get_terminal_size(self.out.fileno()).columns or 80
        except (OSError, ValueError, AttributeError):
            return 200  # no terminal, but --progress on
