"""Curves elsewhere: RUN/tb for TensorBoard, and a person's own function (--log-to) for any other tracker.

A thread does it: importing TensorBoard takes seconds, and no step should wait for a tracker.
"""
import contextlib
import json
import os
import queue
import threading
import time

from common.errors import UserError, one_line
from common.ledger.account import read
from common.ledger.lines import kind_of
from common.ledger.status import replace_file
from common.options import call_user


class Board:
    """Call put() with each row of metrics.jsonl, and close() at the end."""

    def __init__(self, opts, step, note):
        self.folder, self.step, self.note = os.path.join(opts.run_dir, "tb"), step, note
        self.queue, self.thread = queue.SimpleQueue(), None
        self.curves = opts.tensorboard
        self.tracker = Tracker(opts.run_dir, opts.log_to, note) if opts.log_to else None
        if self.curves and os.path.islink(self.folder):
            raise UserError(f"{self.folder} is a link; it is not followed\nremove it")
        if self.tracker:
            self._start()  # the life before may have written a row and not passed it on

    def put(self, line, facts=()):
        """`facts` are for TensorBoard only."""
        if self.curves or self.tracker:
            self._start()  # not earlier: a finished run with nothing to add imports nothing
            self.queue.put((time.time(), line, dict(facts)))

    def close(self):
        if self.thread is not None:
            self.queue.put(None)
            self.thread.join(10)  # a rescue has little time; metrics.jsonl has all of it

    def _start(self):
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True, name="tensorboard")
            self.thread.start()

    def _work(self):
        writer = None
        if self.tracker:
            self.tracker.catch_up()
        while item := self.queue.get():
            when, line, facts = item
            if self.tracker:
                self.tracker.tell(line)
            try:
                if self.curves:
                    writer = writer or self._open()
                    self._draw(writer, when, line, facts)
            except Exception as error:  # a full disk, say
                self.curves = False
                self.note("tensorboard is not installed: no curves (pip install tensorboard, or "
                          "--no-tensorboard)" if isinstance(error, ImportError) else
                          f"{self.folder} cannot be written ({error}); training continues without curves")
        if writer:
            with contextlib.suppress(Exception):
                writer.close()

    def _open(self):
        from torch.utils.tensorboard import SummaryWriter
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        # TensorBoard then drops the later points of earlier lives.
        writer = SummaryWriter(self.folder, purge_step=self.step + 1)
        for entry in os.scandir(self.folder):
            if entry.is_file(follow_symlinks=False):
                os.chmod(entry.path, 0o600)
        return writer

    def _draw(self, writer, when, line, facts):
        for name, value in line.items():
            if name not in ("step", "epoch") and isinstance(value, int | float):
                tag = name.replace("_", "/", 1) if name.startswith("val_") else f"train/{name}"
                writer.add_scalar(tag, value, line["step"], when)
        for name, value in facts.items():
            writer.add_scalar(f"run/{name}", value, line["step"], when)
        if self.queue.empty():
            writer.flush()  # a kill costs each curve one point at most


class Tracker:
    """Calls a person's function with each row of metrics.jsonl, in order and once.

    RUN/log-to.json holds the last steps it was called with. If a process is killed after it wrote a row and
    before it called the function, the next life calls it.
    """

    def __init__(self, run_dir, spec, note):
        self.rows, self.path = os.path.join(run_dir, "metrics.jsonl"), os.path.join(run_dir, "log-to.json")
        self.spec, self.note, self.told = spec, note, {"train": -1, "val": -1}
        with contextlib.suppress(OSError):
            for told in read(self.path, "train"):
                self.told |= {kind: step for kind, step in told.items() if isinstance(step, int)}

    def catch_up(self):
        with contextlib.suppress(OSError):
            for line in read(self.rows, "step"):
                with contextlib.suppress(TypeError):  # no row
                    self.tell(line)

    def tell(self, line):
        if self.spec is None or line["step"] <= self.told[kind_of(line)]:
            return
        try:
            call_user(self.spec, dict(line))
            self.told[kind_of(line)] = line["step"]
            replace_file(self.path, json.dumps(self.told).encode())
        except Exception as error:
            why = one_line(error.__cause__ or error)
            self.note(f"--log-to {self.spec}: {why}; it is called again in the next life")
            self.spec = None
