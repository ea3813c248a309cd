"""Append-only files of JSON lines: the ledger of a run and the audit of one rank.

Nobody waits for them and nothing fails because of them: a full disk costs a warning and lines, never a
training step.
"""
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


class Lines:
    """A file of JSON objects, one a line; append() survives a failing disk and never glues two lines
    together.
    """

    def __init__(self, path):
        self.path, self.fd, self.warned = Path(path), None, False

    def append(self, record):
        line = (json.dumps(record, default=_plain) + "\n").encode()
        try:
            if self.fd is None:
                self._open()
            # One write: with O_APPEND the kernel puts it at the end as a whole, whoever else is writing on
            # this machine, and
            # a process killed before or after it leaves whole lines. Two clients of NFS may overwrite each
            # other's.
            if os.write(self.fd, line) < len(line):
                raise OSError("the disk took only part of a line")
        except OSError as error:
            self.close()
            if not self.warned:
                self.warned = True
                with suppress(OSError, ValueError):  # stderr may be as full, or as closed, as the disk
                    print(f"warning: {self.path}: {error}; training goes on, lines will be missing", file=sys.stderr)

    def _open(self):
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        size = os.fstat(self.fd).st_size
        if size and os.pread(self.fd, 1, size - 1) != b"\n":
            # a full disk or a power cut tore the last line: it must not swallow ours
            os.write(self.fd, b"\n")

    def close(self):
        fd, self.fd = self.fd, None
        if fd is not None:
            with suppress(OSError):  # network disks may say only here that they are full
                os.close(fd)


def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Ledger:
    """RUN/ledger.jsonl. Events named "life", "save" and "rescue" mean something to the report and carry
    `step`.

    Fields ending in `_s` are seconds and are added up by name; `steps_s` is the time in which steps were
    made. "left" is what a process says that leaves its life early, with the moments of its last whole step
    and of learning why.
    """

    def __init__(self, run_dir):
        self.lines = Lines(Path(run_dir) / "ledger.jsonl")

    def event(self, name, /, **fields):
        self.lines.append({"t": round(time.time(), 3), "event": name, **fields})


class Audit:
    """What one rank trained on in one life: begin() before gradients are exchanged, done() after the update.

    A step that anybody has finished was begun by all: what the dead had contributed is on disk too.
    """

    def __init__(self, run_dir, life, rank, on=True):
        self.on, self.lines = on, Lines(Path(run_dir) / "audit" / f"life-{life}-rank{rank}.jsonl")

    def begin(self, step, epoch, position, ids):
        if self.on:
            self.lines.append({"event": "begin", "step": step, "epoch": epoch, "position": position, "ids": ids})

    def done(self, step):
        if self.on:
            self.lines.append({"event": "done", "step": step})
