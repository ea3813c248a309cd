"""The store on disk: atomic, asynchronous, verified, fenced.

folder.py explains the crash points of a save, fence.py who may write, load.py how all ranks load.
"""

import threading
import time
from concurrent import futures
from contextlib import nullcontext, suppress
from pathlib import Path
from sysconfig import get_python_version
from typing import TYPE_CHECKING

import torch

from common.checkpoint.disk import (
    Damaged,
    make_folder,
    patient,
    read_small,
    sealed,
    sha,
    sync_folder,
    to_json,
    unseal,
)
from common.checkpoint.fence import HUNG_SECONDS, RESCUE, Fence, Still, rescuing
from common.checkpoint.folder import (
    Writer,
    best_of,
    checkpoints,
    choices_at,
    is_there,
    part_name,
    read_manifest,
)
from common.checkpoint.load import Layout, load_newest
from common.checkpoint.tensors import Image, not_finite, wait_by_asking
from common.errors import UserError, may_pass, say
from common.ledger import Ledger
from common.options import Options
from common.world import MAY_DIFFER, World, bit_facts, fingerprint_of, gather, same_everywhere

if TYPE_CHECKING:
    from common.training import TrainState

MOST_FAILURES = 3  # saves that fail in a row: then the run stops with exit code 4
LONGEST_SECONDS = 60.0  # at most: it may spin behind a dead peer
STEP_SECONDS = 10.0  # a rescue waits for a step of the main thread, unless it uses no CPU for so long


class CheckpointStore:
    """Of the processes that see one run folder, one owns it and saves; the others save only in a rescue."""

    state: "TrainState"
    layout: Layout
    writer: Writer
    images: dict[str, Image]  # a save copies into them
    # a rescue copies on this stream: the usual one may stand behind a dead collective
    side: torch.cuda.Stream | None

    def __init__(self, opts: Options, world: World, fingerprint: str = ""):
        self.opts = opts
        self.world = world
        self.fingerprint = fingerprint
        self.ledger = Ledger(opts.run_dir, life=world.life, rank=world.rank)
        self.root = opts.run_dir / "checkpoints"
        self.fence = Fence(opts.run_dir, world.life)
        self.owns = False  # the folder is this rank's
        # starting a thread makes training wait
        self.pool = futures.ThreadPoolExecutor(1, "writer", world.use_device)
        self.job: futures.Future | None = None  # the last one of that thread
        self.agreed = -1  # the newest step on which all ranks agreed
        self.saved: dict | None = None  # the facts that were saved last
        self.saved_at = time.monotonic()
        self.error: Exception | None = None
        self.failures = 0

    # ---- at the start of a life: own the folder, load, compare the ranks ---------------------------
    def restore(self, state: "TrainState") -> str | None:
        """Loads the newest checkpoint that verifies on any node; returns its name, or None.

        Call on every rank.
        """
        world = self.world
        self.state = state
        self.layout = Layout(state, world)
        run = sha(to_json(self.opts.identity()))  # for each manifest
        same_everywhere(
            world,
            {
                "python": get_python_version(),
                "torch": torch.__version__,
                "data": self.fingerprint[:12],
                **self.opts.of_all_ranks(),
                "net (names, shapes or types)": "as in replica 0" if self.layout.fits else "another",
                "samples": str(state.progress.samples),
                **bit_facts(self.opts, world.device),
            },
        )
        self.writer = Writer(self.root, world.life, run, self.layout)
        for of_rank_0 in (True, False):  # then the first ranks of other nodes look whether they share it
            with world.all_or_none():
                if world.local_rank == 0 and of_rank_0 == (world.rank == 0):
                    self._own()
        written = self.layout.written(state.tensors())
        self.images = {part: Image(own) for part, own in written.items()}
        self.side = torch.cuda.Stream(state.gpu) if state.gpu else None
        source, lacking = self._load()
        self.agree()
        if lacking and self.owns:  # so that any survivor has it
            self.save()
        return source

    def _own(self):
        """Claims the folder that this rank sees, unless another rank of this life has it."""
        run_dir = self.opts.run_dir
        rank = self.world.rank
        fence = self.fence
        try:
            make_folder(self.root)
            if rank and not fence.elect():
                fence.attend(rank)
                return
            if rank and self.layout.parts > 1:
                raise UserError(
                    f"--run-dir {run_dir}: rank {rank} does not see the folder of rank 0\n"
                    "a net in stages over machines needs one run folder that all of them share"
                )
            identity = self._identity()
            fence.claim()
            self.writer.put(run_dir / "options.json", sealed(identity))
            sync_folder(run_dir)
        except (OSError, UserError) as error:
            fence.release()
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"--run-dir {run_dir}: {error}\nchoose a folder that can be written to",
                code=1 if may_pass(error) else 2,
            ) from error
        self.owns = True

    def _identity(self):
        """What this run is, for RUN/options.json; UserError if that file, or a checkpoint, has other values.

        As long as nothing is saved, the options may change. The free ones may always.
        """
        opts = self.opts
        path = opts.run_dir / "options.json"
        ours = {
            "options": opts.to_json(),
            "data": self.fingerprint,
            "pinned": bit_facts(opts, self.world.device),
        }
        if not opts.is_bound:
            return ours
        choices = checkpoints(self.root)
        for _, folder in choices[1:]:
            if folder.resolve() == Path(opts.resume).resolve():
                raise UserError(
                    f"--resume {opts.resume}: this run resumes from its newest checkpoint, "
                    f"step {choices[0][0]}\n"
                    "leave it out to resume there; to go back to that step, give a --run-dir of its own too"
                )
        foreign = []
        for _, folder in choices:
            with suppress(Damaged, OSError):
                if read_manifest(folder)["run"] != self.writer.run:
                    foreign.append(folder)
        try:
            first = unseal(patient(read_small)(path), path.name)
        except Damaged as reason:
            raise UserError(
                f"{path}: {reason}; without it this could be another run\n"
                f"bring it back; or --run-dir NEW --resume {opts.run_dir} begins another run"
            ) from reason
        wrong = []
        changed = []
        for name, was in first["pinned"].items():
            now = ours["pinned"].get(name)
            if was != now:
                differences = changed if name in MAY_DIFFER else wrong
                differences.append(f"{name} was {was}, now {now}")
        if first["data"] != self.fingerprint:
            data = f"data's fingerprint was {first['data'][:12]}, now {self.fingerprint[:12]}"
            if opts.accept_data_change:
                changed.append(data)
            else:
                wrong.append(
                    f"the {data} (with --accept-data-change the epoch begins again with the new data)"
                )
        opts.refuse_another_run(opts.compare(first["options"]) + wrong)
        if foreign:
            raise UserError(
                f"{foreign[0]} is of another run than {path}\nmove it away, or use another --run-dir"
            )
        for text in changed:
            say(f"the {text}: from here on the bits may be others")
        return ours | {"pinned": first["pinned"]}

    def _load(self):
        """(the newest checkpoint that verifies on any machine's disk, whether this disk lacks it)."""
        opts = self.opts
        found = self._take(self.root, checkpoints(self.root))
        if found.facts:
            for folder in found.skipped:
                step = self.state.progress.step
                say(f"checkpoints/{folder.name}: put aside, the run goes on after step {step}")
                self.writer.put_aside(folder)
            if found.own:
                self.saved = self.state.facts()
                if self.owns and not found.skipped:  # they are kept until a newer one is saved
                    self._prune(found.facts)
            return found.name, not found.own
        if found.names:
            raise UserError(
                f"{self.root}: {len(found.names)} checkpoints found, none verifies "
                f"(python -m common.checkpoint {opts.run_dir} says why)\n"
                f"to start afresh, move {opts.run_dir} away or give --run-dir NEW",
                code=3,
            )
        if opts.at or opts.resume != "auto":
            source = opts.fork or opts.resume
            root, choices = choices_at(Path(source))
            given = self._take(root, [choice for choice in choices if opts.at in (0, choice[0])])
            if not given.facts:
                raise UserError(
                    f"{source}: no whole checkpoint of {f'step {opts.at}' if opts.at else 'any step'}\n"
                    f"python -m common.checkpoint {source} says why",
                    code=2 if opts.at else 3,
                )
            return source, False
        if opts.init_from:  # the net was built with these weights
            afresh = [name for name in self.state.tensors()["model"] if name.startswith(opts.init_skip)]
            return opts.init_from + (f"; {', '.join(afresh)} begin afresh" if afresh else ""), False
        return None, False

    def _take(self, root, choices):
        """Loads the newest of all machines' checkpoints that verifies; without facts there is none.

        If another dataset's order was saved, the epoch begins again.
        """
        state = self.state
        progress = state.progress
        found = load_newest(self.world, self.layout, root, choices if self.owns else [])
        if found.facts:
            state.load(found.facts)
            best = progress.best["step"]
            kept = dict(found.names) if root == self.root else {}
            if best and best not in kept:  # its save failed, or rank 0 died in it; or another run has it
                earlier = [choice for choice in choices if kept and choice[0] <= progress.step]
                known = gather(self.world, best_of(earlier) if self.owns else {})
                progress.best = next(filter(None, known), {"step": progress.step})
                if self.owns:
                    say(
                        f"this run has no checkpoint of step {best}, the best one: "
                        f"step {progress.best['step']} counts"
                    )
            if progress.position < found.facts["position"] and self.owns:
                say(
                    f"step {progress.step} was saved at position {found.facts['position']:,} of other "
                    f"data or another order; the epoch begins again with {progress.samples:,} samples"
                )
        return found

    # ---- whether the replicas are still equal ------------------------------------------------------
    def agree(self) -> None:
        """Compares the copies' weights; if they differ, restarts from the last step on which all agreed."""
        state = self.state
        if self.world.copies == 1:
            return
        step = state.progress.step
        rows = gather(self.world, [fingerprint_of(state.tensors()["model"].values()), step])
        odd = [rank for rank, row in enumerate(rows) if row != rows[rank % self.world.parts]]
        if odd:
            self._withdraw()
            if self.agreed < 0 and not step:
                raise UserError(
                    f"model {self.opts.model}: the ranks have made different weights\n"
                    "make them from --seed alone, not from the rank, the process or the time"
                )
            raise RuntimeError(
                f"step {step}: the weights of the replicas differ (ranks {odd} from the first); "
                f"going back to step {self.agreed}, where all agreed. Something else than the optimizer's "
                "step on the summed gradient has changed them: a second optimizer, a line that writes to "
                "them, other library versions on a machine, or a device that computes wrongly"
            )
        if self.agreed < 0 or not self.opts.cross_check:  # which finds more than equal weights show
            self.agreed = step

    def trust(self, fact: str) -> None:
        """After a --cross-check: the state is trusted, or if `fact` names a rank, the run ends."""
        if not fact:
            self.agreed = self.state.progress.step
            return
        self._withdraw()
        raise self.state.spoil(
            UserError(
                f"{fact}; going back to step {self.agreed} or before, on which ranks agreed\n"
                "keep the run off that device, then start the same command again",
                code=7,
            )
        )

    def _withdraw(self):
        """Puts aside what was saved since all ranks agreed: it may be a diverged rank's, as this state is."""
        self.state.spoil(UserError("the ranks' weights differ", code=1))
        self.wait()
        if not self.owns or self.agreed < 0:
            return
        for step, folder in checkpoints(self.root):
            if step > self.agreed:
                say(
                    f"checkpoints/{folder.name}: saved after the ranks last agreed "
                    f"(step {self.agreed}); put aside"
                )
                self.writer.put_aside(folder)

    # ---- saving -----------------------------------------------------------------------------------
    @property
    def writes(self) -> bool:
        """Whether this rank saves while all live."""
        return self.layout.writes if self.layout.parts > 1 else self.owns

    @property
    def overdue(self) -> bool:
        """Whether this rank owns the folder and its clock asks for a save (--save-seconds)."""
        return self.owns and 0 < self.opts.save_seconds <= time.monotonic() - self.saved_at

    def due(self) -> bool:
        """Whether this rank should save now. Saving is no collective, so each owner may ask its own clock.

        Stages must save at the same step: `Rescue.consult` tells them that a clock asks for it.
        """
        intervals = (self.opts.save_every, self.opts.keep_every)
        at = any(every and self.state.progress.step % every == 0 for every in intervals)
        return at or self.layout.parts == 1 and self.overdue

    def save(self) -> None:
        """Copies the state, the writer thread does the rest; waits for the save before. No collective."""
        state = self.state
        if not self.writes or self.opts.eval_only or state.spoiled or state.facts() == self.saved:
            return
        self.wait()
        self.saved_at = time.monotonic()
        try:
            with state.lock:
                for part, tensors in self.layout.written(state.tensors()).items():
                    self.images[part].copy(tensors)
                facts = state.facts()
        except (OSError, MemoryError) as error:  # there is no memory for the copy
            self._note_failure(error)
            return
        self.saved = facts
        self.job = self.pool.submit(self._write_copy, facts)

    def check(self) -> None:
        """After each step: notes its digest if one is due. Three failed saves in a row end the run."""
        self._note_digest()
        if self.writes and self.job is None:  # after the first step, which it would slow down
            self.job = self.pool.submit(lambda: [image.open() for image in self.images.values()])
        if self.error:
            error = self.error
            self.error = None
            if isinstance(error, UserError):
                raise error
            say(f"save failed ({self.failures} in a row), training goes on: {error}")
            if self.failures >= MOST_FAILURES:
                raise UserError(
                    f"{self.failures} saves in a row have failed, the last one: {error}\n"
                    f"what is in {self.root} stands; make room, then start again",
                    code=4,
                )

    def _note_digest(self):
        """--digest-every: a fingerprint of weights and optimizer, in the ledger; replay compares with it."""
        state = self.state
        every = self.opts.digest_every
        if every and self.owns and state.progress.step % every == 0:
            sums = {part: fingerprint_of(tensors.values()) for part, tensors in state.tensors().items()}
            self.ledger.event("digest", step=state.progress.step, **sums)

    def wait(self, seconds: float = 1e9) -> None:
        """Waits until the save under way is on the disk or has failed. A slow disk is no hang.

        A rescue waits only so many seconds for the next byte: it writes its own files.
        """
        still = Still()
        while self.job and futures.wait([self.job], 0.1).not_done and still.seconds < seconds:
            self.state.heartbeat += still(self.writer.moved) < HUNG_SECONDS

    def close(self) -> None:
        """Ends the writer thread, once the last save is on the disk or has failed three times."""
        self.wait()
        while self.error:
            self.check()
            self.save()
            self.wait()
        self.pool.shutdown()

    def release(self) -> None:
        """Gives up the run folder; call it once the run is complete and all ranks have met."""
        if self.owns:
            self.fence.release()

    # ---- writing ----------------------------------------------------------------------------------
    def _write_copy(self, facts):
        try:
            if self._write(facts, {part: image.views for part, image in self.images.items()}):
                self._prune(facts)
                seconds = round(time.monotonic() - self.saved_at, 3)
                self.ledger.event("save", step=facts["step"], save_s=seconds)
            self.failures = 0
        except Exception as error:
            self._note_failure(error)

    def _note_failure(self, error):
        self.saved = None  # so that the next interval tries again
        self.failures += 1
        self.error = error

    def _write(self, facts, sources):
        """The folder of the new checkpoint, None if parts of other ranks are missing; or raises."""
        name = not_finite(sources["model"], self.state.names.values())
        if name:
            fact = f"step {facts['step']}: {name} is no longer finite"
            raise self.state.diverged(fact)
        return self.writer.commit(sources, facts)

    def _prune(self, facts):
        """Deletes all but the newest `keep`, --keep-every, the best, the newest on which all ranks agreed."""
        every = self.opts.keep_every
        choices = checkpoints(self.root)
        latest = dict(reversed(choices))  # of each step the latest facts
        steps = sorted(latest, reverse=True)
        agreed = [step for step in steps if step <= self.agreed][:1]
        for_good = [step for step in steps if every and step % every == 0]
        newest = steps[: self.opts.keep]
        kept = {facts["step"], best_of(choices).get("step"), *newest, *agreed, *for_good}
        self.writer.prune([folder for step, folder in choices if step not in kept or latest[step] != folder])

    # ---- a survivor saves -------------------------------------------------------------------------
    def rescue(self, why: str = "") -> str:
        """Saves the newest whole step; what this rank has saved, in words, "" if it was saved already.

        No collective. Announced before anything that waits: from there on a new life waits for this one.
        """
        try:
            return self._rescue(why)
        finally:
            self.fence.leave()  # this life ends

    def _rescue(self, why):
        state = self.state
        began = time.monotonic()
        self.writer.check_staging(state.progress.step)
        name = f"{part_name(self.layout.number)}-{RESCUE}"
        alone = rescuing(
            self.writer.staging / name,
            progress=lambda: self.writer.moved,
            needless=lambda: not state.spoiled and is_there(self.root, state.facts()),
        )
        with torch.cuda.stream(self.side) if self.side else nullcontext(), alone:
            clock = time.pthread_getcpuclockid(threading.main_thread().ident)
            still = Still()
            while not state.lock.acquire(timeout=0.1):
                stands_still = still(time.clock_gettime(clock)) > STEP_SECONDS
                if stands_still or time.monotonic() - began > LONGEST_SECONDS:
                    raise UserError(
                        f"step {state.progress.step + 1} hangs half way, the newest checkpoint stands", code=1
                    )
            try:
                if state.spoiled:
                    raise state.spoiled
                self.wait(HUNG_SECONDS)
                wait_by_asking(state.updated)
                words = self._write_live(why, began)
                if self.layout.parts > 1 and state.ready:
                    # A rank that holds a part, and dies waiting with a complete gradient, can make its next
                    # step alone. Ranks that had passed the wait have only that one, ranks that had not have
                    # only this one: one of the two is then complete.
                    state.update(state.ready)
                    words = self._write_live(why, began)
                    # the main thread must not make this step once more
                    state.spoil(UserError(f"step {state.progress.step} is made by the rescue", code=1))
            finally:
                state.lock.release()
        return words

    def _write_live(self, why, began):
        """Writes the tensors, which are held still; what was saved, in words, "" if it was there."""
        if is_there(self.root, self.state.facts()):
            return ""
        facts = self.state.facts()
        step = facts["step"]
        tensors = {}
        for part, own in self.layout.written(self.state.tensors()).items():
            # with their strides: for other ones the GPU would have to load a kernel
            tensors[part] = {name: tensor.cpu() for name, tensor in own.items()}
        if self._write(facts, tensors) is None:
            return (
                f"step {step}: rank {self.world.rank} has saved its stage; "
                "the step counts once all stages are saved"
            )
        seconds = round(time.monotonic() - began, 3)
        self.ledger.event("rescue", step=step, why=why, rescue_s=seconds)
        return f"step {step} saved by rank {self.world.rank}"
