"""Files in blocks: each block has a hash of its own, so that threads hash, write and read side by side.

The manifest's entry of a file is {"bytes": its size, "sha256": one hash, "blocks": [[end, SHA-256], ...]}. A
file of one block has no "blocks", and its "sha256" is that of its bytes; else that of the blocks' hashes.
What lies in memory has "sums" for "sha256": no disk lies between, and a death waits for it.
"""
import contextlib
import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common.checkpoint.files import Damaged, opened

BLOCK_BYTES = 1 << 22
ROW_BYTES = 1 << 12
SYNC_BYTES = 1 << 26  # between two syncs of a long file: no stall of minutes at its end
MOST_THREADS = 8


def threads(processes=1):
    """How many threads of this process may hash, if so many processes of this machine hash at once."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // processes))


class Sums:
    """A SHA-256 over sums of 4 KB, as quick as a copy: changed bits, torn writes and swapped pages show."""

    def __init__(self, data=b""):
        self.digest = hashlib.sha256()
        self.update(data)

    def update(self, data):
        whole = len(data) // ROW_BYTES * ROW_BYTES
        rows = np.frombuffer(data, np.uint64, whole // 8).reshape(-1, ROW_BYTES // 8)
        self.digest.update(rows.sum(1))
        self.digest.update(data[whole:])

    def hexdigest(self):
        return self.digest.hexdigest()


HASHES = {"sha256": hashlib.sha256, "sums": Sums}


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


def spread(act, count, *items):
    """[act(item) of all items], on `count` threads; on the caller's if one is enough or none can start."""
    if min(count, len(items[0])) > 1:
        with contextlib.suppress(RuntimeError), ThreadPoolExecutor(count) as pool:
            return list(pool.map(act, *items))
    return list(map(act, *items))


def write_file(path, data, moved=None, ends=None, kind="sha256"):
    """Writes and syncs a new file; returns its entry. `ends` are those of its blocks, if not all are as long.

    `data` has a length, and `data[start:end]` is a buffer.

    O_EXCL and O_NOFOLLOW: it never writes into an old file or a planted link. After a failed fsync the kernel
    counts the file's pages as clean, so the caller must drop it and write another.
    """
    ends = cut(len(data)) if ends is None else ends
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def write(start, end):
        view, at = memoryview(data[start:end]), start
        digest = HASHES[kind](view)  # of what goes to the disk
        while at < end:
            at += os.pwrite(fd, view[at - start:], at)
        if start // SYNC_BYTES != end // SYNC_BYTES:  # or a slow disk's cache would fill the memory
            os.fdatasync(fd)
        moved and moved()
        return digest.hexdigest()

    try:
        hashes = spread(write, threads() + 1, [0, *ends[:-1]], ends)
        os.fsync(fd)
    finally:
        os.close(fd)
    return entry_of(ends, hashes, kind)


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
            fetch = (_mapped if kind == "sums" else _reader)(fd, name, entry["bytes"])
            for span in chosen[first::count]:
                _compare(fetch, name, kind, span, use)
                moved and moved()

        count = min(count, len(chosen)) or 1
        spread(work, count, range(count))  # raises what a thread has raised


def read_range(path, entry, start, end, from_disk=False):
    """Bytes `start` to `end` of a file; every block that holds some of them is compared."""
    found = bytearray(end - start)

    def keep(at, data):
        low, high = max(at, start), min(at + len(data), end)
        if low < high:
            found[low - start:high - start] = data[low - at:high - at]
    read_file(path, entry, keep, lambda first, last: first < end and last > start, from_disk)
    return bytes(found)


def _compare(fetch, name, kind, span, use):
    """Compares a block piece by piece, and uses each piece at once: in format 1 a block is a whole file."""
    (start, end, stated), digest = span, HASHES[kind]()
    for at in range(start, end, BLOCK_BYTES) if end else (0,):
        piece = fetch(at, min(at + BLOCK_BYTES, end))
        digest.update(piece)
        if at + len(piece) == end and digest.hexdigest() != stated:
            raise Damaged(f"{name} has {kind} {digest.hexdigest()[:12]}... in bytes {start:,} to {end:,}, "
                          f"manifest says {stated[:12]}...")
        if use:
            use(at, piece)


def _reader(fd, name, size):
    """fetch(start, end) for a disk: into one buffer."""
    scratch = memoryview(bytearray(min(BLOCK_BYTES, size)))

    def fetch(at, end):
        place = piece = scratch[:end - at]
        while len(place):
            n = os.preadv(fd, [place], at)
            if n == 0:
                raise Damaged(f"{name} ends after {at:,} bytes")
            place, at = place[n:], at + n
        return piece
    return fetch


def _mapped(fd, name, size):
    """fetch(start, end) for memory: the bytes in place, without a copy."""
    view = memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY) if size else b"")
    return lambda at, end: view[at:end]
