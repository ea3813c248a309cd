"""Files in blocks: each block has a hash of its own, so that threads hash, write and read side by side.

The manifest's entry of a file is {"bytes": its size, "sha256": one hash, "blocks": [[end, SHA-256], ...]}. A
file of one block has no "blocks", and its "sha256" is that of its bytes; else that of the blocks' hashes.
What lies in memory has "crc32" for "sha256": it need not outlast bad disks, and a death waits for it.
"""
import contextlib
import hashlib
import os
import zlib
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

from common.checkpoint.files import Damaged, opened, sync_folder

BLOCK_BYTES = 1 << 22
SYNC_BYTES = 1 << 26  # between two syncs of a long file: no stall of minutes at its end
MOST_THREADS = 8


def threads(processes=1):
    """How many threads may hash at once, if so many processes of this machine do."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // processes))


class Crc:
    """A CRC-32 as hashlib would have it, in as many digits as a SHA-256."""

    def __init__(self, data=b""):
        self.value = zlib.crc32(data)

    def update(self, data):
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self):
        return f"{self.value:08x}".ljust(64, "0")


HASHES = {"sha256": hashlib.sha256, "crc32": Crc}


def sha(data):
    return hashlib.sha256(data).hexdigest()


def kind_of(entry):
    """Which of HASHES an entry of the manifest has."""
    return next((kind for kind in HASHES if kind in entry), None)


def root(hashes):
    """One hash for those of all blocks."""
    return hashes[0] if len(hashes) == 1 else sha("".join(hashes).encode())


def entry_of(ends, hashes, kind="sha256"):
    """A file's entry in the manifest."""
    entry = {"bytes": ends[-1] if ends else 0, kind: root(hashes)}
    if len(hashes) > 1:
        entry["blocks"] = [[end, found] for end, found in zip(ends, hashes, strict=True)]
    return entry


def spans(entry):
    """(start, end, hash) of each block."""
    blocks = entry.get("blocks") or [[entry["bytes"], entry[kind_of(entry)]]]
    starts = [0, *(end for end, _ in blocks)]
    return [(start, end, stated) for start, (end, stated) in zip(starts, blocks, strict=False)]


def cut(size):
    """Where each block of a file ends."""
    return [*range(BLOCK_BYTES, size, BLOCK_BYTES), size] if size else []


class Inline(Executor):
    """No thread but the caller's: for little work, or where no more can be started."""

    def submit(self, act, *args):
        future = Future()
        try:
            future.set_result(act(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def pool_of(count, name=""):
    """So many threads, or none."""
    pool = ThreadPoolExecutor(count, name)
    try:
        pool.submit(int)
    except RuntimeError:
        return Inline()
    return pool


def write_file(path, data, moved=None, ends=None, kind="sha256"):
    """Writes and syncs a new file; returns its entry. `ends` are those of its blocks, if not all are as long.

    `data` has a length, and `data[start:end]` is a buffer.

    O_EXCL and O_NOFOLLOW: it never writes into an old file or a planted link. After a failed fsync the kernel
    counts the file's pages as clean, so the caller must drop it and write another.
    """
    ends, count = cut(len(data)) if ends is None else ends, threads()
    hashing, syncing, hashes, start = deque(), deque(), [], 0
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with pool_of(count + 1) if len(ends) > 1 else Inline() as pool:
            for end in ends:
                view = memoryview(data[start:end])
                hashing.append(pool.submit(HASHES[kind], view))  # of what goes to the disk
                _write(fd, view)
                if start // SYNC_BYTES != end // SYNC_BYTES and end < len(data):
                    syncing.append(pool.submit(os.fdatasync, fd))
                if len(syncing) > 1:  # the disk is slower than this: wait, or its cache would fill the memory
                    syncing.popleft().result()
                if len(hashing) > 2 * count:
                    hashes.append(hashing.popleft().result().hexdigest())
                start = end
                if moved:
                    moved()
            hashes += [each.result().hexdigest() for each in hashing]
            for each in syncing:
                each.result()
        os.fsync(fd)
    finally:
        os.close(fd)
    return entry_of(ends, hashes, kind)


def _write(fd, view):
    while len(view):
        view = view[os.write(fd, view):]


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


def read_file(path, entry, use=None, wanted=None, from_disk=False, moved=None, count=1):
    """Reads a file's blocks and compares them; `use(start, data)` then gets each, on one of `count` threads.

    `wanted(start, end)` chooses among the blocks. `from_disk` drops the kernel's cache of the file first: so
    it reads what a power loss would leave. Follows no link; refuses other kinds of files and another size.
    """
    kind, name = kind_of(entry), path.name
    chosen = [span for span in spans(entry) if wanted is None or wanted(*span[:2])]
    with opened(path) as fd:
        if (there := os.fstat(fd).st_size) != entry["bytes"]:
            raise Damaged(f"{name} is {there:,} bytes, manifest says {entry['bytes']:,}")
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def work(first):
            scratch = memoryview(bytearray(min(BLOCK_BYTES, entry["bytes"])))
            for span in chosen[first::count]:
                _read_block(fd, name, kind, span, scratch, use)
                moved and moved()

        count = min(count, len(chosen)) or 1
        with pool_of(count) if count > 1 else Inline() as pool:
            list(pool.map(work, range(count)))  # raises what a thread has raised


def put(memory, start, data):
    """A `use` of read_file: keeps all of a file."""
    memory[start:start + len(data)] = data


def read_range(path, entry, start, end):
    """Some bytes of a file; all blocks in which they lie are compared."""
    found = bytearray(end - start)

    def keep(at, data):
        low, high = max(at, start), min(at + len(data), end)
        if low < high:
            found[low - start:high - start] = data[low - at:high - at]
    read_file(path, entry, keep, lambda first, last: first < end and last > start)
    return bytes(found)


def _read_block(fd, name, kind, span, scratch, use):
    """In format 1 a block is a whole file. A longer one is used piece by piece, before its end proves it."""
    (start, end, stated), digest = span, HASHES[kind]()
    at = start
    while True:
        piece = scratch[:end - at]
        _fill(fd, piece, at, name)
        digest.update(piece)
        if at + len(piece) == end and digest.hexdigest() != stated:
            raise Damaged(f"{name} has {kind} {digest.hexdigest()[:12]}... in bytes {start:,} to {end:,}, "
                          f"manifest says {stated[:12]}...")
        if use:
            use(at, piece)
        at += len(piece)
        if at == end:
            return


def _fill(fd, place, at, name):
    while len(place):
        n = os.preadv(fd, [place], at)
        if n == 0:
            raise Damaged(f"{name} ends after {at:,} bytes")
        place, at = place[n:], at + n
