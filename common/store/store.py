"""Who owns the folder of a run, when it saves, and what becomes of ranks that differ.

A load    restore -> the folder is claimed -> load.py: all ranks try one checkpoint after the other -> the
          reader fills the tensors -> the replicas are compared
A save    save -> saver.py: a copy, then a thread -> the writer -> older checkpoints go
A rescue  rescue -> saver.py: the state is held still -> the writer
What lies on the disk, and every point at which the power may fail: common/checkpoint/.
"""

import time
from sysconfig import get_python_version

import torch

from common.checkpoint import Damaged, Fence, Writer, put_sealed
from common.errors import UserError, may_pass, say
from common.ledger import Ledger, named, newest_lives
from common.options import Options, code_of, extra
from common.sealed import marked, sha, to_json
from common.store.identity import identify
from common.store.load import layout_of, load
from common.store.saver import Saver
from common.training import TrainState
from common.world import WATCHED, World, bit_facts, fingerprint_of, gather, same_everywhere


class CheckpointStore:
    """Of the processes that see one run folder, one owns it and saves; the others save only in a rescue."""

    def __init__(self, opts: Options, world: World, fingerprint: str = ""):
        self.opts = opts
        self.world = world
        self.fingerprint = fingerprint  # of the data
        self.ledger = Ledger(opts.run_dir, world.rank, world.local_rank, life=world.life)
        self.fence = Fence(opts.run_dir, world.life)
        self.owns = False  # the folder is this rank's
        self.identity: dict = {}  # the run's, on a rank that owns

    # ---- at the start of a life: own the folder, load, compare the ranks ---------------------------
    def restore(self, state: TrainState) -> str | None:
        """Load the newest checkpoint that verifies on any node; return its name, or None.

        Call on every rank.
        """
        opts = self.opts
        world = self.world
        self.state = state
        layout = layout_of(state)
        self.code = code_of(opts)
        same_everywhere(
            world,
            {
                "python": get_python_version(),
                "torch": torch.__version__,
                "data": self.fingerprint[:12],
                **self.code,
                **opts.of_all_ranks(),
                "net (names, shapes or types)": sha(to_json(layout.specs))[:12],
                "samples": str(state.progress.samples),
                **bit_facts(opts, world.device),
            },
            opts.facts_of_the_run(),
        )
        self.writer = Writer(self.fence, opts.identity(), layout)
        self.saver = Saver(state, self.writer, self.ledger, world)
        if opts.copy_to:
            world.set_patience(WATCHED)  # rank 0 may download for long
        with world.all_or_none():
            if world.rank == 0:
                self._own()
        with world.all_or_none():
            if world.local_rank == 0 and world.rank:  # the first ranks of other nodes
                self._own()
        loaded = load(state, world, layout, self.writer.run, self.owns)
        identity, *_ = gather(world, self.identity)
        began = loaded.facts["origin"]["began"] if loaded.facts else opts.resume  # "auto": at step 0
        self.writer.origin = {name: identity[name] for name in ("data", "pinned", "code")} | {"began": began}
        for folder in loaded.skipped:
            say(f"checkpoints/{folder.name}: put aside, the run goes on after step {state.progress.step}")
            self.writer.put_aside(folder)
        self.writer.trusts_disk = not loaded.skipped
        if self.owns:
            self._tell_what_is_lost()
        if loaded.here:
            self.saver.saved = state.facts()
        self.compare_replicas()
        if loaded.facts and self.owns:  # so that each folder has it
            self.save()
        if self.saver.bucket and not world.rank:  # a rescue may have left something
            self.saver.bucket.follow()
        return loaded.source

    def _own(self):
        """Claim the folder that this rank sees, unless another rank of this life has it."""
        run_dir = self.opts.run_dir
        rank = self.world.rank
        try:
            if not self.fence.elect(rank):
                return
            if self.saver.bucket and not rank and not self.opts.is_bound:
                self.fence.claim()
                self.saver.bucket.fetch()
            self.identity = identify(
                self.opts, self.fingerprint, self.code, self.world.device, self.writer.run
            )
            if not self.fence.lock:
                self.fence.claim()
            if not (self.opts.eval_only and self.opts.is_bound):
                put_sealed(run_dir / "options.json", marked(self.identity))
        except (OSError, Damaged, UserError) as error:
            self.fence.release()
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"--run-dir {run_dir}: {error}\nchoose a folder that can be written to",
                code=1 if may_pass(error) else 2,
            ) from error
        self.owns = True

    def _tell_what_is_lost(self):
        """Print if the life before has saved a later step than there is: a disk has lost it, or a person."""
        run_dir = self.opts.run_dir
        last = next(newest_lives(run_dir), [])
        saved = max((event["step"] for event in named(last, "life", "save", "rescue")), default=0)
        step = self.state.progress.step
        if saved > step and not [*self.fence.root.glob(f"*step-{saved:08}*")]:  # put aside, perhaps
            say(
                f"{run_dir}: step {saved} was saved, training goes on at step {step}: "
                "is a disk missing, or an old backup here?"
            )

    # ---- whether the replicas are still equal ------------------------------------------------------
    def compare_replicas(self) -> None:
        """Compare the copies' weights; if they differ, restart from the last step on which all agreed."""
        state = self.state
        if self.world.size == 1:
            return
        step = state.progress.step
        tensors = state.tensors()["model"]
        if state.memory:
            tensors |= state.memory.tensors()
        by_name = [tensors[name] for name in sorted(tensors)]  # a memory's have the order of its first step
        rows = gather(self.world, [fingerprint_of(by_name), step])
        odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
        if odd:
            state.invalidate(UserError("the ranks' weights differ", code=1))  # at once: nobody may save them
            extra("differ")(self, odd)
        # A wrong gradient of one rank goes into the sum, so replicas that all have it are equal, too.
        # Where --cross-check looks for it, only its votes count, and the start of a life.
        if self.saver.agreed < 0 or not self.opts.cross_check:
            self.saver.agreed = step

    # ---- saving -----------------------------------------------------------------------------------
    @property
    def overdue(self) -> bool:
        """Return whether this rank owns the folder and its clock asks for a save (--save-seconds).

        `Rescue.consult` tells all: owners on many machines save at one step, and training waits for it once.
        """
        return self.owns and 0 < self.opts.save_seconds <= time.monotonic() - self.saver.saved_at

    def due(self) -> bool:
        """Return whether this rank should save now."""
        step = self.state.progress.step
        intervals = (self.opts.save_every, self.opts.keep_every)
        return self.overdue or any(every and step % every == 0 for every in intervals)

    def save(self) -> None:
        """Copy the state, if this rank writes it; a thread does the rest."""
        if self.owns and not self.opts.eval_only:
            self.saver.save()

    def check(self) -> None:
        """Note, after each step, its digest if one is asked for; report failed saves."""
        if self.owns:
            if self.opts.digest_every:
                extra("digest_every")(self.state, self.ledger)
            self.saver.allocate()
        self.saver.report()

    # ---- the end of a life ------------------------------------------------------------------------
    def rescue(self, why: str = "") -> str:
        """Save the newest whole step; return in words what was saved; "" if that was there already.

        No collective.
        """
        try:
            return self.saver.rescue(why)
        finally:
            self.fence.leave()

    def copy(self) -> None:
        """Wait for the copy of the newest checkpoint (--copy-to), and say whether it is there."""
        if self.saver.bucket:
            self.saver.bucket.end()

    def close(self) -> None:
        """End the writer thread, once the last save is on the disk or has failed three times."""
        self.saver.close()

    def release(self) -> None:
        """Give up the run folder; call it once the run is complete and all ranks have met."""
        if self.owns:
            self.fence.release()
