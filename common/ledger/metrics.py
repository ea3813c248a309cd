"""RUN/metrics.jsonl: an object per logged step and per evaluation, each there once after any number of
restarts.
"""
import errno
import json
import math
import os
import stat

from common.errors import UserError


class Metrics:
    """The file as a life that resumed at `step` must find it: no later line, no torn line, no step twice.

    `note` is told, once, when the disk refuses: training goes on without the file.
    """

    def __init__(self, run_dir, step, note):
        self.path, self.note, self.fd, self.torn = os.path.join(run_dir, "metrics.jsonl"), note, None, False
        self.last = {"train": -1, "val": -1}  # the newest step of each kind of line
        try:
            os.makedirs(run_dir, mode=0o700, exist_ok=True)
            self.fd = _open(self.path)
            if not stat.S_ISREG(os.fstat(self.fd).st_mode):
                raise OSError(errno.ELOOP, "no plain file")
            with open(os.dup(self.fd), "rb") as file:
                lines = file.readlines()
            kept = [line for line in lines if self._belongs(line, step)]
            if kept != lines or lines and not lines[-1].endswith(b"\n"):
                with open(f"{self.path}.new", "wb") as aside:  # a log needs no fsync
                    aside.writelines(line.removesuffix(b"\n") + b"\n" for line in kept)
                os.replace(aside.name, self.path)
                os.close(self.fd)
                self.fd = _open(self.path)
        except OSError as error:
            self.close()
            if error.errno == errno.ELOOP:
                raise UserError(f"{self.path} is a link or no plain file: it is not followed\nremove it") from None
            self._give_up(error)

    def write(self, line):
        """Appends a line with its "step"; False if that step is there already."""
        kind = _kind(line)
        if line["step"] <= self.last[kind]:
            return False
        self.last[kind] = line["step"]
        if self.fd is not None:
            # JSON has no nan and no infinity: null stands for both.
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
            data = json.dumps(finite).encode() + b"\n"
            if self.torn:  # a full disk cut the line before: do not join it
                data = b"\n" + data
            try:
                # one write a line: a crash tears the last at most
                self.torn = os.write(self.fd, data) < len(data)
            except OSError as error:
                self._give_up(error)
        return True

    def close(self):
        if self.fd is not None:
            os.close(self.fd)
        self.fd = None

    def _belongs(self, line, step):
        """Whether a line is whole, of the past that this life goes on from, and the first of its step."""
        try:
            line = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            return False
        belongs = self.last[_kind(line)] < line["step"] <= step
        if belongs:
            self.last[_kind(line)] = line["step"]
        return belongs

    def _give_up(self, error):
        """Says so once; the next line is tried all the same, a disk may be emptied."""
        if self.note:
            self.note(f"{self.path} cannot be written ({error.strerror}); training goes on without these lines")
        self.note = None


def _kind(line):
    return "val" if any(name.startswith("val_") for name in line) else "train"


def _open(path):
    """Neither follows a planted link nor waits for the reader of a planted FIFO."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
