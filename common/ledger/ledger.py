"""What is written of a run, as lines of JSON. A full disk costs lines, never a step. No torch here."""

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import warn
from common.place import began

ENTRY_SECONDS = 60.0  # at most between two entries of a clock, or
ENTRY_SHARE = 0.01  # of the age of the life: a kill loses no more
BLOCK_BYTES = 1 << 16  # read at once
SHUT = -1  # in place of a file's descriptor


Record = dict[str, Any]  # a line of JSON


class Lines:
    """A file of JSON objects, one per line; append() survives a failing disk and never joins two lines.

    It warns of the first failure. Later lines are tried all the same, as a disk may be emptied.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warned = False
        self.fd = SHUT

    def append(self, record: Record) -> None:
        line = f"{json.dumps(record, default=str)}\n"
        try:
            if self.fd == SHUT:
                self.open()
            # One write with O_APPEND: the lines of this machine's processes stay whole, also of a killed one.
            # Two NFS clients may overwrite each other.
            if os.write(self.fd, line.encode()) < len(line):
                raise OSError("the disk took only part of a line")
        except OSError as error:
            self.give_up(error)

    def open(self) -> None:
        """Follow no planted link; end a last line that a full disk or a power cut has torn."""
        for folder in (self.path.parent.parent, self.path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o600)
        size = os.fstat(self.fd).st_size
        if size and os.pread(self.fd, 1, size - 1) != b"\n":
            os.write(self.fd, b"\n")

    def give_up(self, error: OSError) -> None:
        self.close()
        if not self.warned:
            warn(
                f"{self.path} cannot be written ({error.strerror or error}); "
                "training continues without these lines",
                of_this_rank=True,
            )
        self.warned = True

    def close(self) -> None:
        if self.fd != SHUT:
            with suppress(OSError):  # a network disk may report only now that it is full
                os.close(self.fd)
        self.fd = SHUT


def at_once(path: str, flags: int) -> int:
    """Open a file for `open`; a pipe that has its name keeps no reader waiting."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse(line: bytes, name: str = "event") -> Record | None:
    """Return the object in a line; None if the line is torn or odd, or the object lacks this name."""
    record = None
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
    if not isinstance(record, dict) or name not in record:
        return None
    is_right = isinstance(record.get("step", 0), int) and isinstance(record.get("t", 0), (int, float))
    return record if is_right else None


def lines_back(path):
    """Yield (its first byte, line) of a file, if it is there, the last one first; reads what is asked for."""
    with suppress(FileNotFoundError), open(path, "rb", opener=at_once) as file:
        start = file.seek(0, os.SEEK_END)
        data = b""
        while start:
            # of a line that is longer than a block as much again, or it would be copied block by block
            before = max(0, start - max(BLOCK_BYTES, len(data)))
            file.seek(before)
            data = file.read(start - before) + data
            start = before
            at = start + len(data)
            data, *lines = data.split(b"\n")
            for line in reversed(lines):
                at -= len(line)
                yield at, line
                at -= 1
        yield 0, data


class Ledger:
    """RUN/ledger.jsonl, of a machine without rank 0 ledger-HOST.jsonl: a network disk appends for one alone.

    Fields ending in `_s` are seconds; FIELDS in lives.py tells what an event needs. `life` and rank are in
    each event; an event's own fields win.
    """

    def __init__(self, run_dir: Path, rank: int = 0, local_rank: int = 0, **life: str) -> None:
        host = "" if rank == local_rank else f"-{socket.gethostname()}"
        self.lines = Lines(run_dir / f"ledger{host}.jsonl")
        self.writer = {"rank": rank} | life

    def event(self, name: str, /, **fields: object) -> None:
        self.lines.append({"t": round(time.time(), 3), "event": name} | self.writer | fields)


class Clock:
    """Measure where the time of a life goes; it began with its process, before the imports.

    After the first step each second goes to one bucket: data_wait, steps, evaluation, or save_stall, which is
    all else that follows a step.
    """

    def __init__(self) -> None:
        self.began = round(began(), 3)
        self.mark = time.monotonic()
        self.made = self.mark
        self.ledger: Ledger | None = None  # on rank 0, once the life is in it
        self.entered = 0.0  # the last entry; 0 before the first step
        self.step = 0
        self.spent = defaultdict(float)  # seconds since the last entry
        self.slow: Record = {}  # which rank is the slowest, and how many times the median it takes

    def timed(self, batches: Iterable) -> Iterator:
        """Yield the same batches, and measure the time between them."""
        self.add("save_stall")
        for batch in batches:
            self.add("data_wait")
            yield batch
            self.add("save_stall")
        self.add("data_wait")
        self.write_down()  # a kill in the evaluation costs no time of steps

    def add(self, bucket: str) -> None:
        """Add the time since the last call to this bucket; before the first step it belongs to the start."""
        now = time.monotonic()
        if self.entered:
            self.spent[bucket] += now - self.mark
        self.mark = now

    def stepped(self, step: int) -> None:
        """Note that a step is done."""
        if self.ledger is None:
            return
        self.add("steps")
        self.step = step
        if not self.entered:
            self.ledger.event("first_step", step=step)
            self.entered = self.mark
        age = self.mark - self.made  # a wall clock may be set back
        if self.mark - self.entered > min(ENTRY_SECONDS, 0.05 + ENTRY_SHARE * age):
            self.write_down()

    def write_down(self) -> None:
        """Make an entry in the ledger: the seconds since the last one."""
        if self.ledger is not None and self.spent:
            seconds = {f"{name}_s": round(s, 6) for name, s in self.spent.items()}
            self.ledger.event("steps", step=self.step, **seconds, **self.slow)
            self.spent.clear()
            self.entered = time.monotonic()
