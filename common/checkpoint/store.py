"""The store on disk: atomic, asynchronous, verified, fenced.

commit.py walks through the crash points of a save, fence.py through who may write, manifest.py through what
is believed.
"""
import time

from common.checkpoint.commit import Background, Hurried, Writer
from common.checkpoint.files import Damaged, room
from common.checkpoint.identity import marks, versions
from common.checkpoint.load import choices_at, load_newest, load_weights, take
from common.checkpoint.manifest import checkpoints, folder_name, is_there
from common.checkpoint.owner import claim
from common.checkpoint.tensor_file import TensorFile
from common.errors import UserError, say
from common.world import fingerprint_of, odd_ranks, same_everywhere

FAILURES = 3  # saves that may fail in a row before the run stops with exit code 4
STILL = 600.0  # seconds in which a disk that works, however slowly, has moved something


class CheckpointStore:
    """Of the processes that see one run folder, one owns it and writes; the others only ever write a rescue.
    """

    def __init__(self, opts, world, fingerprint="", ledger=None, report=say):
        self.opts, self.world, self.fingerprint, self.ledger, self.report = opts, world, fingerprint, ledger, report
        self.run_dir, self.root = opts.run_dir, opts.run_dir / "checkpoints"
        self.writer = Writer(self.root, self.root / f".life-{world.life}",
                             {"life": world.life} | marks(opts, world, fingerprint))
        self.fence, self.images, self.state, self.part = None, {}, None, ()
        self.background = Background(self._write_noting)
        self.committed, self.agreed, self.saved = -1, None, None  # steps; the facts that were saved last
        self.saved_at, self.error, self.failures = time.monotonic(), None, 0

    # ---- at the start of a life: who owns, what is there, everybody the same ----------------------
    def restore(self, state):
        """The newest checkpoint that verifies on any node, in every rank's state; returns where it came from,
        or None.
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
            raise UserError(f"{self.root}: {found.damaged} checkpoints found, none verifies "
                            f"(python -m common.checkpoint {self.run_dir} says why)\n"
                            "use --resume none to start afresh (they are kept aside), or another --run-dir", code=3)
        elif self.opts.resume not in ("auto", "none"):
            source = self.opts.resume
            found = self._load(choices_at(source), "given")
            if found.step < 0:
                raise UserError(f"--resume {source}: {found.damaged} checkpoints there, none verifies", code=3)
        elif self.opts.init_from:
            source = load_weights(state, self.opts.init_from, *self.part)
        for image in self.images.values():
            image.open() if self.fence else image.close()
        self.agree(state)
        return source

    def agree(self, state):
        """Every rank holds the same weights, or this life ends without saving: the next one starts from what
        all agreed on.
        """
        if self.world.size > 1:
            odd = odd_ranks(self.world, [fingerprint_of(state.tensors()["model"]), state.step])
            if odd is not None:
                state.half_updated = True
                self._withdraw()
                raise RuntimeError(f"step {state.step}: the weights of rank {odd or 'any'} differ from the others; going back to "
                                   f"step {self.agreed}, where all agreed" if self.agreed is not None else
                                   f"step {state.step}: rank {odd or 'any'} starts with other weights than the others")
            self.agreed = state.step

    def _withdraw(self):
        """What was saved since all ranks agreed may be a diverged replica's."""
        self.wait()
        for step, folder in checkpoints(self.root) if self.fence and self.agreed is not None else ():
            if step > self.agreed:
                self.report(f"checkpoints/{folder.name}: saved after the ranks last agreed (step {self.agreed}); put aside")
                self.writer.put_aside(folder)

    def _load(self, choices, key):
        """The newest of all nodes' choices that verifies, in every rank's state; its step is -1 if there is
        none.
        """
        found = load_newest(self.world, choices if self.fence else None, self.images, key, self.report)
        if found.step >= 0:
            tensors = {part: image.views for part, image in self.images.items()}
            take(self.state, tensors, found.facts, self.fingerprint, self.fence and self.report)
        return found

    def _settle(self, found):
        """What is newer than the step all go on from is put aside; a node that lacked that step has it from
        now on.
        """
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
    def writes(self):
        return bool(self.fence)

    # ---- saving -----------------------------------------------------------------------------------
    def due(self, state):
        """Only the owner asks its clock, and saving is no collective: nobody has to agree."""
        opts = self.opts
        return bool(self.fence) and (
            (opts.save_every and state.step % opts.save_every == 0)
            or (opts.save_seconds and time.monotonic() - self.saved_at >= opts.save_seconds)) and state.facts() != self.saved

    def save(self, state):
        """Copy the state, leave the rest to the writer thread; waits for the save before. Quiet on ranks that
        do not own.
        """
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
        """The images are full and `busy` is held: the background lets go of it."""
        self.saved_at, self.saved = time.monotonic(), facts
        self.background.do(facts)

    def rescue(self, state):
        """The newest whole step on disk before this returns, by whichever process of this node comes first;
        no collective.
        """
        with self.writer.rescuing(state.step):  # before it waits: a successor would sweep the staging away
            self.wait(hurry=True)
            with state.lock, self.background.busy:
                if state.half_updated or is_there(self.root, state.facts()):
                    return False
                self._write(self._snapshot(state))
                return True

    def wait(self, hurry=False):
        """Until the save under way is on the disk or has failed. A slow disk is no hang: this rank moves
        meanwhile.
        """
        self.writer.hurry, moved, since = hurry, None, time.monotonic()
        while not self.background.wait(0.2):
            if moved != self.writer.moved:
                moved, since = self.writer.moved, time.monotonic()
            if self.state and time.monotonic() - since < STILL:
                self.state.progress += 1

    def check(self):
        """Failed saves are said at the next step; training goes on, until too many have failed in a row."""
        if self.error:
            error, self.error = self.error, None
            if isinstance(error, UserError):
                raise error
            self.report(f"save failed ({self.failures} in a row), training goes on: {error}")
            if self.failures >= FAILURES:
                raise UserError(f"{self.failures} saves in a row have failed, the last one: {error}\n"
                                f"the newest good checkpoint is step {self.committed}; make room, then start again", code=4)

    def close(self):
        """The clean end: the last save is on the disk, or has failed as often as saves may."""
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
                error = room(error, error.filename or self.root, sum(image.size for image in self.images.values()))
            self.error = error

    def _write(self, facts):
        """Images and facts are on the disk under their name, or it raises."""
        for image in self.images.values():
            image.wait()
        if name := self.images["model"].not_finite(self.state.names.values()):
            self.state.condemn(f"step {facts['step']}: {name} is no longer finite")
        self._commit(facts)

    def _commit(self, facts):
        self.writer.commit(self.images, facts, self.committed)
        self.committed = facts["step"]

    def _confirm(self, facts, before, began):
        """What was written can be read: older ones may go."""
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
        """The newest `keep`, the best, and the newest that all ranks agreed on stay."""
        agreed = [step for step, _ in checkpoints(self.root) if self.agreed is not None and step <= self.agreed]
        self.writer.delete_old(self.opts.keep, {facts["step"], facts["best"]["step"], *agreed[:1]})
