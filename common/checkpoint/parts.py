"""A checkpoint of a net split over ranks: they write side by side, and the last one to finish names it.

    .life-L/gathered-N-STATE/part-00001/    one rank's tensors, and part.json, which tells of their blocks
    .life-L/gathered-N-STATE/part-00002/    another's
    step-N/                                 the same folder, once it holds all parts and a manifest

No rank waits for another, there is no lock and no collective. A part gets its name when it is whole; of two
ranks with the same part the first is taken. If a part never comes, the checkpoint before stays the newest.
"""
import contextlib
import os

import common.checkpoint.blocks as blocks
import common.checkpoint.files as files
from common.checkpoint.blocks import sha
from common.checkpoint.commit import THERE, Writer
from common.checkpoint.fence import RESCUE
from common.checkpoint.files import delete, sealed, unseal
from common.checkpoint.manifest import TENSORS, digest_of, facts_to_json, part_name

PART = "part.json"


class PartWriter(Writer):
    """Its `commit` returns None if parts of other ranks are still missing."""

    def lock_name(self):
        return f"{part_name(self.layout.number)}-{RESCUE}"

    def _commit(self, aside, images, facts):
        state = sha(facts_to_json(facts | {"record": None}))[:12]  # what ranks noted last may differ
        gathered = self.staging / f"gathered-{facts['step']:08d}-{state}"
        final = gathered / part_name(self.layout.number)
        if not os.path.isdir(final):
            os.mkdir(aside, 0o700)
            cuts = {part: self.layout.cut(part, image) for part, image in images.items()}
            written = self._write_tensors(aside, images, {part: ends for part, (ends, _) in cuts.items()})
            starts = {TENSORS[part]: starts for part, (_, starts) in cuts.items()}
            told = {"files": written, "starts": starts, "record": facts["record"]}
            blocks.write_file(aside / PART, sealed(told))
            files.sync_folder(aside)
            with contextlib.suppress(FileExistsError):
                os.mkdir(gathered, 0o700)
            try:
                os.rename(aside, final)
            except OSError as error:
                if error.errno not in THERE:
                    raise
                delete(aside)
            files.sync_folder(gathered)
        try:
            return self._gather(gathered, facts)
        except FileNotFoundError:  # a part is missing, or another rank has named the checkpoint
            self.ensure_staging(facts["step"])
            return None

    def _gather(self, gathered, facts):
        told, written, found = {}, {}, {name: [] for name in TENSORS.values()}
        for part in map(part_name, range(self.layout.parts)):
            with open(gathered / part / PART, "rb") as file:
                told[part] = unseal(file.read(), PART)
            for name, entry in told[part]["files"].items():
                written[f"{part}/{name}"] = entry
                found[name].append((gathered / part / name, entry, told[part]["starts"][name]))
        roots = {part: self.layout.root_of(part, found[name]) for part, name in TENSORS.items()}
        record = max((each["record"] for each in told.values()), key=lambda record: record.get("step", -1))
        aside = self._aside(facts["step"])
        os.mkdir(aside, 0o700)
        try:
            self._write_manifest(aside, gathered, facts | {"record": record}, written, digest_of(roots))
        finally:
            delete(aside)
        named = self._name(gathered, facts["step"])
        for old in self.staging.glob("gathered-*"):  # its missing part will not come any more
            if int(old.name.split("-")[1]) < facts["step"]:
                delete(old)
        return named
