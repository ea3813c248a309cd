"""What a person sees of a run: lines or a bar, metrics.jsonl, and curves for TensorBoard.

A closed pipe or a full disk costs lines, never a step.
"""
import errno
import json
import math
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.errors import Outlet, UserError
from common.ledger.clock import Clock
from common.ledger.ledger import Lines
from common.options import Options

FORMATS = {"lr": ".2e", "loss": ".4f", "acc": ".3f"}
BAR_CHARACTERS = 10
CURVES_SECONDS = 10  # that the end of a life waits for TensorBoard; metrics.jsonl has all of it


class Log:
    """Tells on rank 0 how the run goes; call it on every rank, the others stay silent.

    `state_step` is the step this life resumed at, `total_steps` the last step of the run. `records` are the
    lines of the last logged step and evaluation, kept in the checkpoint: the process may have died before
    writing them. Epochs count from 1, as people do.
    """

    def __init__(self, opts: Options, world: Any, state_step: int = 0, total_steps: int = 0,
                 records: Iterable[dict[str, Any]] = ()) -> None:
        self.opts = opts
        self.first = state_step
        self.total = total_steps
        self.speaks = world.rank == 0
        if not self.speaks:
            return
        self.console = Console(opts.progress)
        self.metrics = Metrics(opts.run_dir, state_step, self.note)
        self.curves = Curves(opts, state_step, self.note)
        self.start(())
        for record in records:
            if record.get("step", state_step + 1) <= state_step:
                self._keep(record)

    def start(self, lines: Iterable[str], clock: Clock | None = None, **facts: int) -> None:
        """Print the lines, once; samples/s count from here. `facts` (world, lives, lost, ...) are curves."""
        if self.speaks:
            self.clock = clock
            self.facts = {f"run/{name}": value for name, value in facts.items()}
            for text in lines:
                self.note(text)
            self.began = time.monotonic()
            self.previous = self.began, self.first  # time and step of the line before

    def step(self, state: Any, record: Mapping[str, Any]) -> None:
        """Log a step: `record` holds numbers by name (loss, lr, acc, ...); tensors are read here."""
        if not self.speaks:
            return
        values = _numbers(record)
        now = time.monotonic()
        before, step = self.previous
        self.previous = now, state.step
        rate = (state.step - step) * self.opts.global_batch_size / max(1e-9, now - before)
        curves = self.facts | {"train/samples_per_s": rate}
        norm = getattr(state, "grad_norm", None)
        if norm is not None:
            curves["train/grad_norm"] = float(norm)
        self._keep({"step": state.step, "epoch": state.epoch} | values, curves)
        shown = [f"epoch {state.epoch + 1}/{self.opts.epochs}", f"step {state.step}"]
        if self.total:
            seconds = (self.total - state.step) * (now - self.began) / max(1, state.step - self.first)
            shown[1] += f"/{self.total}"
            shown.append(f"eta {timedelta(seconds=round(seconds))}")
        for name in dict.fromkeys((*FORMATS, *values)):
            value = values.get(name)
            if isinstance(value, int | float) and name not in ("step", "epoch"):
                shown.append(f"{name} {value:{FORMATS.get(name, ',' if isinstance(value, int) else '.4g')}}")
        shown.append(f"{rate:,.0f} samples/s")
        self.console.step("  ".join(shown), state.step / (self.total or math.inf))

    def evaluation(self, state: Any, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation, as {"val_acc", "val_loss"}."""
        if not self.speaks:
            return
        if self.clock:
            self.clock.add("evaluation")
        values = _numbers(metrics)
        self._keep({"step": state.step} | {name: value for name, value in values.items()
                                           if not isinstance(value, list)})
        shown = [f"step {state.step}"]
        for name, value in values.items():
            if isinstance(value, float):
                shown.append(f"{name} {value:.4f}")
            elif isinstance(value, list):
                shown.append(f"{name} {str(value).replace(',', '')}")
        self.note("  ".join(shown))
        if getattr(state, "impatient", False):
            self.note(f"stopped: no better evaluation since step {state.best['step']} "
                      f"(--patience {self.opts.patience})")
        self.previous = time.monotonic(), state.step  # the time of an evaluation is no time of steps

    def death(self, text: str, printed: bool) -> None:
        """How the life before ended; a survivor may have printed it."""
        if not printed:
            self.note(text)
        if self.speaks:
            self.curves.put({"step": self.first}, death=text)

    def done(self, state: Any) -> None:
        """The last line: that the run is done, its best evaluation, and where it is."""
        best = [f"{name} {value:.4f} (best, step {state.best['step']})"
                for name, value in state.best.items() if name not in ("step", "loss") and value is not None]
        self.note(f"done at step {state.step}: {', '.join([*best, str(self.opts.run_dir)])}")

    def note(self, text: str) -> None:
        if self.speaks:
            self.console.show(text + "\n")

    def close(self) -> None:
        """Write what is left; may be called twice."""
        if self.speaks:
            self.curves.close()
            self.metrics.lines.close()
            self.console.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _keep(self, record, curves=None):
        row = record | {"time": round(time.time(), 3)}
        if "epoch" in row:
            row["epoch"] += 1
        if self.metrics.write(row):
            self.curves.put(record, curves)


def _numbers(record):
    return {name: value.item() if hasattr(value, "item") else value for name, value in record.items()}


class Metrics:
    """RUN/metrics.jsonl, cleaned for a life that resumed at `step`: no later, no torn line, no step twice."""

    def __init__(self, run_dir: Path | str, step: int, note: Any) -> None:
        self.lines = Lines(Path(run_dir) / "metrics.jsonl", note)
        self.last = {"train": -1, "val": -1}  # the newest step of each kind of line
        self.on = True
        path = self.lines.path
        try:
            self.lines.fd = self.lines.open()
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if self._belongs(line, step)]
            if kept != lines:
                self.lines.close()  # the first line opens the new file
                aside = path.with_suffix(".new")
                aside.unlink(missing_ok=True)
                with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(b"".join(kept))  # a log needs no fsync
                aside.rename(path)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UserError(f"{path} is a link or no plain file: it is not followed\nremove it") from None
            self.lines.give_up(error)
            self.on = False  # a file that was not cleaned would hold steps twice

    def write(self, row: dict[str, Any]) -> bool:
        """Append a row with its "step"; False if the file has that step already."""
        new = self._is_new(row)
        if new and self.on:
            # JSON has no nan and no infinity: null stands for both.
            self.lines.append({name: None if isinstance(value, float) and not math.isfinite(value) else value
                               for name, value in row.items()})
        return new

    def _belongs(self, line, step):
        """Whether a line is whole, not later than `step`, and the first one of its step."""
        try:
            row = json.loads(line)
            return row["step"] <= step and self._is_new(row)
        except (ValueError, RecursionError, TypeError, KeyError):
            return False

    def _is_new(self, row):
        kind = "val" if any(name.startswith("val_") for name in row) else "train"
        new = row["step"] > self.last[kind]
        self.last[kind] = max(self.last[kind], row["step"])
        return new


class Curves:
    """RUN/tb for TensorBoard. A thread writes it: to import TensorBoard takes seconds."""

    def __init__(self, opts: Options, step: int, note: Any) -> None:
        self.folder = Path(opts.run_dir) / "tb"
        self.step = step
        self.note = note
        self.on = opts.tensorboard
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def put(self, record: dict[str, Any], curves: dict[str, float] | None = None, **texts: str) -> None:
        if self.on:
            self.queue.put((time.time(), record, curves or {}, texts))
            if self.thread is None:  # not earlier: a finished run with nothing to add imports nothing
                self.thread = threading.Thread(target=self._work, daemon=True, name="tensorboard")
                self.thread.start()

    def close(self) -> None:
        if self.thread:
            self.queue.put(None)
            self.thread.join(CURVES_SECONDS)

    def _work(self):
        try:
            from torch.utils.tensorboard import SummaryWriter
            self.folder.mkdir(mode=0o700, exist_ok=True)
            # TensorBoard then drops the later points of earlier lives.
            with SummaryWriter(str(self.folder), purge_step=self.step + 1) as writer:
                for path in self.folder.iterdir():
                    path.chmod(0o600)
                while item := self.queue.get():
                    self._draw(writer, *item)
                    if self.queue.empty():
                        writer.flush()  # a kill costs each curve one point at most
        except Exception as error:  # it is not installed, a disk is full
            self.on = False
            self.note(f"no curves for TensorBoard: {error}; training continues (or use --no-tensorboard)")

    def _draw(self, writer, moment, record, curves, texts):
        for name, value in record.items():
            if name not in ("step", "epoch") and isinstance(value, int | float):
                tag = name.replace("_", "/", 1) if name.startswith("val_") else f"train/{name}"
                writer.add_scalar(tag, value, record["step"], moment)
        for tag, value in curves.items():
            writer.add_scalar(tag, value, record["step"], moment)
        for tag, text in texts.items():
            writer.add_text(f"run/{tag}", text, record["step"], moment)


class Console:
    """Lines on stdout, or one bar below them on a terminal."""

    def __init__(self, progress: str) -> None:
        self.out = Outlet(sys.stdout)
        self.bar = ""
        # Other processes may have written over the bar: its line is erased first.
        self.erase = "\r\x1b[K" if progress == "on" or progress == "auto" and self.out.terminal else ""

    def step(self, text: str, share: float) -> None:
        """Show a step as a line, or in the bar, which is full when all of the run is done."""
        if self.erase:
            bar = f"{share:4.0%}|{'█' * int(share * BAR_CHARACTERS):{BAR_CHARACTERS}}| {text}"
            self.bar = bar[:shutil.get_terminal_size().columns - 1]
            text = ""
        self.show(text if self.erase else text + "\n")

    def show(self, text: str) -> None:
        self.out.write(self.erase + text + self.bar)

    def close(self) -> None:
        self.bar = ""
        self.show("")
