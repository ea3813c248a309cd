"""Files of JSON lines: a run's ledger, and the audit of a rank. A full disk costs lines, never a step."""
import errno
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import say


def warn(text: str) -> None:
    say(f"warning: {text}", sys.stderr)


class Lines:
    """A file of JSON objects, one per line; append() survives a failing disk and never joins two lines.

    `warn` gets the text of the first failure; later lines are tried all the same, as a disk may be emptied.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = warn) -> None:
        self.path = path
        self.warn: Callable[[str], None] | None = warn
        self.fd: int | None = None

    def append(self, record: dict[str, Any]) -> None:
        line = (json.dumps(record, default=_plain) + "\n").encode()
        try:
            if self.fd is None:
                self.fd = self.open()
            # One write with O_APPEND: the lines of this machine's processes stay whole, also of a killed one.
            # Two NFS clients may overwrite each other.
            if os.write(self.fd, line) < len(line):
                raise OSError("the disk took only part of a line")
        except OSError as error:
            self.give_up(error)

    def open(self) -> int:
        """Follows no planted link; ends a last line that a full disk or a power cut has torn."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.ELOOP, "no plain file")
        if status.st_size and os.pread(fd, 1, status.st_size - 1) != b"\n":
            os.write(fd, b"\n")
        return fd

    def give_up(self, error: OSError) -> None:
        self.close()
        if self.warn:
            reason = error.strerror or error
            self.warn(f"{self.path} cannot be written ({reason}); training continues without these lines")
        self.warn = None

    def close(self) -> None:
        if self.fd is not None:
            with suppress(OSError):  # a network disk may report only now that it is full
                os.close(self.fd)
        self.fd = None


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else str(value)


def read(path: Path, name: str = "event") -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines that have this name; torn lines are left out."""
    with open(path, "rb") as file:
        for line in file:
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            if isinstance(record, dict) and name in record:
                yield record


class Ledger:
    """RUN/ledger.jsonl. Fields ending in `_s` are seconds; account.py tells what the events mean."""

    def __init__(self, run_dir: Path | str) -> None:
        self.lines = Lines(Path(run_dir) / "ledger.jsonl")
        self.saved = 0, time.time()  # step and time of the newest save

    def event(self, name: str, /, **fields: Any) -> None:
        if name in ("save", "rescue"):
            self.saved = fields["step"], time.time()
        self.lines.append({"t": round(time.time(), 3), "event": name, **fields})

    def death(self, rank: int, why: str, **fields: Any) -> None:
        """Another process died; not noted before the run has begun."""
        if self.lines.path.exists():
            self.event("death", rank=rank, why=why, **fields)


class Audit:
    """What one rank trained on in one life: begin() before gradients are exchanged, done() after the update.

    When one rank has finished a step, all ranks had begun it: the samples of dead ranks are on disk too.
    """

    def __init__(self, run_dir: Path | str, life: str, rank: int, on: bool = True) -> None:
        self.on = on
        self.made = 0  # the newest step that is made
        self.lines = Lines(Path(run_dir) / "audit" / f"life-{life}-rank{rank}.jsonl")

    def begin(self, step: int, epoch: int, position: int, ids: list[int]) -> None:
        if self.on:
            self.made = self.made or step - 1
            self.lines.append({"event": "begin", "step": step, "epoch": epoch, "position": position,
                               "ids": ids})

    def done(self, step: int) -> None:
        """`step` is the newest whole one: a GPU may end it after the next one has begun."""
        if self.on and step > self.made:
            self.lines.append({"event": "done", "step": step})
            self.made = step
