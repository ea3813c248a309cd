"""The commit protocol: images and facts become one checkpoint on the disk, whole or not at all.

A crash (C) between two of these points leaves the checkpoint before, or both, never neither:
    C  step-N.k/ is made in this life's staging folder        swept by the next life
    C  state, model, optimizer written and synced             swept
    C  manifest.json written and synced, last                 swept: complete, but not under its name
    C  the lines of metrics, ledger and audit synced          they tell of each step in a checkpoint
    C  the folder synced, renamed to checkpoints/step-N       on a power loss N is there whole or not at all
    C  checkpoints/ synced                                    committed
    C  N read back from the disk and verified                 only now may older ones go
    C  older ones renamed into staging, then deleted          extra files only
No name is written twice: later facts of a step become step-N.1, and step-N goes with the older ones.
"""
import contextlib
import errno
import os
import shutil
import uuid

import common.checkpoint.blocks as blocks
import common.checkpoint.files as files
from common.checkpoint.fence import RESCUE, Fenced, exists, rescuing
from common.checkpoint.files import Damaged, delete, sealed
from common.checkpoint.manifest import (
    ASIDE,
    FORMATS,
    MANIFEST,
    STATE,
    TENSORS,
    checkpoints,
    digest_of,
    facts_to_json,
    folder_name,
    free_names,
    is_there,
    roots_of,
    verify,
)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class Leaving(Exception):
    """Ends a read-back: the save is whole, and this process leaves."""


class Writer:
    """Writes into the staging folder of one life and renames out of it.

    If the folder is gone, another life has taken over (Fenced). `marks` goes into each manifest.
    """

    def __init__(self, root, staging, marks, kind="sha256"):
        self.root, self.staging, self.marks, self.kind = root, staging, marks, kind
        self.moved, self.renew, self.leaving = 0, None, False
        self.layout = None  # as soon as the state is known

    def commit(self, images, facts):
        """The folder of the new checkpoint; None if parts of it are still missing.

        OSError if the disk fails twice, Fenced if another life has taken over. After a failed write or fsync
        everything is written again, once, to other files.
        """
        for attempt in (1, 2):
            aside = self._aside(facts["step"])
            try:
                return self._commit(aside, images, facts)
            except OSError as error:
                shutil.rmtree(aside, ignore_errors=True)
                self.ensure_staging(facts["step"])
                if attempt == 2 or error.errno in FULL:
                    raise

    def _commit(self, aside, images, facts):
        os.mkdir(aside, 0o700)
        written = self._write_tensors(aside, images)
        self._write_manifest(aside, aside, facts, written, digest_of(roots_of(written)))
        return self._name(aside, facts["step"])

    def _aside(self, step):
        """A new folder name. A pid is not enough: ranks in two containers may have the same."""
        return self.staging / f"{folder_name(step)}.{uuid.uuid4().hex[:12]}"

    def _write_tensors(self, aside, images, ends=None):
        return {name: blocks.write_file(aside / name, images[part].bytes, self._move, ends and ends[part],
                                        self.kind) for part, name in TENSORS.items()}

    def _write_manifest(self, aside, final, facts, written, digest):
        """Written aside, so that two ranks may do it at once; then renamed to `final`."""
        written |= {STATE: blocks.write_file(aside / STATE, facts_to_json(facts), kind=self.kind)}
        told = {"format": FORMATS[-1], "step": facts["step"], "digest": digest, "files": written}
        blocks.write_file(aside / MANIFEST, sealed(self.marks | told))
        for name in (STATE, MANIFEST) if aside != final else ():
            os.rename(aside / name, final / name)
        files.sync_folder(final)

    def _name(self, aside, step):
        files.sync_lines(self.root.parent, self.marks["life"])
        for name in free_names(self.root, step):
            try:
                os.rename(aside, self.root / name)
            except OSError as error:
                if error.errno not in THERE:
                    raise
            else:
                files.sync_folder(self.root)
                return self.root / name

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

    def rescuing(self, step, needless=None):
        """A context; enter it before anything that waits: a new owner would sweep the staging folder away."""
        self.ensure_staging(step)
        return rescuing(self.staging, lambda: self.moved, needless, self.lock_name())

    def lock_name(self):
        return RESCUE

    def _move(self):
        self.moved += 1

    def _read_on(self):
        self._move()
        if self.leaving:
            raise Leaving

    def read_back(self, step, folder):
        """Verifies what the disk gives back; if it is damaged, puts it aside and raises."""
        try:
            verify(step, folder, from_disk=True, moved=self._read_on)
        except Damaged:
            self.put_aside(folder)
            raise

    def put_aside(self, folder):
        """Renames a checkpoint, so that no start takes it; it is kept until a newer one is saved."""
        to = self.root / f"{ASIDE}{folder.name}"
        delete(to)
        with contextlib.suppress(OSError):
            os.rename(folder, to)

    def delete_old(self, keep, protected):
        """Once the newest is verified: deletes all but the newest `keep` and the `protected` steps.

        Of each step the latest facts stay.
        """
        latest, found = {}, checkpoints(self.root)
        for step, folder in found:
            latest.setdefault(step, folder)
        kept = {*list(latest)[:keep], *protected}
        extra = [folder for step, folder in found if step not in kept or latest[step] != folder]
        if extra:
            extra += [path for path in self.root.iterdir() if path.name.startswith(ASIDE)]
        for folder in extra:
            gone = self.staging / f"{uuid.uuid4().hex[:12]}.gone"
            with contextlib.suppress(OSError):
                os.rename(folder, gone)  # a crash in mid-deletion leaves no half checkpoint
                delete(gone)
