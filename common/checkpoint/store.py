"""The store on disk: atomic, asynchronous, verified, fenced.

commit.py explains the crash points of a save, fence.py who may write, manifest.py what a load checks.
"""
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common.checkpoint.commit import Background, Hurried, Writer
from common.checkpoint.fence import HUNG_SECONDS
from common.checkpoint.files import Damaged, room
from common.checkpoint.handover import Handover
from common.checkpoint.identity import marks, versions
from common.checkpoint.load import choices_at, load_newest, settle, take
from common.checkpoint.manifest import checkpoints, folder_name, is_there
from common.checkpoint.owner import claim
from common.checkpoint.replicas import agree
from common.checkpoint.tensor_file import TensorFile
from common.errors import UserError, say
from common.ledger import Ledger
from common.options import Options
from common.world import World, same_everywhere

MOST_FAILURES = 3     # saves that fail in a row: then the run stops with exit code 4


class CheckpointStore:
    """Of the processes that see one run folder, one owns it and saves; the others save only in a rescue."""

    def __init__(self, opts: Options, world: World, fingerprint: str = "", ledger: Ledger | None = None,
                 report: Callable[[str], None] = say):
        self.opts, self.world, self.fingerprint = opts, world, fingerprint
        self.ledger, self.report = ledger, report
        self.run_dir, self.root = opts.run_dir, opts.run_dir / "checkpoints"
        self.writer = Writer(self.root, self.root / f".life-{world.life}",
                             {"life": world.life} | marks(opts, world, fingerprint))
        self.fence: Any = None
        self.state: Any = None
        self.images: dict[str, TensorFile] = {}
        self.background, self.handover = Background(), Handover(opts.memory_tier)
        self.committed, self.agreed = -1, None  # steps
        self.saved: Any = None  # the facts that were saved last
        self.saved_at, self.error, self.failures = time.monotonic(), None, 0

    # ---- at the start of a life: own the folder, load, compare the ranks ---------------------------
    def restore(self, state: Any) -> str | None:
        """Loads the newest checkpoint that verifies on any node; returns its name, or None.

        Call on every rank.
        """
        self.state = state
        same_everywhere(self.world, versions(self.opts, self.fingerprint))
        self.fence = claim(self.opts, self.world, self.fingerprint, self.report)
        self.writer.renew = self.fence and self.fence.renew
        self.images = state.images = {part: TensorFile(tensors) for part, tensors in state.tensors().items()}
        source = self.handover.load(self) or self._load_from_disk()
        for image in self.images.values():
            image.open(touch=False) if self.fence else image.close()
        self.agree(state)
        return source

    def _load_from_disk(self):
        state, source, found = self.state, None, self._load(checkpoints(self.root), "own")
        if found.step >= 0:
            source = f"checkpoints/{folder_name(found.step)}"
            if self.fence:
                settle(self, found)
            self.saved = state.facts()
        elif found.damaged:
            raise UserError(
                f"{self.root}: {found.damaged} checkpoints found, none verifies "
                f"(python -m common.checkpoint {self.run_dir} says why)\n"
                "use --resume none to start afresh (they are kept aside), or another --run-dir", code=3)
        elif self.opts.resume not in ("auto", "none"):
            source = self.opts.resume
            found = self._load(choices_at(source), "given")
            if found.step < 0:
                raise UserError(f"--resume {source}: {found.damaged} checkpoints, none verifies", code=3)
        elif self.opts.init_from:
            source = self.opts.init_from  # the net was built with these weights
            if afresh := [n for n in state.tensors()["model"] if n.startswith(self.opts.init_skip)]:
                source += f"; {', '.join(afresh)} begin afresh"
        return source

    def agree(self, state: Any) -> None:
        """Compares the replicas' weights; if they differ, restarts from the last step on which all agreed."""
        agree(self, state)

    def _load(self, choices, key):
        """Loads the newest of all nodes' `choices` that verifies; its step is -1 if there is none."""
        found = load_newest(self.world, choices if self.fence else None, self.images, key, self.report)
        if found.step >= 0:
            self.take(self.images, found.facts)
        return found

    def take(self, images: dict[str, TensorFile], facts: dict[str, Any]) -> None:
        """Loads the state from these images."""
        tensors = {part: image.views for part, image in images.items()}
        take(self.state, tensors, facts, self.fingerprint, self.fence and self.report)

    @property
    def writes(self) -> bool:
        """Whether this rank saves."""
        return bool(self.fence)

    # ---- saving -----------------------------------------------------------------------------------
    def overdue(self) -> float:
        """1.0 where this rank owns the folder and its clock asks for a save (--save-seconds), else 0.0."""
        seconds = self.opts.save_seconds
        return float(bool(self.fence and seconds and time.monotonic() - self.saved_at >= seconds))

    def due(self, state: Any, told: Any = None) -> bool:
        """Whether this rank should save now. Saving is no collective, so each owner may ask its own clock.

        Stages must save at the same step: they give `told`, the sum of all ranks' `overdue`.
        """
        every, told = self.opts.save_every, self.overdue() if told is None else told
        return self.writes and bool(told or every and state.step % every == 0) and state.facts() != self.saved

    def save(self, state: Any) -> None:
        """Copies the state, the writer thread does the rest; waits for the save before. No collective."""
        if not self.writes or self.opts.eval_only or state.half_updated or state.facts() == self.saved:
            return
        self.handover.begin(self)
        self.wait()
        with state.lock:
            self.background.busy.acquire()
            try:
                facts = self._snapshot(state)
            except BaseException:
                self.background.busy.release()
                raise
        self.start_writing(facts)

    def start_writing(self, facts: dict[str, Any], images: dict[str, TensorFile] | None = None) -> None:
        """Call it with full images and `busy` taken: the writer thread releases it."""
        self.saved_at, self.saved = time.monotonic(), facts
        self.background.do(partial(self._write_noting, facts, images))

    def rescue(self, state: Any, in_memory: bool = False) -> bool | str:
        """Saves the newest whole step, unless another process of this node has (False). No collective.

        `in_memory`: the next life is sure to come; it takes the state from memory, and saves it.
        """
        with self.writer.rescuing(state.step):  # before it waits: a new owner would sweep the staging away
            if in_memory and (left := self.handover.leave(self, state)) is not None:
                return left
            self.wait(hurry=True)
            with state.lock, self.background.busy:
                if state.half_updated:
                    return False
                if new := not is_there(self.root, state.facts()):
                    self._write(self._snapshot(state))
                self.handover.end()
                return new

    def release(self) -> None:
        """The run is complete, and all ranks have met."""
        self.handover.end()
        self.fence and self.fence.release()

    def wait(self, hurry: bool = False) -> None:
        """Waits until the save under way is on the disk or has failed. A slow disk is no hang."""
        self.writer.hurry, moved, since = hurry, None, time.monotonic()
        while not self.background.wait(0.2):
            if moved != self.writer.moved:
                moved, since = self.writer.moved, time.monotonic()
            if self.state and time.monotonic() - since < HUNG_SECONDS:
                self.state.progress += 1

    def check(self) -> None:
        """Reports a failed save; after three in a row the run stops."""
        self.handover.begin(self)
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

    def _write_noting(self, facts, images=None):
        before, began = self.committed, time.monotonic()
        try:
            self._commit(facts, images) if images else self._write(facts)
            self._confirm(facts, before, began)
            self.failures = 0
        except Exception as error:
            self.failures += 1
            self.saved = None  # so that the next interval tries again
            if isinstance(error, OSError):
                needed = sum(image.size for image in self.images.values())
                error = room(error, error.filename or self.root, needed)
            self.error = error
        finally:
            self.background.busy.release()

    def _write(self, facts):
        """Commits images and facts to the disk, or raises."""
        for image in self.images.values():
            image.wait()
        self.refuse_infinite(self.images["model"], facts)
        self._commit(facts)

    def refuse_infinite(self, image: TensorFile, facts: dict[str, Any]) -> None:
        if name := image.not_finite(self.state.names.values()):
            self.state.condemn(f"step {facts['step']}: {name} is no longer finite")

    def _commit(self, facts, images=None):
        self.writer.commit(images or self.images, facts, self.committed)
        self.committed = facts["step"]

    def _confirm(self, facts, before, began):
        """Reads the checkpoint back; only then deletes older ones."""
        try:
            self.writer.read_back(facts["step"])
        except Hurried:
            return  # older ones stay
        except (Damaged, OSError):
            self.committed = before
            raise
        self.let_go(facts)
        if self.ledger:
            self.ledger.event("save", step=facts["step"], save_s=round(time.monotonic() - began, 3))

    def let_go(self, facts: dict[str, Any]) -> None:
        """Deletes all but the newest `keep`, the best, and the newest on which all ranks agreed."""
        self.handover.free(facts["step"])
        last = -1 if self.agreed is None else self.agreed
        agreed = [step for step, _ in checkpoints(self.root) if step <= last]
        self.writer.delete_old(self.opts.keep, {facts["step"], facts["best"]["step"], *agreed[:1]})
