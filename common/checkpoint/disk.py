"""What lies under a name: folders that are synced, small files, JSON that is checked. No torch, no pickle."""
import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import stat
import time
from pathlib import Path

SMALL_BYTES = 1 << 16  # of our largest JSON beside the manifest: a longer one is not ours, and is not parsed
# errors that prove that no file of ours has this name
WRONG = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
RETRY_SECONDS = (0.1, 0.4, 1.0, 2.5)  # between the tries of a read that fails
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # follows no link, waits for no pipe


class Damaged(Exception):
    """This file is proven wrong; the text says why, with both values."""


@contextlib.contextmanager
def proven(path):
    """Turns the OSErrors in WRONG into Damaged; any other (no memory, no server) proves nothing and stays."""
    try:
        yield
    except OSError as error:
        if error.errno in WRONG:
            raise Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from error
        error.filename = error.filename or str(path)
        raise


def patient(read):
    """Repeats a read that ends with an OSError: the error may be gone in seconds."""
    @functools.wraps(read)
    def again(*args, **kwargs):
        for pause in RETRY_SECONDS:
            try:
                return read(*args, **kwargs)
            except OSError:
                time.sleep(pause)
        return read(*args, **kwargs)
    return again


def sync_folder(path):
    """Syncs the names in a folder: only then is a rename on the disk."""
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
            fd = os.open(path, READ)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)


@contextlib.contextmanager
def opened(path):
    """Opens a regular file for reading."""
    with proven(path):
        fd = os.open(path, READ)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Damaged(f"{Path(path).name} is not a regular file")
            yield fd
        finally:
            os.close(fd)


def read_small(path, limit=SMALL_BYTES):
    """All bytes of a small regular file; a larger one is refused, not read."""
    data = b""
    with opened(path) as fd:
        while chunk := os.read(fd, limit + 1 - len(data)):
            data += chunk
    if len(data) > limit:
        raise Damaged(f"{Path(path).name} is larger than {limit:,} bytes")
    return data


def parse_json(data, name):
    """The JSON object in `data`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{name} is not JSON ({str(error)[:60]})") from error
    if not isinstance(value, dict):
        raise Damaged(f"{name} is no JSON object")
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
    try:
        whole = sealed(value) == data
    except ValueError:  # NaN or infinity, which `sealed` never writes
        whole = False
    if not whole:
        raise Damaged(f"{name} does not match its own seal")
    return value


def delete(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            os.unlink(path)
