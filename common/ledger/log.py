"""What a person sees of a run: lines or a bar, metrics.jsonl, and curves for TensorBoard.

A closed pipe or a full disk costs lines, never a step.
"""

import math
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

from common.errors import Outlet, warn
from common.ledger.ledger import Lines, Record, lines_back, parse
from common.options import Options, extra
from common.sealed import finite

FORMATS = {"lr": ".2e", "loss": ".4f", "acc": ".3f"}
CLEAN_BYTES = 1 << 16  # at the end of metrics.jsonl, that are looked through
KINDS = ("step", "evaluation")  # of rows
CURVES_SECONDS = 5  # of points that a kill may cost TensorBoard; metrics.jsonl has all


class Log:
    """Tell on rank 0 how the run goes; call it on every rank, the others stay silent.

    `first` is the step this life resumed at, `total` the last step of the run. `records` are the lines of the
    last logged step and evaluation, kept in the checkpoint: the process may have died before writing them.
    Epochs count from 1, as people do.
    """

    def __init__(
        self, opts: Options, rank: int, first: int, total: int, records: Iterable[Record] = ()
    ) -> None:
        self.opts = opts
        self.first = first
        self.total = total
        self.speaks = rank == 0
        if self.speaks:
            self.out = Outlet(sys.stdout)
            self.bar = None
            if opts.progress == "on" or opts.progress == "auto" and self.out.terminal:
                self.bar = extra("bar")(self.out)
            self.metrics = Metrics(opts.run_dir, first)
            self.curves = Curves(opts, first)
            self.start(())
            for record in filter(None, records):
                self._keep(record)

    def start(self, lines: Iterable[str]) -> None:
        """Print the lines, also for TensorBoard. From here on samples/s are counted."""
        if self.speaks:
            self.curves.life = "\n\n".join(lines)
        self.began = time.monotonic()
        self.previous = self.began, self.first  # time and step of the line before
        for text in lines:
            self.note(text)

    def step(self, record: Record, **more: float) -> None:
        """Log a step: numbers by name (step, epoch, loss, acc, lr, ...); TensorBoard gets `more`."""
        if not self.speaks:
            return
        now = time.monotonic()
        step = record["step"]
        before, step_before = self.previous
        self.previous = now, step
        rate = (step - step_before) * self.opts.global_batch_size / max(1e-9, now - before)
        self._keep(record, samples_per_s=rate, **more)
        seconds = (self.total - step) * (now - self.began) / max(1, step - self.first)
        shown = [
            f"epoch {record['epoch'] + 1}/{self.opts.epochs}",
            f"step {step}/{self.total}",
            f"eta {timedelta(seconds=round(seconds))}",
        ]
        for name, value in record.items():
            if name not in ("step", "epoch"):
                shown.append(f"{name} {value:{FORMATS.get(name, '.4g')}}")
        shown.append(f"{rate:,.0f} samples/s")
        text = "  ".join(shown)
        if self.bar:
            self.bar.step(text, step / self.total)
        else:
            self.note(text)

    def evaluation(self, record: Record, metrics: Record) -> None:
        """Log an evaluation, as {"val_acc", "val_loss"}: its `metrics` are shown, its `record` is written."""
        if not self.speaks:
            return
        self._keep(record)
        step = record["step"]
        shown = [f"step {step}"]
        for name, value in metrics.items():
            text = f"{value:.4f}" if name in record else str(value).replace(",", "")
            shown.append(f"{name} {text}")
        self.note("  ".join(shown))
        self.previous = time.monotonic(), step  # the time of an evaluation is no time of steps

    def done(self, step: int, best: Record) -> None:
        """Print the last line: that the run is done, its best evaluation, and where it is."""
        words = [
            f"{name} {value:.4f} (best, step {best['step']})"
            for name, value in best.items()
            if name not in ("step", "loss") and value is not None
        ]
        self.note(f"done at step {step}: {', '.join([*words, str(self.opts.run_dir)])}")

    def note(self, text: str) -> None:
        if self.speaks:
            (self.bar or self.out).write(f"{text}\n")

    def close(self) -> None:
        """Write what is left; may be called twice."""
        if self.speaks:
            self.curves.close()
            self.metrics.close()
            if self.bar:
                self.bar.close()

    def _keep(self, record, **more):
        """Write a row into both files, unless this step is there already."""
        row = record | {"time": round(time.time(), 3)}
        if "epoch" in row:
            row["epoch"] += 1
        if self.metrics.write(row):
            self.curves.put(record | more)


class Metrics(Lines):
    """RUN/metrics.jsonl in a life that resumed at `step`: no later row, no torn line, no step twice.

    Its end alone is read, and it is cut in place. A life that may still append to it has another file by then
    (`Fence` in checkpoint/fence.py).
    """

    def __init__(self, run_dir, step):
        super().__init__(run_dir / "metrics.jsonl")
        self.last = step  # of which the file may have a row when it is opened
        self.newest = dict.fromkeys(KINDS, -1)  # that has a row
        try:
            self.open()
        except OSError as error:
            self.give_up(error)

    def open(self):
        """Open the file and clean its end; so what is written to is clean."""
        super().open()
        self.newest = dict.fromkeys(KINDS, -1)
        size = os.fstat(self.fd).st_size
        lines = []
        for start, line in lines_back(self.path):
            lines.append(line + b"\n")
            row = parse(line, "step") or {}
            if size - start > CLEAN_BYTES and "epoch" in row and row["step"] < self.last:
                self.newest = dict.fromkeys(KINDS, row["step"] - 1)
                break
        lines.reverse()
        rows = [line for line in lines if self._belongs(parse(line, "step"))]
        right = len(os.path.commonprefix([b"".join(lines), b"".join(rows)]))
        os.ftruncate(self.fd, start + right)
        os.write(self.fd, b"".join(rows)[right:])
        self.last = math.inf

    def _belongs(self, row):
        return row is not None and row["step"] <= self.last and self._is_new(row)

    def write(self, row):
        """Append a row with its "step"; False if the file has that step already."""
        new = self._is_new(row)
        if new:
            self.append(finite(row))
        return new

    def _is_new(self, row):
        kind = "step" if "epoch" in row else "evaluation"  # only steps have an epoch
        new = row["step"] > self.newest[kind]
        if new:
            self.newest[kind] = row["step"]
        return new


class Curves:
    """RUN/tb for TensorBoard."""

    def __init__(self, opts, step):
        self.folder = opts.run_dir / "tb"
        self.step = step
        self.on = opts.tensorboard
        self.life = ""  # how it began, told with its first point
        self.writer = None  # TensorBoard is imported late

    def put(self, record):
        if not self.on:
            return
        tags = {
            name.replace("_", "/", 1) if name.startswith("val_") else f"train/{name}": value
            for name, value in record.items()
            if name not in ("step", "epoch")
        }
        try:
            self.writer = self.writer or self._open()
            if self.life:
                self.writer.add_text("run/lives", self.life, self.step)
            self.life = ""
            for tag, value in tags.items():
                self.writer.add_scalar(tag, value, record["step"])
        except Exception as error:  # it is not installed, a disk is full
            self.on = False
            warn(f"no curves for TensorBoard: {error}; training continues (or use --no-tensorboard)")

    def _open(self):
        """Begin with the first point: the import takes time, and a finished run has nothing to add."""
        from torch.utils.tensorboard import SummaryWriter

        self.folder.mkdir(mode=0o700, exist_ok=True)
        earlier = {*self.folder.iterdir()}
        # With purge_step TensorBoard drops the later points of earlier lives.
        writer = SummaryWriter(str(self.folder), purge_step=self.step + 1, flush_secs=CURVES_SECONDS)
        for path in {*self.folder.iterdir()} - earlier:
            path.chmod(0o600)
        return writer

    def close(self):
        if self.writer:
            with suppress(Exception):  # a disk is full
                self.writer.close()
