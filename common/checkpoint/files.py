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

CHUNK = 1 << 22
AHEAD = 3                                        # chunks read before the first of them is hashed
SYNC = 1 << 28  # bytes between two fsyncs of a long file: no stall of minutes at its end
SMALL = 1 << 16  # no JSON of ours is larger: a longer one is not ours, and is not parsed
# what is there is no file of ours
WRONG = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
PAUSES = (0.1, 0.4, 1.0, 2.5)                    # seconds between the tries of a read that fails


class Damaged(Exception):
    """This file is proven wrong; the text says why, with both values."""


@contextlib.contextmanager
def proven(path):
    """An OSError that tells what is there is damage; any other (no memory, no server) proves nothing, and
    stays an OSError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in WRONG:
            raise Damaged(f"{Path(error.filename or path).name}: {error.strerror or error}") from error
        error.filename = error.filename or str(path)
        raise


def patient(read):
    """A read that an OSError does not end at once: it may be gone in seconds, and nothing may be given up for
    it.
    """
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
    """Bytes on the disk under a name that was free; returns (size, SHA-256).

    O_EXCL and O_NOFOLLOW: neither a leftover nor a planted link is ever written into. A failed fsync is the
    end of the file: the kernel counts its pages as clean from then on, so the caller drops it and writes
    another. `data` may also be an iterator of pieces.
    """
    digest, at = hashlib.sha256(), 0
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for piece in data if hasattr(data, "__next__") else (data,):
            view, start = memoryview(piece).cast("B"), 0
            while start < len(view):
                n = os.write(fd, view[start:start + CHUNK])
                digest.update(view[start:start + n])  # what went to the disk, not what is there afterwards
                if at // SYNC != (at + n) // SYNC:
                    os.fsync(fd)
                at, start = at + n, start + n
                if moved:
                    moved()
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


def sync_lines(run_dir, life):
    """What this machine's processes have told of the run so far is on the disk; nobody dies of a log that
    cannot be synced.
    """
    names = ("metrics.jsonl", "ledger.jsonl", "audit", "")  # and the folders, for the names in them
    for path in (*(run_dir / name for name in names), *run_dir.glob(f"audit/life-{life}-*")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)


def replace_file(path, data):
    """New content or old content under `path`, never a mixture; for small files that are rewritten."""
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
    """The file's SHA-256, its bytes left in `buffer`; refuses links, other kinds of file and another size,
    before reading.

    `from_disk` drops what the kernel still has in memory first: what is read then is what a power loss would
    leave. `seen(at, data)` is called with each piece, in order.
    """
    name = Path(path).name
    with opened(path) as fd:
        if (there := os.fstat(fd).st_size) != size:
            raise Damaged(f"{name} is {there:,} bytes, manifest says {size:,}")
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        digest, at, hashed = hashlib.sha256(), 0, deque()
        scratch = cycle([memoryview(bytearray(min(CHUNK, size))) for _ in range(AHEAD if buffer is None else 0)])
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
                    if len(hashed) == AHEAD:  # what is read into next has been hashed
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
    """Open for reading: no link is followed, no pipe or device waited for."""
    with proven(path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Damaged(f"{Path(path).name} is not a regular file")
            yield fd
        finally:
            os.close(fd)


def parse_json(data, name):
    """The JSON object in `data`, read strictly: no NaN, no infinity, no name twice, nothing that nests
    without end.
    """
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
        raise ValueError("a name is there twice")
    return value


def to_json(value):
    """The one way we write an object: equal objects are equal bytes."""
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def sealed(value):
    """The object with its own SHA-256 in it, as bytes."""
    return to_json(value | {"seal": hashlib.sha256(to_json(value)).hexdigest()})


def unseal(data, name):
    """The object that `sealed` wrote; one changed bit anywhere, even in a space, is damage."""
    value = parse_json(data, name)
    value.pop("seal", None)
    if sealed(value) != data:
        raise Damaged(f"{name} does not match its own seal")
    return value


def room(error, path, needed):
    """What a person needs to know about a failed write: path, needed and free bytes."""
    place, free = Path(path), "free space unknown"
    with contextlib.suppress(OSError):
        place = next(p for p in (place, *place.parents) if p.exists())
        info = os.statvfs(place)
        free = f"{info.f_bavail * info.f_frsize:,} bytes free"
    name = errno.errorcode.get(error.errno, "?") if error.errno else "?"
    return f"{path}: {error.strerror or error} ({name}); needed {needed:,} bytes, {free}"
