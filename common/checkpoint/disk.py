"""What lies under a name: folders that are synced, small files, JSON that is checked. No torch, no pickle."""

import errno
import functools
import json
import os
import shutil
import stat
import time
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path

from common.sealed import sealed, unsealed

MOST_BYTES = 1 << 28  # of a file that is read at once: a longer one is not ours, and is not read
# errors that prove that no file of ours has this name; any other (no memory, no server) proves nothing
WRONG = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
RETRY_SECONDS = (0.1, 0.4, 1.0, 2.5)  # between the tries of a read that fails
NEW_FILE = ".new-"  # begin of the name of a file that is not whole yet
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # follows no link, waits for no pipe
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC  # writes into no old file, no link


class Damaged(Exception):
    """This file is proven wrong; the text says why, with both values."""


def compare_hash(name, found, stated, place=""):
    """Raise Damaged unless a file, or a place in it, has the hash that its manifest states."""
    if found != stated:
        raise Damaged(f"{name} has sha256 {found[:12]}...{place}, manifest says {stated[:12]}...")


# ---- reading ------------------------------------------------------------------------------------------
def patient(read):
    """Repeat a read that ends with an OSError, which may be gone in seconds; those in WRONG are Damaged."""

    @functools.wraps(read)
    def again(*args, **kwargs):
        for pause in (*RETRY_SECONDS, None):
            try:
                return read(*args, **kwargs)
            except OSError as error:
                if error.errno in WRONG:
                    raise Damaged(f"{Path(error.filename or '').name}: {error.strerror}") from error
                if pause is None:
                    raise
            time.sleep(pause)

    return again


@contextmanager
def opened(path, is_right=stat.S_ISREG):
    """Open a regular file, or what has a mode that `is_right`; yield its descriptor."""
    fd = os.open(path, READ)
    try:
        if not is_right(os.fstat(fd).st_mode):
            raise Damaged(f"{Path(path).name} is no file or folder of ours")
        yield fd
    finally:
        os.close(fd)


def read_small(path):
    """Return all bytes of a small file; refuse a larger one unread."""
    data = b""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        refuse_long(path, size)
        while chunk := os.read(fd, size + 1 - len(data)):
            data += chunk
    return data


def refuse_long(path, size):
    """Raise Damaged if a file is too long to be read at once."""
    if size > MOST_BYTES:
        raise Damaged(f"{Path(path).name} is {size:,} bytes, more than {MOST_BYTES:,}")


@contextmanager
def as_written(name):
    """Turn an error of reading a file's content inside this block into Damaged."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{name} is not as this code writes it ({error!r:.60})") from error


def parse_json(data, name, parse=json.loads):
    """Return the JSON object in `data`; `parse` it by `unsealed` if `sealed` has made it."""
    with as_written(name):
        return {**parse(data)}


@patient
def read_sealed(path: Path) -> dict:
    """Return the object in a file that `sealed` has made."""
    return parse_json(read_small(path), path.name, unsealed)


# ---- writing ------------------------------------------------------------------------------------------
@contextmanager
def new_file(path):
    """Open a new file, yield its descriptor, and sync it at the end.

    After a failed sync the kernel counts the file's pages as clean: the caller must drop it.
    """
    fd = os.open(path, NEW, 0o600)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


def write_at(fd, data, at):
    """Write all of the data, though a call may take less."""
    data = memoryview(data)
    while len(data):
        count = os.pwrite(fd, data, at)
        data = data[count:]
        at += count


def put(path, data):
    """Write a small file, whole or not at all, by way of its own folder: checkpoints/ may be on another disk.

    Two ranks may do it at once.
    """
    aside = path.with_name(f"{NEW_FILE}{uuid.uuid4().hex}")
    with new_file(aside) as fd:
        write_at(fd, data, 0)
    os.rename(aside, path)


def put_sealed(path: Path, value: dict) -> None:
    """Write a file with this object and a seal; it is on the disk then. Damaged if no start would read it."""
    data = sealed(value)
    refuse_long(path, len(data))
    put(path, data)
    sync_folder(path.parent)


def sync_folder(path):
    """Sync the names in a folder: only then is a rename on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder):
    """Make a folder; it is only on the disk once the one above it is synced."""
    new = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    for path in reversed(new):
        path.mkdir(mode=0o700, exist_ok=True)
        sync_folder(path.parent)
    os.listdir(folder)  # raises if it is a file or cannot be read


def sync_lines(run_dir, life):
    """Sync what this machine's processes have logged of the run; a log that cannot be synced is no error."""
    notes = run_dir / "audit" / life
    # the folders, too, for the names in them
    for path in (*run_dir.glob("*.jsonl"), *notes.glob("*"), notes, notes.parent, run_dir):
        with suppress(OSError), opened(path, is_right=bool) as fd:
            os.fdatasync(fd)


def delete(path):
    try:
        os.unlink(path)  # first: rmtree would open a pipe, and wait for a writer
    except OSError:  # it is a folder, or gone
        shutil.rmtree(path, ignore_errors=True)
