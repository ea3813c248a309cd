"""Copies the run to a bucket, for machines whose disk ends with them (--copy-to URL).

From each checkpoint that is whole on the disk to URL, and from URL to a run folder that has none. URL is a
run folder, too: options.json, the logs, checkpoints/step-N/, with options of their own: files may be torn
that are written again. A manifest is copied last: a checkpoint without one does not count.

A thread of its own copies. A bucket that is slow or away stops nothing: one warning, and the next save tries
again. It is trusted no more than a disk: a start copies a checkpoint aside, compares each byte with its
hashes, gives it its name, and then loads it as any other. Each run needs a URL of its own: no fence stands
between two jobs that copy to one.
"""

import os
import threading
import time
from contextlib import ExitStack, suppress
from queue import Queue

from fsspec.core import url_to_fs

from common.checkpoint import Damaged, checkpoints, newest_first, read_facts, read_sealed
from common.errors import UserError, blamed, one_line, say, warn
from common.extras.chosen import describe, step_of

OPTIONS = "options.json"
LOGS = "*.jsonl"  # metrics, and each machine's ledger
STATE = "state.json"
MANIFEST = "manifest.json"
END_SECONDS = 600.0  # an ending process waits no longer; its launcher may allow less


class Bucket:
    """What lies at a URL, as this rank copies to it what `saver` has written to the disk."""

    def __init__(self, url, saver):
        with blamed(f"--copy-to {url}", "pip install what reaches it, as s3fs or gcsfs, or give another URL"):
            self.files, self.root = url_to_fs(url, use_listings_cache=False)
        self.url = url
        self.saver = saver
        self.writer = saver.writer
        self.disk = self.writer.root.parent
        self.error = ""  # of the last copy
        self.jobs = Queue()
        threading.Thread(target=self._work, daemon=True, name="bucket").start()

    # ---- from the disk ----
    def follow(self, *gone):
        """Let the thread delete what is `gone`, and copy the newest checkpoint and the logs."""
        if gone or self.jobs.empty():  # one that waits will see the newest, too
            self.jobs.put(gone)

    def end(self, *gone):
        """Wait for the last copy of this process, and say what became of it."""
        say(f"copying the newest checkpoint to {self.url}")
        self.follow(*gone)
        deadline = time.monotonic() + END_SECONDS
        while self.jobs.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        error = "there was no time" if self.jobs.unfinished_tasks else self.error
        say(f"it is not there: {error}" if error else "it is there")

    def _work(self):
        while True:
            gone = self.jobs.get()
            before = self.error
            self.error = ""
            try:
                self._copy(gone)
            except Exception as error:
                self.error = one_line(error)
                if isinstance(error, UserError):
                    self.saver.error = error  # ends the training
                elif not before:
                    warn(f"{self.url}: {self.error}; training continues, each save tries again", True)
            self.jobs.task_done()

    def _copy(self, gone):
        self._delete(gone)
        for step, folder in checkpoints(self.disk)[:1]:
            manifest, facts = read_facts(step, folder)
            names = self._names()
            newest = self._newest(names)
            place = f"checkpoints/{folder.name}/"
            sources = [(path, path.name) for path in (self.disk / OPTIONS, *self.disk.glob(LOGS))]
            if newest != manifest:
                sources.append((self.disk / OPTIONS, place + OPTIONS))
                # the manifest last: the logs tell of each step in a checkpoint
                sources += [(folder / file, place + file) for file in (*manifest["files"], STATE, MANIFEST)]
            self.files.makedirs(f"{self.root}/{place}", exist_ok=True)
            with ExitStack() as opened:  # all at once: the disk may delete them meanwhile
                files = [(opened.enter_context(open(path, "rb")), name) for path, name in sources]
                for source, name in files:
                    file = name.rpartition("/")[2]
                    table = manifest["files"].get(file)
                    if table and table == newest["files"].get(file):
                        self.files.copy(f"{self.root}/checkpoints/{names[0]}/{file}", f"{self.root}/{name}")
                    else:
                        self.files.put_file(f"/proc/self/fd/{source.fileno()}", f"{self.root}/{name}")
            self._prune(step, facts["best"]["step"])

    def _prune(self, step, best):
        """Delete what the disk would not keep, and what an upload that was killed has left."""
        whole = [(step_of(name), name) for name in self._names()]
        kept = self.writer.kept(whole, step, best, self.saver.state.opts, self.saver.agreed)
        self._delete([name for name in self._names("") if name not in kept and step_of(name) <= step])

    def _delete(self, names):
        for name in names:
            with suppress(FileNotFoundError):
                self.files.rm(f"{self.root}/checkpoints/{name}", recursive=True)

    # ---- what is there ----
    def _names(self, file=MANIFEST):
        """List the checkpoints that have such a file, newest first."""
        paths = self.files.find(f"{self.root}/checkpoints")
        return newest_first([path.split("/")[-2] for path in paths if path.endswith(file)])

    def _newest(self, names):
        """Return the manifest of the first one; UserError if it is another run's."""
        for name in names[:1]:
            seen = self._get(f"{self.root}/checkpoints/{name}/{MANIFEST}", self.writer.staging)
            with suppress(Damaged):
                manifest = read_sealed(seen)
                if manifest["run"] != self.writer.run:
                    raise UserError(f"--copy-to {self.url} has another run\ngive each run a URL of its own")
                return manifest
        return {"files": {}}

    def _get(self, path, folder):
        target = folder / path.rpartition("/")[2]
        target.touch(0o600)
        self.files.get_file(path, str(target))
        return target

    # ---- to the disk ----
    def fetch(self):
        """Bring the newest checkpoint that verifies, the best one and the logs to a folder without any.

        UserError if none verifies, or if nobody knows: the bucket is away.
        """
        best = None
        try:
            names = self._names()
            self._newest(names)
            whole = []
            for name in names:
                if best in (None, step_of(name)) and self._fetch(name):
                    whole.append(name)
                    if best is None:
                        best = read_facts(step_of(name), self.writer.staging / name)[1]["best"]["step"]
            for name in reversed(whole):  # the newest one's stays
                os.rename(self.writer.staging / name / OPTIONS, self.disk / OPTIONS)
            os.sync()
            for name in whole:
                os.rename(self.writer.staging / name, self.writer.root / name)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"--copy-to {self.url} cannot be read: {one_line(error)}\n"
                f"{self.disk} has no checkpoint, that URL may have some: start again once it can be read",
                code=1,
            ) from error
        if names and best is None:
            raise UserError(
                f"--copy-to {self.url}: {len(names)} checkpoints found, none verifies\n"
                "to start afresh, give another URL",
                code=3,
            )

    def _fetch(self, name):
        """Return whether this checkpoint is whole, and now in our staging folder."""
        aside = self.writer.staging / name
        aside.mkdir(0o700)
        for path in self.files.find(f"{self.root}/checkpoints/{name}"):
            self._get(path, aside)
        whole, line = describe(step_of(name), aside)
        try:
            read_sealed(aside / OPTIONS)
        except (Damaged, OSError) as error:
            whole = False
            line = f"{name}  damaged: {error}"
        say(f"{self.url}: {line}")
        if whole:
            for path in self.files.glob(f"{self.root}/{LOGS}"):
                self._get(path, self.disk)
        return whole
