"""What a test could leave behind: processes, listening sockets, files in the temporary folder or in the
project's own.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKEN = f"tests-{uuid.uuid4().hex}"  # in the environment of all that a test starts
KEPT = ("tests/tools/warm_torchrun.py", "resource_tracker")  # processes that live as long as pytest
# torch's cache; what torchrun itself leaves; what multiprocessing cannot remove when its process is killed.
NOT_OURS = ("torchinductor_", "torchelastic_", "pymp-", "__pycache__", ".pytest_cache", ".ruff_cache")
PATIENCE = 30.0  # seconds


def move_in():
    """A temporary folder of one's own, where a new file has one explanation; returns it."""
    # pytest's tmp_path stays where it was
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TESTS_TOKEN"] = TOKEN
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")
    return Path(os.environ["TMPDIR"])


def belongings():
    """{what is there now: the number of the process that it is, or None}."""
    started = {pid: command(pid) for pid in alive(TOKEN) if pid != os.getpid()}
    found = {
        f"process {pid}: {words}": pid
        for pid, words in started.items()
        if words and not any(word in words for word in KEPT)
    }
    found |= dict.fromkeys(f"listening socket {inode}" for inode in listeners())
    for folder in (ROOT, Path(tempfile.gettempdir())):
        found |= dict.fromkeys(
            f"file {folder / name}" for name in os.listdir(folder) if not name.startswith(NOT_OURS)
        )
    return found


def left_since(before):
    """What is there now, was not before, and does not go away by itself; of that, processes are ended."""
    end = time.monotonic() + PATIENCE
    while (stayed := belongings().items() - before.items()) and time.monotonic() < end:
        gc.collect()  # a socket may hang on a cycle of dead objects
        time.sleep(0.02)
    for _, pid in stayed:
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGKILL)
    return sorted(what for what, _ in stayed)


def end_with(parent):
    """This process ends when its parent does, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def carries(pid, token):
    """Whether this process has it in its environment, which is empty for the dead."""
    try:
        return token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def alive(token):
    """Every living process that carries it."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else ()
    return [int(name) for name in names if name.isdecimal() and carries(name, token)]


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def listeners(pid="self"):
    """{inode: local address, as the kernel writes it} of the TCP sockets on which a process listens."""
    held = set()
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd") if os.path.isdir(f"/proc/{pid}/fd") else ():
        with contextlib.suppress(OSError):  # closed meanwhile, as the one of listdir itself
            held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    for table in ("tcp", "tcp6") if any(name.startswith("socket:") for name in held) else ():
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                found[fields[9]] = fields[1]
    return found
