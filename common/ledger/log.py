"""What a person sees of a run: console lines or a bar, and TensorBoard; silent on all ranks but 0.

A log never stops a training: a closed pipe or a full disk costs lines, not steps.
"""
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from common.errors import Outlet, UserError
from common.ledger.metrics import Metrics
from common.options import Options

FORMATS = {"lr": ".2e", "loss": ".4f", "acc": ".3f"}


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
        self.console = Console(opts, state_step, total_steps)
        self.metrics = Metrics(opts.run_dir, state_step, self.note)
        self.board = Board(opts.run_dir, state_step, self.note) if opts.tensorboard else None
        for record in records:
            if record.get("step", state_step + 1) <= state_step:
                self._keep(record)
        self.began = time.monotonic()
        self.previous = (self.began, state_step, None, 0)  # time, step, epoch, position of the line before

    def start(self, lines: Iterable[str]) -> None:
        """Print the facts of this life, once; the clock of samples/s starts here."""
        if self.speaks:
            for text in lines:
                self.note(text)
            self.began = time.monotonic()
            self.previous = (self.began, *self.previous[1:])

    def step(self, state: Any, record: Mapping[str, Any]) -> None:
        """Log a step: `record` holds numbers by name (loss, lr, acc, ...); tensors are read here."""
        if not self.speaks:
            return
        values = {name: _number(value) for name, value in record.items()}
        self._keep({"step": state.step, "epoch": state.epoch} | values)
        now, position = time.monotonic(), state.position
        before, step, epoch, start = self.previous
        steps = state.step - step
        samples = position - start if epoch == state.epoch else steps * self.opts.global_batch_size
        self.previous = (now, state.step, state.epoch, position)
        parts = [f"{name} {values[name]:{FORMATS.get(name, ',' if isinstance(values[name], int) else '.4g')}}"
                 for name in dict.fromkeys((*FORMATS, *values))
                 if name not in ("step", "epoch") and isinstance(values.get(name), (int, float))]
        if now > before and samples > 0:
            parts.append(f"{samples / (now - before):,.0f} samples/s")
        where = f"step {state.step}"
        if self.total:
            left = (self.total - state.step) * (now - self.began) / max(1, state.step - self.first)
            where += f"/{self.total}  eta {timedelta(seconds=round(max(0, left)))}"
        progress = f"epoch {state.epoch + 1}/{self.opts.epochs}"
        self.console.step(state.step, "  ".join([progress, where, *parts]))

    def evaluation(self, state: Any, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation, as {"val_acc", "val_loss"}."""
        if not self.speaks:
            return
        values = {name: _number(value) for name, value in metrics.items()}
        lists = [f"{name} [{' '.join(map(str, value))}]" for name, value in values.items()
                 if isinstance(value, list)]
        values = {name: value for name, value in values.items() if not isinstance(value, list)}
        self._keep({"step": state.step} | values)
        self.note("  ".join([f"step {state.step}", *(f"{name} {value:.4f}" for name, value in values.items()
                                                     if isinstance(value, float)), *lists]))
        # the time of an evaluation does not count as time of steps
        self.previous = (time.monotonic(), state.step, state.epoch, state.position)

    def note(self, text: str) -> None:
        if self.speaks:
            self.console.line(text)

    def close(self) -> None:
        """Write what is left; may be called twice."""
        if self.speaks:
            if self.board:
                self.board.close()
            self.metrics.close()
            self.console.close()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _keep(self, line):
        if self.metrics.write(line) and self.board:
            self.board.put(line)


def _number(value):
    return value.item() if hasattr(value, "item") else value


class Console:
    """Lines, or a bar below them on a terminal."""

    def __init__(self, opts, step, total):
        self.out, self.bar = Outlet(sys.stdout), None
        able = self.out.isatty() and os.environ.get("TERM") != "dumb"
        if opts.progress == "on" or opts.progress == "auto" and able:
            try:
                from tqdm import tqdm
                # Some terminals report a width or height of 0 (serial lines): tqdm would show nothing.
                size = os.get_terminal_size(self.out.fileno()) if self.out.isatty() else None
                blind = size and not all(size)
                shape = {"dynamic_ncols": True}
                if blind:
                    shape = {"ncols": size.columns or 80, "nrows": size.lines or 24}
                self.bar = tqdm(total=total or None, initial=step, file=self.out,
                                bar_format="{percentage:3.0f}%|{bar:10}| {desc}", **shape)
            except ImportError:
                self.line("tqdm is not installed: lines instead of a bar (pip install tqdm)")

    def step(self, step, text):
        if self.bar is None:
            self.line(text)
        else:
            self.bar.n = step
            self.bar.set_description_str(text)

    def line(self, text):
        if self.bar is not None:
            self.bar.clear()
        self.out.write(text + "\n")
        self.out.flush()
        if self.bar is not None:
            self.bar.refresh()

    def close(self):
        if self.bar is not None:
            self.bar.close()


class Board:
    """RUN/tb for TensorBoard, written by a thread: importing it takes seconds, and no step should wait."""

    def __init__(self, run_dir, step, note):
        self.folder, self.step, self.note = os.path.join(run_dir, "tb"), step, note
        self.queue, self.thread = queue.SimpleQueue(), None
        if os.path.islink(self.folder):
            raise UserError(f"{self.folder} is a link; it is not followed\nremove it")

    def put(self, line):
        if self.thread is None:  # not earlier: a finished run with nothing to add imports nothing
            self.thread = threading.Thread(target=self._work, daemon=True, name="tensorboard")
            self.thread.start()
        if self.thread.is_alive():
            self.queue.put((time.time(), line))

    def close(self):
        if self.thread is not None:
            self.queue.put(None)
            self.thread.join(10)  # a rescue has little time; metrics.jsonl has all of it

    def _work(self):
        try:
            from torch.utils.tensorboard import SummaryWriter
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            # TensorBoard then drops the later points of earlier lives.
            with SummaryWriter(self.folder, purge_step=self.step + 1) as writer:
                for entry in os.scandir(self.folder):
                    if entry.is_file(follow_symlinks=False):
                        os.chmod(entry.path, 0o600)
                while item := self.queue.get():
                    when, line = item
                    for name, value in line.items():
                        if name not in ("step", "epoch") and isinstance(value, (int, float)):
                            tag = name.replace("_", "/", 1) if name.startswith("val_") else f"train/{name}"
                            writer.add_scalar(tag, value, line["step"], when)
                    if self.queue.empty():
                        writer.flush()  # a kill costs each curve one point at most
        except ImportError:
            self.note("tensorboard is not installed: no curves "
                      "(pip install tensorboard, or --no-tensorboard)")
        except Exception as error:  # a full disk, say
            self.note(f"{self.folder} cannot be written ({error}); training continues without curves")
