"""Files of JSON lines: a run's ledger and metrics, the audit of a rank. A full disk costs lines, no step."""
import errno
import json
import math
import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError, say
from common.ledger.status import Status, replace_file


class Lines:
    """A file of JSON objects, one per line; append() survives a failing disk and never joins two lines.

    `warn` gets the text of the first failure; later lines are tried all the same, as a disk may be emptied.
    append() returns whether the line is written.
    """

    def __init__(self, path, warn=lambda text: say(f"warning: {text}", sys.stderr)):
        self.path, self.warn, self.fd = Path(path), warn, None

    def append(self, record):
        line = (json.dumps(record, default=_plain) + "\n").encode()
        try:
            if self.fd is None:
                self.open()
            # One write with O_APPEND: the lines of this machine's processes stay whole, also of a killed one.
            # Two NFS clients may overwrite each other.
            if os.write(self.fd, line) < len(line):
                raise OSError("the disk took only part of a line")
            return True
        except OSError as error:
            self.give_up(error)
            return False

    def open(self):
        """Follows no planted link; ends a last line that a full disk or a power cut has torn."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            raise OSError(errno.ELOOP, "no plain file")
        size = os.fstat(self.fd).st_size
        if size and os.pread(self.fd, 1, size - 1) != b"\n":
            os.write(self.fd, b"\n")

    def give_up(self, error):
        self.close()
        if self.warn:
            reason = error.strerror or error
            self.warn(f"{self.path} cannot be written ({reason}); training continues without these lines")
        self.warn = None

    def close(self):
        fd, self.fd = self.fd, None
        if fd is not None:
            with suppress(OSError):  # a network disk may report only now that it is full
                os.close(fd)


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Ledger:
    """RUN/ledger.jsonl. Fields ending in `_s` are seconds; account.py says what the events mean."""

    def __init__(self, run_dir: Path | str) -> None:
        self.status = Status(run_dir)
        self.lines, self.saved = Lines(Path(run_dir) / "ledger.jsonl"), (0, time.time())

    def event(self, name: str, /, **fields: Any) -> None:
        if name in ("save", "rescue"):
            self.saved = fields["step"], time.time()
        self.lines.append({"t": round(time.time(), 3), "event": name, **fields})

    def death(self, rank: int, why: str, **fields: Any) -> None:
        """Another process died; not noted before the run has begun."""
        if self.lines.path.exists():
            self.event("death", rank=rank, why=why, **fields)

    def order(self, name: str, facts: dict[str, Any]) -> None:
        """Writes once what the order of samples depends on besides the seed: the audit needs it."""
        lines = Lines(self.lines.path.parent / "audit" / f"order-{name}.jsonl")
        if name and not lines.path.exists():
            lines.append({"event": "order", **facts})
            lines.close()


class Metrics:
    """RUN/metrics.jsonl, cleaned for a life that resumed at `step`: no later, no torn line, no step twice."""

    def __init__(self, run_dir, step, note):
        self.lines, self.on = Lines(Path(run_dir) / "metrics.jsonl", note), True
        self.last = {"train": -1, "val": -1}  # the newest step of each kind of line
        path = self.lines.path
        try:
            self.lines.open()
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if self._belongs(line, step)]
            if kept != lines:
                replace_file(path, b"".join(kept))  # a log needs no fsync
                self.lines.close()  # the first line opens the new file
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.lines.close()
                raise UserError(f"{path} is a link or no plain file: it is not followed\nremove it") from None
            self.lines.give_up(error)
            self.on = False  # a file that was not cleaned would hold steps twice

    def write(self, line):
        """Append a line with its "step"; False if the file has that step already."""
        if new := self._is_new(line):
            if self.on:
                # JSON has no nan and no infinity: null stands for both.
                self.lines.append({k: None if isinstance(v, float) and not math.isfinite(v) else v
                                   for k, v in line.items()})
        return new

    def _belongs(self, line, step):
        """Whether a line is whole, not later than `step`, and the first one of its step."""
        try:
            line = json.loads(line)
            return line["step"] <= step and self._is_new(line)
        except (ValueError, RecursionError, TypeError, KeyError):
            return False

    def _is_new(self, line):
        kind = kind_of(line)
        new = line["step"] > self.last[kind]
        self.last[kind] = max(self.last[kind], line["step"])
        return new


def kind_of(line):
    return "val" if any(name.startswith("val_") for name in line) else "train"


class Audit:
    """What one rank trained on in one life: begin() before gradients are exchanged, done() after the update.

    When one rank has finished a step, all ranks had begun it: the samples of dead ranks are on disk too.
    """

    def __init__(self, run_dir: Path | str, life: str, rank: int, on: bool = True) -> None:
        self.on, self.made, self.whole = on, 0, True  # the newest step that is made; whether no line is lost
        self.lines = Lines(Path(run_dir) / "audit" / f"life-{life}-rank{rank}.jsonl")

    def begin(self, step: int, epoch: int, position: int, ids: list[int]) -> None:
        if self.on:
            self.made = self.made or step - 1
            self._note({"event": "begin", "step": step, "epoch": epoch, "position": position, "ids": ids})

    def done(self, step: int) -> None:
        """`step` is the newest whole one: a GPU may end it after the next one has begun."""
        if self.on and step > self.made:
            self._note({"event": "done", "step": step})
            self.made = step

    def _note(self, record):
        """After a line was lost, notes that first: the audit then calls its step unproven, not missed."""
        self.whole = self.whole or self.lines.append({"event": "lost"})
        self.whole = self.lines.append(record) and self.whole
