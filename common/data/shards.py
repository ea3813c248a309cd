"""Tar shards of images, as WebDataset writes them: with an index of offsets, a sample is one read.

    --dataset tar --data-dir DIR        # DIR/train-0000.tar, ..., DIR/val-0000.tar, ...; or DIR/train/*.tar

Files of one shard and one name up to the first dot are a sample: 17.jpg and 17.cls, or 17.png and 17.json.
The index is made once and kept beside the shards, or in the run folder if that place cannot be written.
"""
import hashlib
import io
import json
import os
import tarfile
import zlib
from array import array
from pathlib import Path

import numpy as np

from common.data.pictures import decoded, squares
from common.data.synthetic import Data
from common.errors import UserError, one_line

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff")


class Shards:
    """Sample i as (image, label); `rows` says where: shard, offset, size, label."""

    def __init__(self, paths, facts, rows):
        self.paths, self.facts, self.rows, self.groups = paths, facts, rows, facts["groups"]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        shard, offset, size, label = self.rows[i].tolist()
        with open(self.paths[shard], "rb", buffering=0) as file:
            if stamp(self.paths[shard]) != self.facts["shards"][shard]:
                raise UserError(f"{self.paths[shard]} has changed since this start\nstart again")
            content = os.pread(file.fileno(), size, offset)
        return decoded(io.BytesIO(content), f"{self.paths[shard]}, byte {offset},"), label


def tar(opts):
    """The shards of DATA_DIR."""
    parts = [Shards(*find_index(opts, name)) for name in (opts.train_folder, opts.val_folder)]
    return Data(*parts, known_classes=max(part.facts["classes"] for part in parts),
                fingerprint=" ".join(part.facts["fingerprint"] for part in parts), **squares(opts.image_size))


def stamp(path):
    info = os.stat(path)
    return [path.name, info.st_size, info.st_mtime_ns]


def find_index(opts, name):
    """(shards, facts, rows), from the index of these shards; it is made if there is none."""
    folder = Path(opts.data_dir)
    paths = sorted((folder / name).glob("*.tar")) or sorted(folder.glob(f"{name}*.tar"))
    try:
        shards, places = [stamp(path) for path in paths], [folder, Path(opts.run_dir)]
        for place in places:
            if found := read_index(place / f".{name}.index", shards):
                return paths, *found
        place = places[not os.access(folder, os.W_OK)]
        write_index(place / f".{name}.index", shards, *look_through(paths))
        return paths, *read_index(place / f".{name}.index", shards)
    except OSError as error:
        raise UserError(f"dataset tar: {error.filename or folder}: {error.strerror or error}") from error


def read_index(path, shards):
    """(facts, rows), or None if there is no index of these shards."""
    try:
        with open(path, "rb") as file:
            head = file.readline()
        facts = json.loads(head)
        if facts["shards"] == shards:
            rows = np.memmap(path, "<i8", "r", len(head), (sum(facts["groups"]), 4))
            if facts.pop("seal") == seal(facts, rows):  # one bit may be another label
                return facts, rows
    except (FileNotFoundError, ValueError, TypeError, KeyError, RecursionError):
        pass  # missing, torn or of another kind
    return None


def seal(facts, rows):
    """A CRC of the whole index: each rank reads it at each start, at 5 GB a second, SHA-256 at 1.5."""
    return zlib.crc32(rows, zlib.crc32(json.dumps(facts, sort_keys=True).encode()))


def write_index(path, shards, facts, rows):
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        facts, rows = {"shards": shards, **facts}, np.array(rows, dtype="<i8")
        head = json.dumps(facts | {"seal": seal(facts, rows)}).encode() + b"\n"
        aside.write_bytes(head + rows.tobytes())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def look_through(paths):
    """(facts, rows) of all shards."""
    rows, groups, digest = array("q"), [], hashlib.sha256()
    for shard, path in enumerate(paths):
        samples = {}
        for member, content in members(path):
            folder, _, file = member.name.rpartition("/")
            key, _, kind = file.partition(".")
            kind, plain = kind.lower(), member.isreg() and not member.issparse()
            if kind in (*IMAGES, "cls", "json"):
                what, sample = "image" if kind in IMAGES else kind, samples.setdefault((folder, key), {})
                if not plain or what in sample:
                    raise UserError(f"dataset tar: {member.name} in {path} is a link, a sparse file or the "
                                    f"second {what} of its sample\nwanted: one plain file of each kind")
                sample[what] = shard, member.offset_data, member.size
                if what != "image":
                    sample.setdefault("label", label_in(path, member.name, content()))
            if member.isreg():
                digest.update(f"{member.name}\0{member.size}\n".encode(errors="surrogateescape"))
        for (_, key), sample in samples.items():
            if lacks := {"image", "label"} - sample.keys():
                raise UserError(f"dataset tar: sample {key} of {path} has no {lacks.pop()}\n"
                                "wanted: .jpg, .png or the like, and .cls, or .json with cls or label")
            rows.extend((*sample["image"], sample["label"]))
        groups.append(len(samples))
    digest.update(rows[3::4].tobytes())
    facts = {"classes": 1 + max(rows[3::4], default=0), "fingerprint": digest.hexdigest()}
    return facts | {"groups": groups}, rows


def members(path):
    """Yield (entry, how to read it) of each file and link in a shard; UserError if it is damaged."""
    try:
        with tarfile.open(path, "r:") as shard:
            while member := shard.next():
                shard.members.clear()  # or all of them stay in memory
                if not member.isdir():
                    yield member, lambda member=member: shard.extractfile(member).read()
            shard.fileobj.seek(shard.offset)
            rest = shard.fileobj.read(2**20)
            if len(rest) < 512 or rest.strip(b"\0"):  # here tarfile ends without an error
                raise tarfile.ReadError(f"neither a file nor the end at byte {shard.offset:,}")
    except tarfile.TarError as error:
        raise UserError(f"dataset tar: {path} is damaged, or no plain tar\n{one_line(error)}") from error


def label_in(path, name, content):
    """The whole number in a .cls or .json."""
    try:
        found = json.loads(content)
        found = found.get("cls", found.get("label")) if isinstance(found, dict) else found
        if type(found) is int and 0 <= found < 2**31:
            return found
    except (ValueError, RecursionError):
        pass
    raise UserError(f"dataset tar: {name} in {path} holds {content[:20]!r}\nwanted: a whole number from 0")
