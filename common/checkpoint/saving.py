"""How a copied state gets to the disk: a thread writes it, reads it back, and lets old ones go."""
import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common.checkpoint.commit import Hurried, Writer
from common.checkpoint.files import Damaged, room
from common.checkpoint.handover import Handover
from common.checkpoint.manifest import checkpoints
from common.checkpoint.replicas import note_digest
from common.checkpoint.tensor_file import TensorFile
from common.errors import UserError
from common.ledger import Ledger
from common.options import Options

MOST_FAILURES = 3     # saves that fail in a row: then the run stops with exit code 4


class Saving:
    """The half of CheckpointStore behind a save."""

    opts: Options
    ledger: Ledger | None
    report: Callable[[str], None]
    root: Path
    writer: Writer
    handover: Handover
    wait: Callable[..., None]
    save: Callable[[Any], None]

    def __init__(self) -> None:
        self.state: Any = None
        self.images: dict[str, TensorFile] = {}
        self.background = Background()
        self.committed, self.agreed = -1, None  # steps
        self.saved: Any = None  # the facts that were saved last
        self.saved_at, self.error, self.failures = time.monotonic(), None, 0

    def check(self) -> None:
        """After each step: notes its digest if one is due. Three failed saves in a row end the run."""
        self.handover.begin(self)
        note_digest(self)
        if self.error:
            error, self.error = self.error, None
            if isinstance(error, UserError):
                raise error
            self.report(f"save failed ({self.failures} in a row), training goes on: {error}")
            if self.failures >= MOST_FAILURES:
                raise UserError(
                    f"{self.failures} saves in a row have failed, the last one: {error}\n"
                    f"the newest good checkpoint is step {self.committed}; make room, then start again",
                    code=4)

    def close(self) -> None:
        """Ends the writer thread, once the last save is on the disk or has failed three times."""
        self.handover.begin(self)
        self.wait()
        while self.error:
            self.check()
            self.save(self.state)
            self.wait()
        self.background.close()

    def _snapshot(self, state):
        for part, tensors in state.tensors().items():
            self.images[part].copy(tensors)
        return state.facts()

    def _write_noting(self, facts, images):
        """Saves, and returns what is left to do once the images are free: training need not wait for that."""
        before, began = self.committed, time.monotonic()
        with self._noting():
            folder = self._commit(facts, images) if images else self._write(facts)
            return lambda: self._confirm(facts, folder, before, began)

    @contextlib.contextmanager
    def _noting(self):
        try:
            yield
        except Exception as error:
            self.failures += 1
            self.saved = None  # so that the next interval tries again
            if isinstance(error, OSError):
                needed = sum(image.size for image in self.images.values())
                error = room(error, error.filename or self.root, needed)
            self.error = error

    def _write(self, facts):
        """The folder of the new checkpoint, None if parts of other ranks are missing; or raises."""
        for image in self.images.values():
            image.wait()
        self.refuse_infinite(self.images["model"], facts)
        return self._commit(facts, self.images)

    def refuse_infinite(self, image: TensorFile, facts: dict[str, Any]) -> None:
        if name := image.not_finite(self.state.names.values()):
            self.state.condemn(f"step {facts['step']}: {name} is no longer finite")

    def _commit(self, facts, images):
        if folder := self.writer.commit(images, facts):
            self.committed = facts["step"]
        return folder

    def _confirm(self, facts, folder, before, began):
        """Reads the checkpoint back; only then deletes older ones."""
        with self._noting():
            try:
                if folder:
                    self.writer.read_back(facts["step"], folder)
            except Hurried:
                return  # older ones stay
            except (Damaged, OSError):
                self.committed = before
                raise
            self.failures = 0
            if folder:
                self.let_go(facts)
                if self.ledger:
                    self.ledger.event("save", step=facts["step"], save_s=round(time.monotonic() - began, 3))

    def let_go(self, facts: dict[str, Any]) -> None:
        """Deletes all but the newest `keep`, --keep-every, the best, the newest on which all ranks agreed."""
        self.handover.free(facts["step"])
        last, every = -1 if self.agreed is None else self.agreed, self.opts.keep_every
        steps = [step for step, _ in checkpoints(self.root)]
        agreed = [step for step in steps if step <= last][:1]
        for_good = [step for step in steps if every and step % every == 0]
        self.writer.delete_old(self.opts.keep, {facts["step"], facts["best"]["step"], *agreed, *for_good})


class Background:
    """One thread for all saves: starting one makes training wait. `busy` is held while images are in use."""

    def __init__(self):
        self.busy, self.work, self.thread = threading.Lock(), queue.SimpleQueue(), None
        self.left, self.quiet = 0, threading.Condition()  # saves that are not over
        self.closing = False

    def do(self, task):
        """Hands the task to the thread and returns at once."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, daemon=True, name="writer")
            try:
                self.thread.start()
                atexit.register(self.close)
            except RuntimeError:  # no thread can be started
                self.thread = None
                return task()
        self.work.put(task)

    def save(self, act):
        """Like `do`; the caller has taken `busy`. `act` returns what is left to do once that is free."""
        with self.quiet:
            self.left += 1
        self.do(partial(self._save, act))

    def wait(self, timeout=None, afterwards=True):
        """Waits until the images are free, and until what is done afterwards is over; False if in vain."""
        if afterwards:
            with self.quiet:
                return self.quiet.wait_for(lambda: not self.left, timeout)
        if self.busy.acquire(timeout=-1 if timeout is None else timeout):
            self.busy.release()
            return True
        return False

    def close(self):
        self.wait()
        self.closing = True
        if self.thread:
            self.work.put(None)
            self.thread.join()
            self.thread = None
            atexit.unregister(self.close)

    def _serve(self):
        while task := self.work.get():
            task()

    def _save(self, act):
        try:
            try:
                afterwards = act()
            finally:
                self.busy.release()
            if afterwards:
                afterwards()
        finally:
            with self.quiet:
                self.left -= 1
                self.quiet.notify_all()
