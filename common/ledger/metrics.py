"""RUN/metrics.jsonl: an object per logged step and per evaluation, each written once despite any restarts."""
import errno
import json
import math
import os
from pathlib import Path

from common.errors import UserError
from common.ledger.lines import Lines


class Metrics:
    """The file, cleaned for a life that resumed at `step`: no later line, no torn line, no step twice.

    `note` gets one warning when the disk fails: training continues without the lines.
    """

    def __init__(self, run_dir, step, note):
        self.lines, self.on = Lines(Path(run_dir) / "metrics.jsonl", note), True
        self.last = {"train": -1, "val": -1}  # the newest step of each kind of line
        path = self.lines.path
        try:
            self.lines.open()
            with open(os.dup(self.lines.fd), "rb") as file:
                file.seek(0)
                lines = file.readlines()
            kept = [line for line in lines if self._belongs(line, step)]
            if kept != lines:
                with open(f"{path}.new", "wb") as aside:  # a log needs no fsync
                    aside.writelines(kept)
                os.replace(aside.name, path)
                self.lines.close()  # the first line opens the new file
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.lines.close()
                raise UserError(f"{path} is a link or no plain file: it is not followed\nremove it") from None
            self.lines.give_up(error)
            self.on = False  # a file that was not cleaned would hold steps twice

    def write(self, line):
        """Append a line with its "step"; False if the file has that step already."""
        kind = kind_of(line)
        if line["step"] <= self.last[kind]:
            return False
        self.last[kind] = line["step"]
        if self.on:
            # JSON has no nan and no infinity: null stands for both.
            self.lines.append({k: None if isinstance(v, float) and not math.isfinite(v) else v
                               for k, v in line.items()})
        return True

    def close(self):
        self.lines.close()

    def _belongs(self, line, step):
        """Whether a line is whole, not later than `step`, and the first one of its step."""
        try:
            line = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            return False
        belongs = self.last[kind_of(line)] < line["step"] <= step
        if belongs:
            self.last[kind_of(line)] = line["step"]
        return belongs


def kind_of(line):
    return "val" if any(name.startswith("val_") for name in line) else "train"
