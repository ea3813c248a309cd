"""The commit protocol: images and facts become one checkpoint on the disk, whole or not at all.

A crash (C) between two of these points leaves the checkpoint before, or both, never neither:
    C  step-N.k/ is made in this life's staging folder        swept by the next life
    C  state, model, optimizer written and synced             swept
    C  manifest.json written and synced, last                 swept: complete, but not under its name
    C  the lines of metrics, ledger and audit synced          they tell of each step in a checkpoint
    C  the folder synced, renamed to checkpoints/step-N       on a power loss N is there whole or not at all
    C  checkpoints/ synced                                    committed; what had the name before is deleted
    C  N read back from the disk and verified                 only now may older ones go
    C  older ones renamed into staging, then deleted          extra files only
If step-N exists already (same step, later facts), the two folders swap names in one step: old or new. If it
is damaged, and the file system cannot swap, it is renamed first: nothing good is lost.
"""
import atexit
import contextlib
import errno
import itertools
import os
import queue
import shutil
import threading

import common.checkpoint.blocks as blocks
import common.checkpoint.files as files
from common.checkpoint.fence import Fenced, exists, rescuing
from common.checkpoint.files import Damaged
from common.checkpoint.manifest import (
    MANIFEST,
    STATE,
    TENSORS,
    checkpoints,
    facts_to_json,
    folder_name,
    is_there,
    read_manifest,
    verify,
    write_manifest,
)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
ASIDE = "damaged-"       # a checkpoint that is not trusted is kept under this name until a newer one is saved


class Hurried(Exception):
    """A rescue does not wait until the save before it has been read back."""


class Writer:
    """Writes into the staging folder of one life and renames out of it.

    If the folder is gone, another life has taken over (Fenced). `marks` goes into each manifest.
    """

    def __init__(self, root, staging, marks):
        self.root, self.staging, self.marks = root, staging, marks
        self.numbers, self.moved, self.renew, self.hurry = itertools.count(), 0, None, False
        self.door, self.inside, self.announced = threading.Lock(), 0, None

    def commit(self, images, facts, parent):
        """Commits; OSError if the disk fails twice, Fenced if another life has taken over.

        After a failed write or fsync everything is written again, once, to other files.
        """
        name, unsure = folder_name(facts["step"]), False
        for attempt in (1, 2):
            aside = self.staging / f"{name}.{os.getpid()}.{next(self.numbers)}"
            try:
                self._write_aside(aside, images, facts, parent)
                files.sync_lines(self.root.parent, self.marks["life"])
                self._name(aside, self.root / name, unsure)
                unsure = True
                files.sync_folder(self.root)
                for old in (aside, _damaged(aside)):  # what had the name before goes once that is on the disk
                    _delete(old)
                return
            except (OSError, Damaged) as error:  # Damaged: a part that should be joined
                shutil.rmtree(aside, ignore_errors=True)
                self.ensure_staging(facts["step"])
                if attempt == 2 or isinstance(error, Damaged) or error.errno in FULL:
                    raise

    def ensure_staging(self, step):
        """Fenced if another life has moved the staging folder away; makes it again if a person deleted it."""
        if not exists(self.staging):
            if self.renew is None:
                raise Fenced(f"{self.staging.parent.parent} was taken over by another life: "
                             f"step {step} of this one is not saved")
            self.renew()

    def is_saved(self, state):
        """Whether the newest whole step is on the disk; False also while a step is being made."""
        if not state.lock.acquire(blocking=False):
            return False
        try:
            return not state.half_updated and is_there(self.root, state.facts())
        finally:
            state.lock.release()

    @contextlib.contextmanager
    def rescuing(self, step, needless=None):
        """fence.rescuing, once a process: the first of two threads to close it would unlock it for both."""
        with self.door:
            if not self.inside:
                self.ensure_staging(step)
                self.announced = contextlib.ExitStack()
                self.announced.enter_context(rescuing(self.staging, lambda: self.moved, needless))
            self.inside += 1
        try:
            yield
        finally:
            with self.door:
                self.inside -= 1
                if not self.inside:
                    self.announced.close()

    def _write_aside(self, aside, images, facts, parent):
        os.mkdir(aside, 0o700)
        written = {STATE: blocks.write_file(aside / STATE, facts_to_json(facts))}
        for part, name in TENSORS.items():
            written[name] = blocks.write_file(aside / name, images[part].bytes, self._move)
        fields = self.marks | {"step": facts["step"], "parent": parent}
        blocks.write_file(aside / MANIFEST, write_manifest(fields, written))
        files.sync_folder(aside)

    def _move(self):
        self.moved += 1

    def _read_on(self):
        self._move()
        if self.hurry:
            raise Hurried

    def _name(self, aside, final, unsure):
        try:
            os.rename(aside, final)
            return
        except OSError as error:
            if error.errno not in THERE:
                raise
        try:
            theirs, _ = verify(int(final.name[5:]), final)
            if theirs["files"] == read_manifest(theirs["step"], aside)["files"] and not unsure:
                return  # another survivor of this life was faster
        except Damaged:
            theirs = None
        try:
            files.exchange(aside, final)
        except OSError as error:
            if error.errno == errno.ENOENT or unsure:  # fenced; or its name may not be on the disk: not saved
                raise
            if theirs is None:  # else the same step, whole: better than a moment without
                os.rename(final, _damaged(aside))
                os.rename(aside, final)

    def read_back(self, step):
        """Verifies what the disk gives back; if it is damaged, puts it aside and raises."""
        final = self.root / folder_name(step)
        try:
            verify(step, final, from_disk=True, moved=self._read_on, count=blocks.threads())
        except Damaged:
            self.put_aside(final)
            raise

    def put_aside(self, folder):
        """Renames a checkpoint, so that it counts no more; it is kept until a newer one is saved."""
        to = self.root / f"{ASIDE}{folder.name}"
        _delete(to)
        with contextlib.suppress(OSError):
            os.rename(folder, to)

    def delete_old(self, keep, protected):
        """Once the newest is verified: deletes all but the newest `keep` and the `protected` steps."""
        extra = [folder for step, folder in checkpoints(self.root)[keep:] if step not in protected]
        if extra:
            extra += [path for path in self.root.iterdir() if path.name.startswith(ASIDE)]
        for folder in extra:
            gone = self.staging / f"{folder.name}.{next(self.numbers)}.gone"
            with contextlib.suppress(OSError):
                os.rename(folder, gone)  # a crash in mid-deletion leaves no half checkpoint
                _delete(gone)


class Background:
    """One thread for all saves: starting one makes training wait. `busy` is held from copy to end of save."""

    def __init__(self):
        self.busy, self.work, self.thread = threading.Lock(), queue.SimpleQueue(), None
        self.closing = False

    def do(self, task):
        """Hands the task to the thread and returns at once; one that saves has `busy`, and releases it."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._serve, daemon=True, name="writer")
            try:
                self.thread.start()
                atexit.register(self.close)
            except RuntimeError:  # no thread can be started
                self.thread = None
                return task()
        self.work.put(task)

    def wait(self, timeout=-1):
        """Waits for the save under way; False if it is not over within `timeout`."""
        if self.busy.acquire(timeout=timeout):
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


def _damaged(aside):
    return aside.with_name(f"{aside.name}.damaged")


def _delete(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)
