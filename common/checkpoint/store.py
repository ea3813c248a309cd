"""The store on disk: atomic, asynchronous, verified, fenced.

commit.py explains the crash points of a save, fence.py who may write, manifest.py what a load checks.
"""
import contextlib
import time
from collections.abc import Callable
from typing import Any

from common.checkpoint.commit import Writer
from common.checkpoint.fence import Fenced, move_away
from common.checkpoint.identity import marks, versions
from common.checkpoint.layout import Layout
from common.checkpoint.load import choices_at, leave_out, load_newest
from common.checkpoint.manifest import checkpoints, is_there, numbers_of
from common.checkpoint.memory import open_memory
from common.checkpoint.owner import claim
from common.checkpoint.parts import PartWriter
from common.checkpoint.saving import Saving
from common.checkpoint.tensor_file import TensorFile
from common.errors import UserError, say
from common.ledger import Ledger
from common.options import Options
from common.world import World, fingerprint_of, odd_ranks, same_everywhere


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

    # ---- at the start of a life: own the folder, load, compare the ranks ---------------------------
    def restore(self, state: Any) -> str | None:
        """Loads the newest checkpoint that verifies on any node; returns its name, or None.

        Call on every rank.
        """
        self.state = state
        self.layout = self.writer.layout = Layout(state, self.world, self.opts.shard)
        net = {"net (names, shapes or types)": self.layout.mark[:12], "samples": str(state.samples)}
        same_everywhere(self.world, versions(self.opts, self.fingerprint) | net)
        self.fence = claim(self.opts, self.world, self.layout.parts, self.fingerprint, self.report)
        self.writer.renew = self.fence and self.fence.renew
        self.images = state.images = {part: TensorFile(own) for part, own in self.layout.written.items()}
        # a machine may have only some of the parts
        self.memory = open_memory("off" if self.layout.parts > 1 else self.opts.memory_tier,
                                  sum(image.size for image in self.images.values()), self.world, self.fence,
                                  self.run_dir, self.writer.marks, self.report)
        source = self._load()
        for image in self.images.values() if self.writes else ():
            image.open()
        self.agree(state)
        return source

    def _load(self):
        """Loads the newest checkpoint that verifies, on any machine's disk or in its memory; its name."""
        state, source = self.state, None
        own = checkpoints(self.root) if self.fence else []
        left = self.memory.checkpoints() if self.world.local_rank == 0 else []
        found = self._take([self.root, self.memory.root], own + left, "own")
        if found.step >= 0:
            source = found.name
            self._settle(found)
        elif found.offered:
            raise UserError(
                f"{self.root}: {found.offered} checkpoints found, none verifies "
                f"(python -m common.checkpoint {self.run_dir} says why)\n"
                "use --resume none to start afresh (they are kept aside), or another --run-dir", code=3)
        elif self.opts.fork or self.opts.resume not in ("auto", "none"):
            source, at = self.opts.fork or self.opts.resume, self.opts.at
            root, kept = choices_at(source)
            own = [choice for choice in kept if self.fence and at in (0, choice[0])]
            given = self._take([root], own, "given")
            if given.step < 0 and at:
                raise UserError(f"--fork {source}: no whole checkpoint of step {at}\n"
                                f"it keeps {', '.join(str(step) for step, _ in reversed(kept))}")
            if given.step < 0:
                raise UserError(f"--resume {source}: {given.offered} checkpoints, none verifies", code=3)
            if self.opts.skip:
                leave_out(state, int(self.opts.skip.partition(":")[2]) - at)
        elif self.opts.init_from:
            source = self.opts.init_from  # the net was built with these weights
            if afresh := [n for n in state.tensors()["model"] if n.startswith(self.opts.init_skip)]:
                source += f"; {', '.join(afresh)} begin afresh"
        return source

    def _take(self, roots, own, key):
        """Loads the newest of all machines' checkpoints that verifies; its step is -1 if there is none.

        If another dataset's order was saved, the epoch begins again.
        """
        state, found = self.state, load_newest(self.world, self.layout, roots, own, key, self.report)
        if facts := found.facts:
            if facts["order"] == [self.fingerprint]:  # of an earlier version
                facts["order"] = state.order
            state.load(facts)
            if state.position < facts["position"] and self.fence:
                self.report(f"step {state.step} was saved at position {facts['position']:,} of other data or "
                            f"of another order; epoch {state.epoch + 1} begins again with "
                            f"{state.samples:,} samples, some of them for the second time")
        return found

    def _settle(self, found):
        """Puts aside what is newer than the step that was loaded; what this disk lacks is saved to it."""
        for folder in found.skipped:
            if folder.parent == self.memory.root:
                self.report(f"{folder}: deleted")
                move_away(folder)
                continue
            ahead = numbers_of(folder.name)[0] - found.step
            again = f"; {ahead} steps after step {found.step} will be made again" if ahead > 0 else ""
            self.report(f"checkpoints/{folder.name}: put aside{again}")
            self.writer.put_aside(folder)
        self.memory.free(found.step - 1)
        if self.fence and not found.own:
            self.committed, self.unsaved = max((step for step, _ in checkpoints(self.root)), default=-1), True
            return self.report(f"step {found.step} was not on this disk and is saved here too")
        self.saved = self.state.facts()
        if self.fence:
            self.committed = found.step
            self.let_go(found.facts)

    # ---- whether the replicas are still equal ------------------------------------------------------
    def agree(self, state: Any) -> None:
        """Compares the replicas' weights; if they differ, restarts from the last step on which all agreed."""
        if self.opts.shard or self.world.size == 1:  # a shard is like no other
            return
        odd = odd_ranks(self.world, [fingerprint_of(state.tensors()["model"]), state.step])
        if odd is not None:
            self._withdraw(state)
            rank = f"rank {odd or 'any'}"
            if self.agreed is None and not state.step:
                raise UserError(f"model {self.opts.model}: the ranks have made different weights\n"
                                "make them from --seed alone, not from the rank, the process or the time")
            raise RuntimeError(
                f"step {state.step}: the weights of {rank} differ from the others; "
                f"going back to step {self.agreed}, where all agreed" if self.agreed is not None else
                f"step {state.step}: {rank} starts with other weights than the others")
        if self.agreed is None or not self.opts.cross_check:  # which finds more than equal weights show
            self.agreed = state.step

    def trust(self, state: Any, fact: str) -> None:
        """After a --cross-check: the state is trusted, or if `fact` names a rank, the run ends."""
        if not fact:
            self.agreed = state.step
            return
        self._withdraw(state)
        state.verdict = UserError(
            f"{fact}; going back to step {self.agreed} or before, on which ranks agreed\n"
            "keep the run off that device, then start the same command again", code=7)
        raise state.verdict

    def _withdraw(self, state):
        """Puts aside what was saved since all ranks agreed: it may be a diverged rank's, as this state is."""
        state.half_updated = True
        self.wait()
        for step, folder in checkpoints(self.root) if self.fence and self.agreed is not None else ():
            if step > self.agreed:
                self.report(f"checkpoints/{folder.name}: saved after the ranks last agreed "
                            f"(step {self.agreed}); put aside")
                self.writer.put_aside(folder)

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

    def release(self) -> None:
        """Gives up the run folder; call it once the run is complete and all ranks have met."""
        self.memory.end(self.state.step)
        self.fence and self.fence.release()

    def rescue(self, state: Any, in_memory: bool = False) -> str:
        """Saves the newest whole step; returns "disk" or "memory", "" if it was saved, else what is missing.

        No collective. Call it inside `writer.rescuing`. A rank that holds a part, and dies waiting with a
        complete gradient, saves its part of this step and of the next one (which it can make alone): ranks
        that had passed the wait have only the next step, ranks that had not have only this one, and one of
        the two is then complete.
        `in_memory`: the next life is sure to come; it takes the state from memory, and saves it.
        """
        if in_memory and self.memory.used:
            with contextlib.suppress(OSError, Fenced):  # no room, say: the disk has some
                return self._rescue(state, self.memory.writer, "memory")
        self.overtake()
        with state.lock:
            done = self._rescue(state, self.writer, "disk")
            if self.layout.parts > 1 and state.ready and not state.half_updated:
                state.update(state.ready)
                done = self._rescue(state, self.writer, "disk")
                state.half_updated = True  # the main thread must not make this step once more
            if not state.half_updated:
                self.memory.end(state.step)
            return done

    def _rescue(self, state, writer, where):
        with state.lock:
            facts = state.facts()
            if state.half_updated or any(is_there(root, facts) for root in {self.root, writer.root}):
                return ""
            return where if self.write_live(writer, state) else (
                f"step {facts['step']}: this rank's part is written; it counts once every stage's is, "
                "until then the newest checkpoint stands")
