"""Durable files: written aside, synced, renamed, read back. No torch, no pickle: names, bytes and JSON."""
import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import math
import os
import stat
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

CHUNK = 1 << 22    # bytes
CHUNKS_AHEAD = 3   # read before the first of them is hashed
SYNC_BYTES = 1 << 28  # between two fsyncs of a long file: no stall of minutes at its end
SMALL = 1 << 16    # bytes of our largest JSON: a longer one is not ours, and is not parsed
# errors that prove that no file of ours has this name
WRONG = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
PAUSES = (0.1, 0.4, 1.0, 2.5)  # seconds between the tries of a read that fails


class Damaged(Exception):
    """This file is proven wrong; the text says why, with both values."""


@contextlib.contextmanager
def proven(path):
    """Turns the OSErrors in WRONG into Damaged; any other (no memory, no server) proves nothing and stays."""
    try:
        yield
    except OSError as error:
        if error.errno in WRONG:
            raise Damaged(f"{Path(error.filename or path).name}: {error.strerror or error}") from error
        error.filename = error.filename or str(path)
        raise


def patient(read):
    """Repeats a read that ends with an OSError: the error may be gone in seconds."""
    @functools.wraps(read)
    def again(*args, **kwargs):
        for pause in PAUSES:
            try:
                return read(*args, **kwargs)
            except OSError:
                time.sleep(pause)
        return read(*args, **kwargs)
    return again


def write_file(path, data, moved=None):
    """Writes and syncs a new file; returns (size, SHA-256). `data` may also be an iterator of pieces.

    O_EXCL and O_NOFOLLOW: it never writes into an old file or a planted link. After a failed fsync the kernel
    counts the file's pages as clean, so the caller must drop it and write another.
    """
    digest, at = hashlib.sha256(), 0
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for piece in data if hasattr(data, "__next__") else (data,):
            view, start = memoryview(piece).cast("B"), 0
            while start < len(view):
                n = os.write(fd, view[start:start + CHUNK])
                digest.update(view[start:start + n])  # of what went to the disk
                if at // SYNC_BYTES != (at + n) // SYNC_BYTES:
                    os.fsync(fd)
                at, start = at + n, start + n
                if moved:
                    moved()
        os.fsync(fd)
    finally:
        os.close(fd)
    return at, digest.hexdigest()


def sync_folder(path):
    """Syncs the names in a folder: a rename is only on the disk after that."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_lines(run_dir, life):
    """Syncs what this machine's processes have logged of the run; a log that cannot be synced is no error."""
    names = ("metrics.jsonl", "ledger.jsonl", "audit", "")  # and the folders, for the names in them
    for path in (*(run_dir / name for name in names), *run_dir.glob(f"audit/life-{life}-*")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)


def replace_file(path, data):
    """Replaces a small file: a reader finds the new content or the old one, never a mixture."""
    aside = Path(f"{path}.{os.getpid()}.new")
    aside.unlink(missing_ok=True)
    try:
        write_file(aside, data)
        os.rename(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise
    sync_folder(aside.parent)


def exchange(one, other):
    """Swap two names in one step (Linux; file systems without it raise OSError)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(one))
    if rename(-100, os.fsencode(one), -100, os.fsencode(other), 2):  # AT_FDCWD twice, RENAME_EXCHANGE
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(one))


def read_into(path, size, buffer=None, from_disk=False, seen=None):
    """Reads the file into `buffer`, returns its SHA-256; refuses links, other kinds and another size first.

    `from_disk` drops the kernel's cache of the file first: so it reads what a power loss would leave.
    `seen(at, data)` is called with each piece, in order.
    """
    name = Path(path).name
    with opened(path) as fd:
        if (there := os.fstat(fd).st_size) != size:
            raise Damaged(f"{name} is {there:,} bytes, manifest says {size:,}")
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        digest, at, hashed = hashlib.sha256(), 0, deque()
        count = CHUNKS_AHEAD if buffer is None else 0
        scratch = cycle([memoryview(bytearray(min(CHUNK, size))) for _ in range(count)])
        # Reading runs ahead of hashing: both are slow, and neither holds Python's lock.
        with ThreadPoolExecutor(1) if size > CHUNK else contextlib.nullcontext() as pool:
            while at < size:
                want = min(CHUNK, size - at)
                piece = buffer[at:at + want] if buffer is not None else next(scratch)[:want]
                piece = piece[:os.readv(fd, [piece])]
                if not piece:
                    raise Damaged(f"{name} ends after {at:,} of {size:,} bytes")
                if pool is None:
                    digest.update(piece)
                else:
                    hashed.append(pool.submit(digest.update, piece))
                    if len(hashed) == CHUNKS_AHEAD:  # the next read overwrites the first of them
                        hashed.popleft().result()
                if seen:
                    seen(at, piece)
                at += len(piece)
        return digest.hexdigest()


def read_small(path, limit=SMALL):
    """All bytes of a small regular file; a larger one is refused, not read."""
    with opened(path) as fd:
        data = b""
        while len(data) <= limit and (piece := os.read(fd, limit + 1 - len(data))):
            data += piece
    if len(data) > limit:
        raise Damaged(f"{Path(path).name} is larger than {limit:,} bytes")
    return data


@contextlib.contextmanager
def opened(path):
    """Opens a regular file for reading; follows no link, does not wait for a pipe or device."""
    with proven(path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Damaged(f"{Path(path).name} is not a regular file")
            yield fd
        finally:
            os.close(fd)


def parse_json(data, name):
    """The JSON object in `data`; Damaged for NaN, infinity, a name twice, or endless nesting."""
    try:
        value = json.loads(data, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not JSON ({str(error)[:60]})") from error
    if not isinstance(value, dict):
        raise Damaged(f"{name} is not a JSON object")
    return value


def _refuse(text):
    raise ValueError(f"{text} is no number")


def _finite(text):
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number")
    return value


def _once(pairs):
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("it has a name twice")
    return value


def to_json(value):
    """JSON as bytes; equal objects give equal bytes."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def sealed(value):
    """The object with its own SHA-256 in it, as bytes."""
    return to_json(value | {"seal": hashlib.sha256(to_json(value)).hexdigest()})


def unseal(data, name):
    """The object that `sealed` wrote; Damaged if one bit has changed, even in a space."""
    value = parse_json(data, name)
    value.pop("seal", None)
    if sealed(value) != data:
        raise Damaged(f"{name} does not match its own seal")
    return value


def room(error, path, needed):
    """A text about a failed write: path, reason, needed and free bytes."""
    place, free = Path(path), "free space unknown"
    with contextlib.suppress(OSError):
        place = next(p for p in (place, *place.parents) if p.exists())
        info = os.statvfs(place)
        free = f"{info.f_bavail * info.f_frsize:,} bytes free"
    name = errno.errorcode.get(error.errno, "?") if error.errno else "?"
    return f"{path}: {error.strerror or error} ({name}); needed {needed:,} bytes, {free}"
