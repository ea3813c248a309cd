"""A checkpoint of a net split over ranks: they write side by side, and the last one to finish names it.

    .life-L/gathered-N-STATE/part-00001/    one rank's tensors, and part.json, which tells of their hashes
    .life-L/gathered-N-STATE/part-00002/    another's
    step-N/                                 the same folder, once it holds all parts and a manifest

No rank waits for another, there is no lock and no collective. A part gets its name when it is whole; of two
ranks with the same part the first is taken. If a part never comes, the checkpoint before stays the newest.
"""
import contextlib
import os

import common.checkpoint.disk as disk
import common.checkpoint.tensors as tensors
from common.checkpoint.disk import delete, sealed, unseal
from common.checkpoint.folder import THERE, Writer, facts_to_json, part_name
from common.checkpoint.tensors import sha

PART = "part.json"


class PartWriter(Writer):
    """Its `commit` returns None if parts of other ranks are still missing."""

    def __init__(self, root, life, run, layout):
        super().__init__(root, life, run)
        self.layout = layout

    def _commit(self, aside, images, facts):
        state = sha(facts_to_json(facts | {"record": None}))[:12]  # what ranks noted last may differ
        gathered = self.staging / f"gathered-{facts['step']:08d}-{state}"
        final = gathered / part_name(self.layout.number)
        if not os.path.isdir(final):
            os.mkdir(aside, 0o700)
            part = {"files": self._write_tensors(aside, images), "record": facts["record"]}
            tensors.write_file(aside / PART, sealed(part))
            disk.sync_folder(aside)
            with contextlib.suppress(FileExistsError):
                os.mkdir(gathered, 0o700)
            try:
                os.rename(aside, final)
            except OSError as error:
                if error.errno not in THERE:
                    raise
                delete(aside)
            disk.sync_folder(gathered)
        try:
            return self._gather(gathered, facts)
        except FileNotFoundError:  # a part is missing, or another rank has named the checkpoint
            self.ensure_staging(facts["step"])
            return None

    def _gather(self, gathered, facts):
        records, written = [], {}
        for name in map(part_name, range(self.layout.parts)):
            with open(gathered / name / PART, "rb") as file:
                part = unseal(file.read(), PART)
            records.append(part["record"])
            written |= {f"{name}/{file}": entry for file, entry in part["files"].items()}
        record = max(records, key=lambda record: record.get("step", -1))
        aside = self._aside(facts["step"])
        os.mkdir(aside, 0o700)
        try:
            self._write_manifest(aside, gathered, facts | {"record": record}, written)
        finally:
            delete(aside)
        folder = self._name(gathered, facts["step"])
        for old in self.staging.glob("gathered-*"):  # its missing part will not come any more
            if int(old.name.split("-")[1]) < facts["step"]:
                delete(old)
        return folder
