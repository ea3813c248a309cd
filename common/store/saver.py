"""How the state of a rank is saved.

While training continues: from the live tensors to a copy in host memory, for which training waits; from that
copy to the disk, in a thread.
In a rescue: from the live tensors, which are held still, to the disk, in the thread that ends this life.
"""

import threading
import time
from concurrent import futures
from contextlib import ExitStack, contextmanager, suppress

import torch

from common.checkpoint import IdleTimer, Image, specs_of
from common.device import is_gpu
from common.errors import UserError, say
from common.options import extra

MOST_FAILURES = 3  # saves that fail in a row: then the run stops with exit code 4
STEP_SECONDS = 10.0  # a rescue waits for a step of the main thread, unless it uses no CPU for so long
LONGEST_SECONDS = 60.0  # at most: it may spin behind a dead peer


class Saver:
    """A thread, and memory for a copy of what this rank writes.

    A failed save is made good by the next one that is due; the third failure in a row ends the run.
    """

    def __init__(self, state, writer, ledger, world):
        self.state = state
        self.writer = writer
        self.ledger = ledger
        self.rank = world.rank
        self.images = {}  # made after the first step, which makes the optimizer's state
        # a rescue copies on a stream of its own: the usual one may stand behind a dead collective
        self.sides = [torch.Stream(device=device) for device in state.devices if is_gpu(device)]
        # one thread for all saves: to start one makes training wait
        self.pool = futures.ThreadPoolExecutor(1, "writer", world.use_device)
        self.job = None  # the last one of the thread
        self.is_writing = False  # it has bytes that are not on the disk yet
        self.saved = None  # the facts that were saved last, or are being saved
        self.saved_at = time.monotonic()
        self.agreed = -1  # the newest step on which all ranks agreed; a checkpoint of it is kept
        self.error = None  # of the last save, until `report` has told it
        self.failures = 0  # in a row
        copy_to = state.opts.copy_to
        self.bucket = extra("copy_to")(copy_to, self) if copy_to else None  # follows what is saved

    # ---- while training continues -----------------------------------------------------------------
    def allocate(self):
        """Make room on the disk, and memory for the copy; after the first step, which it would slow down."""
        if self.job is None:
            self.job = self.pool.submit(self._allocate)

    def _allocate(self):
        if self.saved and self.writer.trusts_disk:  # after the first step, which it must not delay
            self.prune(self.saved["step"])
        self._make_images(self.writer.layout.checked(self.state.tensors()))

    def _make_images(self, named):
        """Make them anew, if more is remembered than before."""
        for kind, tensors in named.items():
            if kind not in self.images or self.images[kind].specs != specs_of(tensors):
                self.images[kind] = Image(tensors)

    def save(self):
        """Copy the state, unless it is saved already; wait for the save before. No collective."""
        state = self.state
        state.wait_for_gpu()  # not under the lock: a rescue needs it if a collective hangs
        if state.invalid or state.facts() == self.saved:
            return
        self.wait()
        self.saved_at = time.monotonic()
        try:
            with state.lock:
                named = self.writer.layout.checked(state.tensors())
                self._make_images(named)
                for kind, tensors in named.items():
                    self.images[kind].copy(tensors)
                facts = state.facts()
        except (OSError, MemoryError) as error:  # there is no memory for the copy
            self._note_failure(error)
            return
        self.saved = facts
        self.is_writing = True
        self.job = self.pool.submit(self._write_copy, facts)

    def _write_copy(self, facts):
        try:
            folder = self.write({kind: image.views for kind, image in self.images.items()}, facts)
            self.is_writing = False
            self.writer.read_back(facts["step"], folder)
            self.prune(facts["step"])
            seconds = round(time.monotonic() - self.saved_at, 3)
            self.ledger.event("save", step=facts["step"], save_s=seconds)
            self.failures = 0
            if self.bucket and not self.rank:
                self.bucket.follow()
        except Exception as error:
            self._note_failure(error)

    def _note_failure(self, error):
        self.saved = None  # so that the next interval tries again
        self.failures += 1
        self.error = error

    def report(self):
        """Tell of a save that has failed; raise the third one in a row."""
        error = self.error
        self.error = None
        if isinstance(error, UserError):
            raise error
        if error:
            say(f"save failed ({self.failures} in a row), training goes on: {error}")
        if error and self.failures >= MOST_FAILURES:
            raise UserError(
                f"{self.failures} saves in a row have failed, the last one: {error}\n"
                f"what is in {self.writer.root} stands; make room, then start again",
                code=4,
            )

    def wait(self, in_rescue=False):
        """Wait until the save under way is on the disk or has failed. A slow disk is no hang.

        A rescue waits only as long as bytes are written: it writes its own files.
        """
        timer = IdleTimer()
        while self.job and futures.wait([self.job], 0.1).not_done and (self.is_writing or not in_rescue):
            if not timer.hangs(self.writer.moved):
                self.state.heartbeat += 1
            elif in_rescue:
                return

    def close(self):
        """End the thread, once the last save is on the disk or has failed three times."""
        self.wait()
        while self.error:
            self.report()
            self.save()
            self.wait()
        self.pool.shutdown()

    # ---- a checkpoint -----------------------------------------------------------------------------
    def write(self, tensors, facts):
        """Write a new checkpoint, return its folder; UserError if a weight is no number any more."""
        net = tensors["model"]
        for name in self.state.names.values():
            if name in net and not_finite(net[name]):
                raise self.state.diverged(f"step {facts['step']}: {name} is no longer finite")
        return self.writer.commit(tensors, facts)

    def prune(self, step):
        """Delete checkpoints that are older than this step and need not be kept."""
        self.writer.prune(step, self.state.opts, self.agreed)

    # ---- in a rescue ------------------------------------------------------------------------------
    def rescue(self, why):
        """Save the newest whole step; return in words what was saved; "" if that was there already.

        The rescue is announced before anything that waits: from there on
        a new life waits for this one.
        """
        state = self.state
        began = time.monotonic()
        self.writer.check_staging(state.progress.step)
        with ExitStack() as contexts:
            for side in self.sides:
                contexts.enter_context(side)

            def lock_state():
                contexts.enter_context(self._locked_state(began))
                return state.facts()

            def needless():
                return not state.invalid and self.writer.holds(state.facts())

            is_asked = contexts.enter_context(self.writer.alone(needless, lock_state))
            lock_state()
            if state.invalid:
                raise state.invalid
            if not is_asked:
                return ""
            self.wait(in_rescue=True)
            state.wait_for_update()
            return self._write_live(why, began)

    @contextmanager
    def _locked_state(self, began):
        """Wait for the end of the step that the main thread is in; then it makes none meanwhile."""
        clock = time.pthread_getcpuclockid(threading.main_thread().ident)
        timer = IdleTimer()
        while not self.state.lock.acquire(timeout=0.1):
            stands_still = timer(time.clock_gettime(clock)) > STEP_SECONDS
            if stands_still or time.monotonic() - began > LONGEST_SECONDS:
                raise UserError(
                    f"step {self.state.progress.step + 1} hangs half way, the newest checkpoint stands",
                    code=1,
                )
        try:
            yield
        finally:
            self.state.lock.release()

    def _write_live(self, why, began):
        """Save the live tensors; return in words what was saved."""
        facts = self.state.facts()
        step = facts["step"]
        # without a step this is no run yet: its options may change
        if self.state.opts.eval_only or not step or self.writer.holds(facts):
            return ""
        with suppress(Exception):  # the loop has not come back: it may be in the midst of a change
            if self.state.is_open and self.state.memory:
                self.state.memory.commit()
        tensors = {}
        for kind, own in self.writer.layout.checked(self.state.tensors()).items():
            # with their strides: for other ones the GPU would have to load a kernel
            tensors[kind] = {name: tensor.cpu() for name, tensor in own.items()}
        self.write(tensors, facts)
        self.ledger.event("rescue", step=step, why=why, rescue_s=round(time.monotonic() - began, 3))
        return f"step {step} saved by rank {self.rank}"


def not_finite(tensor):
    """Return whether it holds a NaN or an infinity; the sum alone may overflow."""
    return not tensor.sum().isfinite() and not tensor.isfinite().all()
