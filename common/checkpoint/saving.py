"""How a copied state gets to the disk: a thread writes it, reads it back, and lets old ones go."""
import functools
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from common.checkpoint.commit import Leaving, Writer
from common.checkpoint.fence import HUNG_SECONDS
from common.checkpoint.files import room
from common.checkpoint.manifest import checkpoints
from common.checkpoint.memory import Memory
from common.checkpoint.tensor_file import Live, TensorFile, not_finite
from common.errors import UserError
from common.ledger import Ledger
from common.options import Options
from common.world import fingerprint_of

MOST_FAILURES = 3     # saves that fail in a row: then the run stops with exit code 4


class Saving:
    """The part of CheckpointStore that saves."""

    opts: Options
    ledger: Ledger | None
    report: Callable[[str], None]
    root: Path
    writer: Writer
    memory: Memory
    fence: Any
    layout: Any

    def __init__(self) -> None:
        self.state: Any = None
        self.images: dict[str, TensorFile] = {}
        self.pool: futures.Executor | None = None
        self.act: Any = None  # the function of the last save: it writes, then reads back
        self.jobs: list[futures.Future] = []  # that save, on its thread
        self.written = threading.Event()  # once it has written
        self.written.set()
        self.touched: list[futures.Future] | None = None  # the images' pages are asked for before a save
        self.unsaved = False  # this disk lacks the state that was loaded
        self.committed, self.agreed = -1, None  # steps
        self.saved: Any = None  # the facts that were saved last
        self.saved_at, self.error, self.failures = time.monotonic(), None, 0

    @property
    def writes(self) -> bool:
        """Whether this rank saves."""
        return self.layout.writes if self.layout.parts > 1 else bool(self.fence)

    def save(self, state: Any) -> None:
        """Copies the state, the writer thread does the rest; waits for the save before. No collective."""
        state.updates.settle()  # not under the lock: a rescue needs it if a collective hangs
        if not self.writes or self.opts.eval_only or state.half_updated or state.facts() == self.saved:
            return
        self.wait(read_back=False)
        with state.lock:
            for part, tensors in state.tensors().items():
                if odd := tensors.keys() ^ self.layout.tensors[part].keys():
                    raise UserError(f"{part}: {min(odd)} came or went after the first step\n"
                                    "no checkpoint would hold it: make it in the first step, as a tensor")
                self.images[part].copy(tensors)
            facts = state.facts()
        self.saved_at, self.saved, self.unsaved = time.monotonic(), facts, False
        self.writer.leaving = False
        written = threading.Event()
        act = functools.partial(self._job, facts, self.saved_at, written)
        # assigned at once: if `_do` raises (no thread can be started), nothing waits for this save
        self.act, self.written, self.jobs = act, written, [self._do(act)]

    def check(self) -> None:
        """After each step: notes its digest if one is due. Three failed saves in a row end the run."""
        self._note_digest()
        if self.touched is None:  # after the first step, which it would slow down
            self.touched = [self._do(image.touch) for image in self.images.values() if self.writes]
        if self.unsaved and all(done.done() for done in self.touched):
            self.save(self.state)
        if self.error:
            error, self.error = self.error, None
            if isinstance(error, UserError):
                raise error
            self.report(f"save failed ({self.failures} in a row), training goes on: {error}")
            if self.failures >= MOST_FAILURES:
                raise UserError(
                    f"{self.failures} saves in a row have failed, the last one: {error}\n"
                    + (f"the newest good checkpoint is step {self.committed}" if self.committed >= 0 else
                       "there is no good checkpoint yet") + "; make room, then start again",
                    code=4)

    def _note_digest(self):
        """--digest-every: a fingerprint of weights and optimizer, in the ledger; replay compares with it."""
        state, every = self.state, self.opts.digest_every
        if every and self.fence and self.ledger and state.step % every == 0:
            sums = {part: fingerprint_of(tensors) for part, tensors in state.tensors().items()}
            self.ledger.event("digest", step=state.step, **sums)

    def close(self) -> None:
        """Ends the writer thread, once the last save is on the disk or has failed three times."""
        if self.unsaved:
            self.save(self.state)
        self.wait()
        while self.error:
            self.check()
            self.save(self.state)
            self.wait()
        if self.pool:
            self.pool.shutdown()

    def wait(self, read_back: bool = True) -> None:
        """Waits until the save under way is on the disk or has failed. A slow disk is no hang."""
        moved, since = None, time.monotonic()
        while not self.written.wait(0.1) or read_back and futures.wait(self.jobs, 0.1).not_done:
            if moved != self.writer.moved:
                moved, since = self.writer.moved, time.monotonic()
            if self.state:
                self.state.saving = True
                self.state.progress += time.monotonic() - since < HUNG_SECONDS
        if self.state:
            self.state.saving = False

    def overtake(self) -> None:
        """A rescue waits until the last save is on the disk, not until the one before it was read back."""
        self.writer.leaving = True
        if self.jobs and self.jobs[0].cancel():
            self.act(read_back=False)
        self.wait(read_back=False)

    def write_live(self, writer: Writer, state: Any) -> Path | None:
        """Writes the tensors themselves; the caller holds them still."""
        found, facts = state.snapshot()
        return self._write(writer, facts, {part: Live(self.images[part], own) for part, own in found.items()})

    def _do(self, act, *args):
        """One thread for all saves: starting one makes training wait."""
        self.pool = self.pool or futures.ThreadPoolExecutor(1, "writer")
        return self.pool.submit(act, *args)

    def _write(self, writer, facts, images):
        """The folder of the new checkpoint, None if parts of other ranks are missing; or raises."""
        if name := not_finite(images["model"].views, self.state.names.values()):
            self.state.condemn(f"step {facts['step']}: {name} is no longer finite")
        return writer.commit(images, facts)

    def _job(self, facts, began, written, read_back=True):
        """Writes, reads back, and only then deletes older ones. Training waits for `written` alone."""
        before = self.committed
        try:
            for image in self.images.values():
                image.wait()
            if folder := self._write(self.writer, facts, self.images):
                self.committed = facts["step"]
                if not read_back:
                    return  # older ones stay
                written.set()
                self.writer.read_back(facts["step"], folder)
                self.let_go(facts)
                if self.ledger:
                    self.ledger.event("save", step=facts["step"], save_s=round(time.monotonic() - began, 3))
            self.failures = 0
        except Leaving:
            pass  # older ones stay
        except Exception as error:
            self.committed, self.saved = before, None  # so that the next interval tries again
            self.failures += 1
            if isinstance(error, OSError):
                needed = sum(image.size for image in self.images.values())
                error = room(error, error.filename or self.root, needed)
            self.error = error
        finally:
            written.set()

    def let_go(self, facts: dict[str, Any]) -> None:
        """Deletes all but the newest `keep`, --keep-every, the best, the newest on which all ranks agreed."""
        self.memory.free(facts["step"])
        last, every = -1 if self.agreed is None else self.agreed, self.opts.keep_every
        steps = [step for step, _ in checkpoints(self.root)]
        agreed = [step for step in steps if step <= last][:1]
        for_good = [step for step in steps if every and step % every == 0]
        self.writer.delete_old(self.opts.keep, {facts["step"], facts["best"]["step"], *agreed, *for_good})
