"""RUN/status.json says how the run is now, to a probe or a person; RUN/control/ asks something of it."""
import contextlib
import json
import os
import threading
import time
from pathlib import Path

from common.errors import UserError, note_reason

CONTROLS = ("save", "evaluate", "stop", "stop-epoch")  # a file of this name in RUN/control/
STOPPED = 143            # exit code: asked to stop, and saved
LOOK_EVERY_SECONDS = 0.5
FIELDS = ("state", "step", "total", "epoch", "eta_s", "world", "hosts", "life", "restarts", "last_save_step",
          "last_save_age_s", "samples_per_s", "goodput", "reason", "exit_code", "t")


class Control:
    """What a person asks of a training: `wanted` on this rank, `agreed` by all, `doing` since which step."""

    def __init__(self, run_dir):
        self.folder = Path(run_dir) / "control"
        self.wanted, self.agreed, self.doing = set(), set(), {}

    def look(self, step, saved):
        """Call it on rank 0 from time to time, on a thread: a network disk may hang."""
        self.close([name for name, since in list(self.doing.items())
                    if (saved if name == "save" else step - 1) >= since])
        with contextlib.suppress(OSError):
            self.wanted |= {path.name for path in self.folder.iterdir()} & set(CONTROLS) - set(self.doing)

    def agree(self, names, step):
        """All ranks do these from this step on."""
        self.doing |= dict.fromkeys(names, step)
        self.wanted -= set(names)
        self.agreed |= set(names)

    def take(self, name):
        """Whether all ranks have agreed on this; True once for each request."""
        agreed = name in self.agreed
        self.agreed.discard(name)
        return agreed

    def close(self, names=CONTROLS):
        for name in names:
            if self.doing.pop(name, None) is not None:
                with contextlib.suppress(OSError):
                    (self.folder / name).unlink()


class Status:
    """A thread writes what `look()` returns, on rank 0; tell() and end() may be called on any rank."""

    def __init__(self, run_dir):
        self.path = Path(run_dir) / "status.json"
        self.control = Control(run_dir)
        self.lock, self.over, self.look = threading.RLock(), threading.Event(), dict

    def start(self, look):
        self.look = look
        with contextlib.suppress(OSError):
            self.control.folder.mkdir(mode=0o700, exist_ok=True)
        self._write(look())
        threading.Thread(target=self._work, daemon=True, name="status").start()

    def end(self, reason, code):
        """Writes how this process ends; nothing is written after that."""
        state = {0: "done", STOPPED: "stopping"}.get(code, "failed")
        if code:
            note_reason(reason)
        self.over.set()
        self.control.close()
        with self.lock:
            known = self.look()
            with contextlib.suppress(OSError, UserError):
                known = read_status(self.path.parent) | known
            self._write(known | {"state": state, "reason": reason, "exit_code": code})

    def _work(self):
        while not self.over.wait(LOOK_EVERY_SECONDS):
            facts = self.look()
            self.control.look(facts.get("step", 0), facts.get("last_save_step", 0))
            with self.lock:
                self.over.is_set() or self._write(facts)

    def _write(self, facts):
        with contextlib.suppress(OSError):  # a full disk costs a status, never a step
            facts = dict.fromkeys(FIELDS) | facts | {"t": round(time.time(), 3)}
            replace_file(self.path, json.dumps(facts).encode())


def read_status(run_dir):
    """The content of RUN/status.json, with every field; UserError if there is none or it is damaged."""
    path = Path(run_dir) / "status.json"
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        return dict.fromkeys(FIELDS) | status | {"t": float(status["t"])}
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} does not exist\nthe run has not begun, or is of an older version") from None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise UserError(f"{path} is damaged\na training writes it anew within a second") from None


def prometheus(status, run_dir):
    """Yield lines in the format of node-exporter's text files; the name of the run is a label."""
    run = json.dumps(os.path.basename(os.path.abspath(run_dir)), ensure_ascii=False)
    for name, value in status.items():
        if isinstance(value, int | float):
            yield f"# TYPE training_{name} gauge"
            yield f"training_{name}{{run={run}}} {value}"
    yield "# TYPE training_state gauge"
    yield f"training_state{{run={run},state={json.dumps(status.get('state'))}}} 1"


def replace_file(path: Path | str, data: bytes, sync: bool = False) -> None:
    """Replaces a small file: a reader finds it old or new, with `sync` after a power loss, too."""
    aside = f"{path}.{os.getpid()}.new"
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(fd)
        os.rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
