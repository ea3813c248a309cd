"""The store on disk: atomic, asynchronous, verified, fenced.

commit.py explains the crash points of a save, fence.py who may write, manifest.py what a load checks.
"""
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from common.checkpoint.commit import Writer
from common.checkpoint.fence import HUNG_SECONDS
from common.checkpoint.handover import Handover
from common.checkpoint.identity import marks, versions
from common.checkpoint.layout import Layout
from common.checkpoint.load import choices_at, load_newest, take
from common.checkpoint.manifest import checkpoints, is_there, numbers_of
from common.checkpoint.owner import claim
from common.checkpoint.parts import PartWriter
from common.checkpoint.replicas import agree, trust
from common.checkpoint.saving import Saving
from common.checkpoint.tensor_file import TensorFile
from common.errors import UserError, say
from common.ledger import Ledger
from common.options import Options
from common.world import World, same_everywhere


class CheckpointStore(Saving):
    """Of the processes that see one run folder, one owns it and saves; the others save only in a rescue."""

    def __init__(self, opts: Options, world: World, fingerprint: str = "", ledger: Ledger | None = None,
                 report: Callable[[str], None] = say):
        self.opts, self.world, self.fingerprint = opts, world, fingerprint
        self.ledger, self.report = ledger, report
        self.run_dir, self.root = opts.run_dir, opts.run_dir / "checkpoints"
        parts = world.stages * (world.replicas if opts.shard else 1)
        told = {"life": world.life} | marks(opts, world, fingerprint)
        kind = PartWriter if parts > 1 else Writer
        self.writer = kind(self.root, self.root / f".life-{world.life}", told)
        super().__init__()
        self.fence: Any = None
        self.layout: Any = None
        # a machine may have only some of the parts
        self.handover = Handover("off" if parts > 1 else opts.memory_tier)

    # ---- at the start of a life: own the folder, load, compare the ranks ---------------------------
    def restore(self, state: Any) -> str | None:
        """Loads the newest checkpoint that verifies on any node; returns its name, or None.

        Call on every rank.
        """
        self.state = state
        same_everywhere(self.world, versions(self.opts, self.fingerprint))
        self.fence = claim(self.opts, self.world, self.fingerprint, self.report)
        self.writer.renew = self.fence and self.fence.renew
        self.layout = self.writer.layout = Layout(state, self.world, self.opts.shard)
        self._refuse_two_folders()
        self.images = {part: TensorFile(tensors) for part, tensors in self.layout.written.items()}
        source = self.handover.load(self) or self._load_from_disk()
        state.images = self.images
        for image in self.images.values():
            image.open(touch=False) if self.writes else image.close()
        self.agree(state)
        return source

    def _load_from_disk(self):
        state, source = self.state, None
        found = self._load(self.root, checkpoints(self.root), "own")
        if found.step >= 0:
            source = f"checkpoints/{found.name}"
            self.saved = state.facts()
            if self.fence:
                self._settle(found)
        elif found.damaged:
            raise UserError(
                f"{self.root}: {found.damaged} checkpoints found, none verifies "
                f"(python -m common.checkpoint {self.run_dir} says why)\n"
                "use --resume none to start afresh (they are kept aside), or another --run-dir", code=3)
        elif self.opts.resume not in ("auto", "none"):
            source = self.opts.resume
            given = self._load(*choices_at(source), "given")
            if given.step < 0:
                raise UserError(f"--resume {source}: {given.damaged} checkpoints, none verifies", code=3)
        elif self.opts.init_from:
            source = self.opts.init_from  # the net was built with these weights
            if afresh := [n for n in state.tensors()["model"] if n.startswith(self.opts.init_skip)]:
                source += f"; {', '.join(afresh)} begin afresh"
        return source

    def _refuse_two_folders(self):
        with self.world.all_or_none("one folder"):
            if self.layout.parts > 1 and self.fence and self.world.rank:
                raise UserError(
                    f"--run-dir {self.run_dir}: rank {self.world.rank} does not see the folder of rank 0\n"
                    "a net in stages over machines needs one run folder that all of them share")

    def agree(self, state: Any) -> None:
        """Compares the replicas' weights; if they differ, restarts from the last step on which all agreed."""
        if not self.opts.shard:  # a shard is like no other
            agree(self, state)

    def trust(self, state: Any, fact: str) -> None:
        """Ends the run if `fact` names a rank that computes wrong numbers; call on every rank."""
        trust(self, state, fact)

    def _load(self, root, choices, key):
        """Loads the newest of all nodes' checkpoints that verifies; its step is -1 if there is none."""
        found = load_newest(self.world, self.layout, choices if self.fence else None, root.joinpath, key,
                            self.report)
        if found.step >= 0:
            take(self.state, None, found.facts, self.fingerprint, self.fence and self.report)
        return found

    def take(self, images: dict[str, TensorFile], facts: dict[str, Any]) -> None:
        """Loads the state from these images."""
        tensors = {part: image.views for part, image in images.items()}
        take(self.state, tensors, facts, self.fingerprint, self.fence and self.report)

    def _settle(self, found):
        """Puts aside what is newer than the step that was loaded; a node that lacks that step saves it."""
        for folder in found.skipped:
            ahead = numbers_of(folder.name)[0] - found.step
            again = f"; {ahead} steps after step {found.step} will be made again" if ahead > 0 else ""
            self.report(f"checkpoints/{folder.name}: put aside{again}")
            self.writer.put_aside(folder)
        if found.own:
            self.committed = found.step
            self.let_go(found.facts)
        else:
            self.committed = max((step for step, _ in checkpoints(self.root)), default=-1)
            self.report(f"step {found.step} was received from another node and is saved here too")
            self._begin(self.state)  # this node may be the one that survives

    @property
    def writes(self) -> bool:
        """Whether this rank saves."""
        return self.layout.writes if self.layout.parts > 1 else bool(self.fence)

    # ---- saving -----------------------------------------------------------------------------------
    def overdue(self) -> float:
        """1.0 where this rank owns the folder and its clock asks for a save (--save-seconds), else 0.0."""
        seconds = self.opts.save_seconds
        return float(bool(self.fence and seconds and time.monotonic() - self.saved_at >= seconds))

    def due(self, state: Any, told: Any = None) -> bool:
        """Whether this rank should save now. Saving is no collective, so each owner may ask its own clock.

        Stages must save at the same step: they give `told`, the sum of all ranks' `overdue`.
        """
        told = self.overdue() if told is None else told
        at = any(every and state.step % every == 0 for every in (self.opts.save_every, self.opts.keep_every))
        return self.writes and bool(told or at) and state.facts() != self.saved

    def save(self, state: Any) -> None:
        """Copies the state, the writer thread does the rest; waits for the save before. No collective."""
        if not self.writes or self.opts.eval_only or state.half_updated or state.facts() == self.saved:
            return
        self.handover.begin(self)
        self.wait(read_back=False)
        self._begin(state)

    def _begin(self, state):
        with state.lock:
            self.background.busy.acquire()  # the writer thread releases it
            try:
                facts = self._snapshot(state)
            except BaseException:
                self.background.busy.release()
                raise
        self.start_writing(facts)

    def start_writing(self, facts: dict[str, Any], images: dict[str, TensorFile] | None = None) -> None:
        """Call it with full images and `busy` taken: the writer thread releases it."""
        self.saved_at, self.saved = time.monotonic(), facts
        self.background.save(partial(self._write_noting, facts, images))

    def release(self) -> None:
        """The run is complete, and all ranks have met."""
        self.handover.end(self.state.step)
        self.fence and self.fence.release()

    def rescue(self, state: Any, in_memory: bool = False) -> bool | str:
        """Saves the newest whole step: True. False: it was saved. A text: only this rank's part is saved.

        No collective. A rank that holds a part, and dies waiting with a complete gradient, saves its part of
        this step and of the next one (which it can make alone): ranks that had passed the wait have only the
        next step, ranks that had not have only this one, and one of the two is then complete.
        `in_memory`: the next life is sure to come; it takes the state from memory, and saves it.
        """
        with self.writer.rescuing(state.step):  # before it waits: a new owner would sweep the staging away
            if in_memory and (left := self.handover.leave(self, state)) is not None:
                return left
            self.wait(hurry=True, read_back=False)
            with state.lock, self.background.busy:
                done = not state.half_updated and self._rescue(state)
                if self.layout.parts > 1 and state.ready and not state.half_updated:
                    state.update(state.ready)
                    state.half_updated = True  # the main thread may come to where it makes this step
                    done = self._rescue(state)
                if not state.half_updated:
                    self.handover.end(state.step)
                return done

    def _rescue(self, state):
        if is_there(self.root, state.facts()):
            return False
        facts = self._snapshot(state)
        return bool(self._write(facts)) or (
            f"step {facts['step']}: this rank's part is written; it counts once every stage's is, "
            "until then the newest checkpoint stands")

    def wait(self, hurry: bool = False, read_back: bool = True) -> None:
        """Waits until the save under way is on the disk or has failed. A slow disk is no hang."""
        self.writer.hurry, moved, since = hurry, None, time.monotonic()
        while not self.background.wait(0.2, read_back):
            if moved != self.writer.moved:
                moved, since = self.writer.moved, time.monotonic()
            if self.state and time.monotonic() - since < HUNG_SECONDS:
                self.state.progress += 1
