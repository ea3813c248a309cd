"""How a checkpoint is written: it is there whole, or not at all.

From tensors and facts to a folder with a name that counts. A crash (C) between two of these points leaves the
checkpoint before, or both, never neither:
    C  step-N.ID/ is made in this life's staging folder       swept by the next life
    C  model and optimizer written and synced                 swept
    C  frozen written and synced, or linked: it was synced    swept; the checkpoint before keeps its own name
    C  state.json, manifest.json, last, and the folder synced swept: complete, but not under its name
    C  both read back, as the next start will read them       swept
    C  the lines of metrics, ledger and audit synced          they tell of each step in a checkpoint
    C  the folder renamed to checkpoints/step-N               on a power loss N is there whole or not at all
    C  checkpoints/ synced                                    committed
    C  each byte read back, but not in a rescue               only now may older ones go
    C  older ones renamed into staging, then deleted          extra files only
No name is written twice: later facts of a step become step-N.1, and step-N goes with the older ones.
"""

import errno
import os
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import common.checkpoint.tensors as tensors
from common.checkpoint.disk import Damaged, delete, opened, put, sync_folder, sync_lines
from common.checkpoint.fence import RESCUE, Fence, Fenced, rescuing
from common.checkpoint.folder import ASIDE, FROZEN, MANIFEST, STATE, checkpoints, folder_name, free_number
from common.checkpoint.layout import Layout, Named
from common.checkpoint.reader import FORMATS, best_of, digest_of, read_facts, verify
from common.options import Options
from common.sealed import finite, sealed, sha, to_json

THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


def _how_far(facts):
    """Return what orders facts; within one step the evaluation comes last."""
    return facts["step"], facts["epoch"], facts["evaluated"].get("step", -1)


class Writer:
    """Writes into the staging folder of one life and renames out of it.

    If the folder is gone, another life has taken over (Fenced). `identity` is the run's, for each manifest.
    """

    def __init__(self, fence: Fence, identity: dict, layout: Layout):
        self.fence = fence
        self.root = fence.root
        self.staging = fence.staging
        self.run = sha(to_json(identity))
        self.layout = layout
        self.origin: dict = {}  # in each checkpoint's facts: of the run, not of a step
        self.moved = 0  # chunks written so far: others see that a rescue makes progress
        # False: the disk has shown damage; the next checkpoint has files of its own, and none goes before it
        self.trusts_disk = True

    # ---- what is there ---------------------------------------------------------------------------------
    def holds(self, facts: dict) -> bool:
        """Return whether the newest checkpoint of this run that can be read has this state or a later one."""
        for step, folder in checkpoints(self.root.parent):
            if step < facts["step"]:  # a rescue does not wait for a disk that fails
                break
            with suppress(Damaged, OSError):
                manifest, newest = read_facts(step, folder)
                if manifest["run"] == self.run:
                    return _how_far(newest) >= _how_far(facts)
        return False

    # ---- a checkpoint ----------------------------------------------------------------------------------
    def commit(self, sources: Named, facts: dict) -> Path:
        """Write a new checkpoint and return its folder.

        Raises what has failed twice, as OSError of the disk; Fenced if another life has taken over. After a
        failed write or fsync everything is written again, once, to other files.
        """
        try:
            return self._commit(sources, facts)
        except Exception:  # no memory, too; Fenced comes again
            return self._commit(sources, facts)

    def _commit(self, sources, facts):
        step = facts["step"]
        aside = self._aside(step)
        try:
            os.mkdir(aside, 0o700)
            files = {}
            for kind, own in sources.items():
                path = aside / f"{kind}.safetensors"
                table = None
                if path.name == FROZEN and self.trusts_disk:
                    table = self.layout.linked(path, own, self.root.parent)
                files[path.name] = table or tensors.write_file(path, own, self._move)
            self._describe(aside, files, facts)
            return self._name(aside, step)
        except Exception:
            delete(aside)
            self.check_staging(step)
            raise

    def check_staging(self, step: int) -> None:
        """Raise Fenced if the folder is gone: making a name asks the server, a look may see an old copy."""
        try:
            self.staging.touch(exist_ok=False)  # a file: no other rank can save into it meanwhile
            self.staging.unlink()
        except FileExistsError:
            return
        except FileNotFoundError:  # the folder above is gone, too
            pass
        raise Fenced(
            f"{self.root.parent} was taken over by another life, or removed: "
            f"step {step} of this one is not saved"
        )

    def alone(
        self, needless: Callable[[], bool], lock_state: Callable[[], dict]
    ) -> AbstractContextManager[bool]:
        """Return a context for a rescue: of the ranks here only this one saves; False if enough others may.

        From there on a new life waits for it. It takes no file if the rescue is `needless`. `lock_state`
        returns facts that do not change any more.
        """
        return rescuing(
            self.staging / RESCUE,
            lambda: self.moved,
            needless,
            lambda: "-".join(map(str, _how_far(lock_state()))),
        )

    def _aside(self, step):
        """Name a new folder. A pid is not enough: ranks in two containers may have the same."""
        return self.staging / f"{folder_name(step)}.{uuid.uuid4().hex[:12]}"

    def _move(self):
        self.moved += 1

    def _describe(self, folder, files, facts):
        """Add facts and manifest to a folder of this process alone, sync it, and read both back."""
        state = to_json(finite(facts | {"origin": self.origin}))
        manifest = {
            "format": FORMATS[FROZEN in files],
            "run": self.run,
            "step": facts["step"],
            "digest": digest_of(files),
            "state": sha(state),
            "files": files,
        }
        put(folder / STATE, state)
        put(folder / MANIFEST, sealed(manifest))
        sync_folder(folder)
        read_facts(facts["step"], folder)

    def _name(self, folder, step):
        sync_lines(self.root.parent, self.fence.life)
        k = free_number(self.root, step)
        while True:
            target = self.root / folder_name(step, k)
            try:
                os.rename(folder, target)
                break
            except OSError as error:
                if error.errno not in THERE:  # another rank has this name already
                    raise
                k += 1
        sync_folder(self.root)
        return target

    def read_back(self, step: int, folder: Path) -> None:
        """Read each byte of a new checkpoint from the disk; Damaged, and it is put aside, if one is wrong.

        Call it before older ones are deleted: what a disk has taken it need not give back.
        """
        for path in folder.iterdir():
            with opened(path) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel drops its copy
        try:
            verify(step, folder, moved=self._move)
        except Damaged:
            self.put_aside(folder)
            self.trusts_disk = False
            raise
        self.trusts_disk = True

    # ---- what goes -------------------------------------------------------------------------------------
    def put_aside(self, folder: Path) -> bool:
        """Rename a checkpoint, so that no start takes it; it is kept until a newer one is saved.

        By way of our staging: once that is gone, the checkpoint may be a newer life's, and stays: False.
        """
        aside = self.root / f"{ASIDE}{folder.name}"
        passing = self.staging / folder.name
        with suppress(OSError):
            os.rename(folder, passing)
            delete(aside)
            os.rename(passing, aside)
        return not folder.exists()

    def prune(self, step: int, opts: Options, agreed: int) -> None:
        """Delete checkpoints that need not be kept, and then what was put aside, too."""
        choices = checkpoints(self.root.parent)
        kept = self.kept(choices, step, best_of(choices).get("step"), opts, agreed)
        extra = [folder for _, folder in choices if folder not in kept]
        if extra:
            extra += self.root.glob(f"{ASIDE}*")
        for folder in extra:
            gone = self.staging / f"{uuid.uuid4().hex[:12]}.gone"
            with suppress(OSError):
                os.rename(folder, gone)  # a crash in mid-deletion leaves no half checkpoint
                delete(gone)

    @staticmethod
    def kept(choices: list, step: int, best: int | None, opts: Options, agreed: int) -> list:
        """Return the folders among the `choices`, (step, folder), newest first, that need to be kept.

        These are this step, the newest (--keep), those of --keep-every, the best, and the newest one up to
        the step on which all ranks `agreed`.
        """
        latest = dict(reversed(choices))  # of each step the latest facts
        steps = sorted(latest, reverse=True)
        newest_agreed = max((number for number in steps if number <= agreed), default=step)
        kept = {step, best, newest_agreed, *steps[: opts.keep]}
        every = opts.keep_every
        return [latest[number] for number in steps if number in kept or every and number % every == 0]
