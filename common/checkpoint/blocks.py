"""Files in blocks: each block has a SHA-256 of its own, so that threads hash, write and read side by side.

The manifest's entry of a file is {"bytes": its size, "sha256": one hash, "blocks": [[end, SHA-256], ...]}. A
file of one block has no "blocks", and its "sha256" is that of its bytes; else that of the blocks' hashes.
"""
import contextlib
import hashlib
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from common.checkpoint.files import Damaged, opened, sync_folder

BLOCK_BYTES = 1 << 22
SYNC_BYTES = 1 << 26  # between two syncs of a long file: no stall of minutes at its end
MOST_THREADS = 8


def threads(processes=1):
    """How many threads may hash at once, if so many processes of this machine do."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // processes))


def sha(data):
    return hashlib.sha256(data).hexdigest()


def root(hashes):
    """One hash for those of all blocks."""
    return hashes[0] if len(hashes) == 1 else sha("".join(hashes).encode())


def entry_of(ends, hashes):
    """A file's entry in the manifest."""
    entry = {"bytes": ends[-1] if ends else 0, "sha256": root(hashes)}
    if len(hashes) > 1:
        entry["blocks"] = [[end, found] for end, found in zip(ends, hashes, strict=True)]
    return entry


def spans(entry):
    """(start, end, SHA-256) of each block."""
    blocks = entry.get("blocks") or [[entry["bytes"], entry["sha256"]]]
    starts = [0, *(end for end, _ in blocks)]
    return [(start, end, stated) for start, (end, stated) in zip(starts, blocks, strict=False)]


def cut(size):
    """Where each block of a file ends."""
    return [*range(BLOCK_BYTES, size, BLOCK_BYTES), size] if size else []


class Inline:
    """A pool without threads."""

    def submit(self, act, *args):
        value = act(*args)
        return SimpleNamespace(result=lambda: value)


def pool_of(count):
    """Threads that are gone at the end of the `with` block; one thread alone is the caller's own."""
    return ThreadPoolExecutor(count) if count > 1 else contextlib.nullcontext(Inline())


def write_file(path, data, moved=None, ends=None):
    """Writes and syncs a new file; returns its entry. `ends` are those of its blocks, if not all are as long.

    O_EXCL and O_NOFOLLOW: it never writes into an old file or a planted link. After a failed fsync the kernel
    counts the file's pages as clean, so the caller must drop it and write another.
    """
    view = memoryview(data).cast("B")
    ends, count = cut(len(view)) if ends is None else ends, threads()
    hashing, syncing, hashes, start = deque(), deque(), [], 0
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with pool_of(1 if len(ends) < 2 else count + 1) as pool:
            for end in ends:
                hashing.append(pool.submit(sha, view[start:end]))  # of what goes to the disk
                _write(fd, view[start:end])
                if start // SYNC_BYTES != end // SYNC_BYTES and end < len(view):
                    syncing.append(pool.submit(os.fdatasync, fd))
                if len(syncing) > 1:  # the disk is slower than this: wait, or its cache would fill the memory
                    syncing.popleft().result()
                if len(hashing) > 2 * count:
                    hashes.append(hashing.popleft().result())
                start = end
                if moved:
                    moved()
            hashes += [each.result() for each in hashing]
            for each in syncing:
                each.result()
        os.fsync(fd)
    finally:
        os.close(fd)
    return entry_of(ends, hashes)


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
    name, blocks = path.name, [span for span in spans(entry) if wanted is None or wanted(*span[:2])]
    stop = threading.Event()
    with opened(path) as fd:
        if (there := os.fstat(fd).st_size) != entry["bytes"]:
            raise Damaged(f"{name} is {there:,} bytes, manifest says {entry['bytes']:,}")
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def work(first):
            scratch = memoryview(bytearray(min(BLOCK_BYTES, entry["bytes"])))
            try:
                for start, end, stated in blocks[first::count]:
                    if not stop.is_set():
                        _read_block(fd, name, start, end, stated, scratch, use)
                        moved and moved()
            except BaseException:
                stop.set()
                raise

        count = min(count, len(blocks)) or 1
        with pool_of(count) as pool:
            for each in [pool.submit(work, first) for first in range(count)]:
                each.result()


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


def _read_block(fd, name, start, end, stated, scratch, use):
    """In format 1 a block is a whole file. A longer one is used piece by piece, before its end proves it."""
    digest, at = hashlib.sha256(), start
    while True:
        piece = scratch[:end - at]
        _fill(fd, piece, at, name)
        digest.update(piece)
        if at + len(piece) == end and digest.hexdigest() != stated:
            raise Damaged(f"{name} has SHA-256 {digest.hexdigest()[:12]}... in bytes {start:,} to {end:,}, "
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
