"""RUN/control/: a file there asks a running training for something; it is removed when that is done."""
from contextlib import suppress
from pathlib import Path

NAMES = ("save", "evaluate", "stop", "stop-epoch")


class Control:
    """`wanted` here, then `agreed` by all ranks at one step, then `doing` since that step."""

    def __init__(self, run_dir):
        self.folder = Path(run_dir) / "control"
        self.wanted, self.agreed, self.doing = set(), set(), {}

    def open(self):
        with suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)

    def look(self, step, saved):
        """Call it on rank 0 from time to time, on a thread: a network disk may hang."""
        for name, since in list(self.doing.items()):
            if (saved if name == "save" else step - 1) >= since:
                self._remove(name)
        with suppress(OSError):
            self.wanted |= {path.name for path in self.folder.iterdir()} & set(NAMES) - set(self.doing)

    def agree(self, names, step):
        """All ranks do these from this step on."""
        self.doing |= dict.fromkeys(names, step)
        self.wanted -= set(names)
        self.agreed |= set(names)

    def take(self, name):
        """Whether it has been agreed on; once."""
        agreed = name in self.agreed
        self.agreed.discard(name)
        return agreed

    def close(self):
        for name in list(self.doing):
            self._remove(name)

    def _remove(self, name):
        with suppress(OSError):
            (self.folder / name).unlink()
        self.doing.pop(name, None)
