"""A training that is struck at one of its calls that change a file of RUN.

    CALLS_RUN=RUN CALLS_STRIKE="before 17" python tests/chaos/calls.py --run-dir RUN ...

A strike is `before N`, `after N` or `half N`: SIGKILL before, after or in the middle of the N-th call; or an
errno: `ENOSPC N` fails that call, `ENOSPC! N` all from there on. At the end CALLS_COUNT gets the number of
calls. The lock's beats are not counted: they depend on the clock.
"""

import errno
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

RUN = os.environ["CALLS_RUN"]
KIND, NUMBER = os.environ.get("CALLS_STRIKE", "none 0").split()
LOCK = threading.Lock()
WRITES = os.O_CREAT | os.O_TRUNC
calls = 0


def is_counted(name, target, args):
    if name == "open" and not (args and args[0] & WRITES):
        return False
    try:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.path.abspath(target)
    except OSError:
        return False
    return path.startswith(RUN) and not (path.endswith("lock") and name in ("pwrite", "fdatasync"))


def strike_at(name):
    real = getattr(os, name)

    def call(target, *args, **more):
        global calls
        if "dir_fd" not in more and not is_counted(name, target, args):
            return real(target, *args, **more)
        with LOCK:
            calls += 1
            now = calls
        if now == int(NUMBER) or KIND.endswith("!") and now > int(NUMBER) > 0:
            if KIND == "half" and "write" in name:
                real(target, args[0][: len(args[0]) // 2], *args[1:])
            if KIND == "after":
                real(target, *args, **more)
            if KIND in ("before", "after", "half"):
                os.kill(os.getpid(), signal.SIGKILL)
            number = getattr(errno, KIND.rstrip("!"))
            raise OSError(number, os.strerror(number), str(target))
        return real(target, *args, **more)

    setattr(os, name, call)


if __name__ == "__main__":
    for name in (
        *("open", "write", "pwrite", "fsync", "fdatasync", "ftruncate"),
        *("rename", "link", "mkdir", "unlink", "rmdir"),
    ):
        strike_at(name)
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    sys.argv[0] = str(root / "train_ddp.py")
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        if "CALLS_COUNT" in os.environ:
            Path(os.environ["CALLS_COUNT"]).write_text(str(calls))
