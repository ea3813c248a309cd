"""Durable files: written aside, synced, renamed, verified. No torch, no pickle: names, bytes and JSON."""
import errno
import hashlib
import json
import os
import stat
from pathlib import Path

CHUNK = 1 << 22
SMALL = 1 << 24                                  # no JSON of ours is larger: a longer one is not ours
MANIFEST = "manifest.json"


class Damaged(Exception):
    """This checkpoint cannot be trusted; the text says why, with both values."""


def write_file(path, data):
    """Bytes on the disk under a name that was free; returns (size, SHA-256).

    O_EXCL and O_NOFOLLOW: neither a leftover nor a planted link is ever written into. fsync is called once: after a
    failed one the kernel counts the pages as clean, so the caller drops this file and writes another.
    """
    view, digest, at = memoryview(data).cast("B"), hashlib.sha256(), 0
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while at < len(view):
            n = os.write(fd, view[at:at + CHUNK])
            digest.update(view[at:at + n])
            at += n
        os.fsync(fd)
    finally:
        os.close(fd)
    return at, digest.hexdigest()


def sync_folder(path):
    """Names are data of the folder: a rename is only on the disk once the folder is synced."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path, data):
    """New content or old content under `path`, never a mixture; for small files that are rewritten."""
    aside = Path(f"{path}.{os.getpid()}.new")
    aside.unlink(missing_ok=True)
    write_file(aside, data)
    os.rename(aside, path)
    sync_folder(aside.parent)


def read_into(path, size, buffer=None):
    """The file's SHA-256, its bytes left in `buffer`; refuses links, other kinds of file and another size, before reading."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Damaged(f"{Path(path).name} is not a regular file")
        if info.st_size != size:
            raise Damaged(f"{Path(path).name} is {info.st_size:,} bytes, manifest says {size:,}")
        digest, at = hashlib.sha256(), 0
        scratch = None if buffer is not None else memoryview(bytearray(min(CHUNK, max(size, 1))))
        while at < size:
            want = min(CHUNK, size - at)
            piece = scratch[:want] if buffer is None else buffer[at:at + want]
            n = os.readv(fd, [piece])
            if n == 0:
                raise Damaged(f"{Path(path).name} ends after {at:,} of {size:,} bytes")
            digest.update(piece[:n])
            at += n
        return digest.hexdigest()
    finally:
        os.close(fd)


def read_json(path, limit=SMALL):
    """A small JSON object; anything else is damage, and nothing larger than `limit` is read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Damaged(f"{Path(path).name} is not a regular file")
            data = file.read(limit + 1)
    except OSError as error:
        raise Damaged(f"{Path(path).name}: {error.strerror}") from error
    if len(data) > limit:
        raise Damaged(f"{Path(path).name} is larger than {limit:,} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{Path(path).name} is not JSON ({str(error)[:60]})") from error
    if not isinstance(value, dict):
        raise Damaged(f"{Path(path).name} is not a JSON object")
    return value


def to_json(value):
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def checkpoints(root):
    """Committed checkpoints under `root`, newest first, as (step, folder); what they hold is not looked at."""
    found = []
    for entry in os.scandir(root) if os.path.isdir(root) else ():
        head, _, digits = entry.name.partition("-")
        if head == "step" and len(digits) >= 8 and digits.isdecimal() and digits.isascii():
            found.append((int(digits), Path(entry.path)))
    return sorted(found, reverse=True)


def read_manifest(step, folder, names):
    """The manifest of a checkpoint, every field checked for kind and range; its seal is its own SHA-256."""
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise Damaged("not a folder")
    manifest = read_json(folder / MANIFEST)
    seal = manifest.pop("seal", None)
    if seal != hashlib.sha256(to_json(manifest)).hexdigest():
        raise Damaged(f"{MANIFEST} does not match its own seal")
    if manifest.get("step") != step:
        raise Damaged(f"{MANIFEST} is of step {manifest.get('step')}, the folder says {step}")
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != set(names):
        raise Damaged(f"{MANIFEST} lists {sorted(files) if isinstance(files, dict) else files}, expected {sorted(names)}")
    for name, file in files.items():
        if not (isinstance(file, dict) and type(file.get("bytes")) is int and file["bytes"] >= 0
                and isinstance(file.get("sha256"), str)):
            raise Damaged(f"{MANIFEST}: no size or SHA-256 for {name}")
    return manifest


def verify(step, folder, names, buffers=None):
    """The manifest, once every byte it speaks of has been read and hashed; the bytes stay in `buffers` where given."""
    try:
        manifest = read_manifest(step, folder, names)
        for name, file in manifest["files"].items():
            buffer = (buffers or {}).get(name)
            if buffer is not None and len(buffer) != file["bytes"]:
                raise Damaged(f"{name} is {file['bytes']:,} bytes, this model and optimizer need {len(buffer):,}")
            if (sha := read_into(folder / name, file["bytes"], buffer)) != file["sha256"]:
                raise Damaged(f"{name} has SHA-256 {sha[:12]}..., manifest says {file['sha256'][:12]}...")
        return manifest
    except OSError as error:
        raise Damaged(f"{Path(error.filename or folder).name}: {error.strerror or error}") from error


def room(error, path, needed):
    """What a person needs to know about a failed write: path, needed and free bytes."""
    try:
        info = os.statvfs(path)
        free = f"{info.f_bavail * info.f_frsize:,} bytes free"
    except OSError:
        free = "free space unknown"
    name = errno.errorcode.get(error.errno, "?") if error.errno else "?"
    return f"{path}: {error.strerror or error} ({name}); needed {needed:,} bytes, {free}"
