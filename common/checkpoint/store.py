"""The store on disk: atomic, asynchronous, verified, fenced.

commit.py explains the crash points of a save, fence.py who may write, manifest.py what a load checks.
"""
import time
from collections.abc import Callable
from typing import Any

from common.checkpoint.commit import Background, Hurried, Writer
from common.checkpoint.fence import HUNG_SECONDS
from common.checkpoint.files import Damaged, room
from common.checkpoint.identity import marks, versions
from common.checkpoint.load import choices_at, load_newest, take
from common.checkpoint.manifest import checkpoints, folder_name, is_there
from common.checkpoint.owner import claim
from common.checkpoint.tensor_file import TensorFile
from common.errors import UserError, say
from common.ledger import Ledger
from common.options import Options
from common.world import World, fingerprint_of, odd_ranks, same_everywhere

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
        self.fence, self.state = None, None
        self.images: dict[str, TensorFile] = {}
        self.background = Background(self._write_noting)
        self.committed, self.agreed, self.saved = -1, None, None  # steps; the facts that were saved last
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
        source, found = None, self._load(checkpoints(self.root), "own")
        if found.step >= 0:
            source = f"checkpoints/{folder_name(found.step)}"
            if self.fence:
                self._settle(found)
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
        for image in self.images.values():
            image.open() if self.fence else image.close()
        self.agree(state)
        return source

    def agree(self, state: Any) -> None:
        """Compares the replicas' weights; if they differ, restarts from the last step on which all agreed."""
        if self.world.size > 1:
            odd = odd_ranks(self.world, [fingerprint_of(state.tensors()["model"]), state.step])
            if odd is not None:
                state.half_updated = True
                self._withdraw()
                rank = f"rank {odd or 'any'}"
                raise RuntimeError(
                    f"step {state.step}: the weights of {rank} differ from the others; "
                    f"going back to step {self.agreed}, where all agreed" if self.agreed is not None else
                    f"step {state.step}: {rank} starts with other weights than the others")
            self.agreed = state.step

    def _withdraw(self):
        """Puts aside what was saved since all ranks agreed: it may hold a diverged replica's weights."""
        self.wait()
        for step, folder in checkpoints(self.root) if self.fence and self.agreed is not None else ():
            if step > self.agreed:
                self.report(f"checkpoints/{folder.name}: saved after the ranks last agreed "
                            f"(step {self.agreed}); put aside")
                self.writer.put_aside(folder)

    def _load(self, choices, key):
        """Loads the newest of all nodes' `choices` that verifies; its step is -1 if there is none."""
        found = load_newest(self.world, choices if self.fence else None, self.images, key, self.report)
        if found.step >= 0:
            tensors = {part: image.views for part, image in self.images.items()}
            take(self.state, tensors, found.facts, self.fingerprint, self.fence and self.report)
        return found

    def _settle(self, found):
        """Puts aside what is newer than the step that was loaded; a node that lacks that step saves it."""
        for folder in found.skipped:
            ahead = int(folder.name[5:]) - found.step
            again = f"; {ahead} steps after step {found.step} will be made again" if ahead > 0 else ""
            self.report(f"checkpoints/{folder.name}: put aside{again}")
            self.writer.put_aside(folder)
        self.committed = found.own
        if found.own == found.step:
            self._let_go(found.facts)
        else:
            self.report(f"step {found.step} was received from another node and is saved here too")
            self.background.busy.acquire()
            self._start_writing(found.facts)  # this node may be the one that survives

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
        self.wait()
        with state.lock:
            self.background.busy.acquire()
            try:
                facts = self._snapshot(state)
            except BaseException:
                self.background.busy.release()
                raise
        self._start_writing(facts)

    def _start_writing(self, facts):
        """Call it with full images and `busy` taken: the writer thread releases it."""
        self.saved_at, self.saved = time.monotonic(), facts
        self.background.do(facts)

    def rescue(self, state: Any) -> bool | str:
        """Saves the newest whole step, unless another process of this node has (False). No collective."""
        with self.writer.rescuing(state.step):  # before it waits: a new owner would sweep the staging away
            self.wait(hurry=True)
            with state.lock, self.background.busy:
                if state.half_updated or is_there(self.root, state.facts()):
                    return False
                self._write(self._snapshot(state))
                return True

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

    def _write_noting(self, facts):
        before, began = self.committed, time.monotonic()
        try:
            self._write(facts)
            self._confirm(facts, before, began)
            self.failures = 0
        except Exception as error:
            self.failures += 1
            self.saved = None  # so that the next interval tries again
            if isinstance(error, OSError):
                needed = sum(image.size for image in self.images.values())
                error = room(error, error.filename or self.root, needed)
            self.error = error

    def _write(self, facts):
        """Commits images and facts to the disk, or raises."""
        for image in self.images.values():
            image.wait()
        if name := self.images["model"].not_finite(self.state.names.values()):
            self.state.condemn(f"step {facts['step']}: {name} is no longer finite")
        self._commit(facts)

    def _commit(self, facts):
        self.writer.commit(self.images, facts, self.committed)
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
        self._let_go(facts)
        if self.ledger:
            self.ledger.event("save", step=facts["step"], save_s=round(time.monotonic() - began, 3))

    def _let_go(self, facts):
        """Deletes all but the newest `keep`, the best, and the newest on which all ranks agreed."""
        last = -1 if self.agreed is None else self.agreed
        agreed = [step for step, _ in checkpoints(self.root) if step <= last]
        self.writer.delete_old(self.opts.keep, {facts["step"], facts["best"]["step"], *agreed[:1]})
