"""How a mistake reaches a person: once per machine, in at most three lines, with its exit code. No torch.

    with blamed("model mine.py:net", "mend it, then start again"):
        net = build(...)                     # any error: a UserError that says what, file and line, way out

Training is a function of (seed, step): what fails in a user's file, in data, net, optimizer or a forward
fails again after a restart. So it ends the job with exit code 2, at any step. What `may_pass` (a disk, a
network, memory, a peer) is raised as it is: a crash, exit code 1, and a restart.
"""

import difflib
import errno
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO

from common.place import here


class UserError(Exception):
    """A mistake a person can mend: fact, values, way out, in three lines at most; `code` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


PASSING_TYPES = (MemoryError, ConnectionError, TimeoutError)
PASSING = re.compile(  # `TYPE: MESSAGE` of a RuntimeError; the types are torch's
    r"^(OutOfMemory|Accelerator|Dist\w*)Error:|gloo|nccl|CUDA error|CUDA driver|CUDNN_|CUBLAS_|"
    r"can't allocate memory|can't start new thread|DataLoader worker \(pid",
    re.IGNORECASE,
)
LASTING = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
    None,
}  # of an OSError; None: a library's own, as of a damaged picture
OURS = Path(__file__).parents[1]
FOREIGN = (  # files and folders that are no user's
    Path(os.__file__).parent,
    *(Path(place) for place in sys.path if place.endswith("-packages")),  # site-packages, dist-packages
    *(OURS / name for name in ("common", "launch", "train_ddp.py", "train_dp.py", "train_mp.py")),
)
CONTROL = {n: f"\\x{n:02x}" for n in (*range(9), *range(11, 32), *range(127, 160))}  # not for a terminal
FIRST_RANK_SECONDS = 0.5  # before it leaves: rank 0's store ends with it
OTHER_RANKS_SECONDS = 3.0  # before they print: the agent ends them first if all have the error
MEND = "mend it, then start again; --debug shows the whole stack"
WORDS_OF_TORCH = {  # the way out of what it refuses
    "does not have a deterministic implementation": (
        "replace the layer that needs it (--debug shows where), or leave out --virtual-ranks"
    ),
    "Expected more than 1 value per channel when training": (
        "a process had one sample: resume with fewer processes, or begin anew with GroupNorm"
    ),
}


def may_pass(error: BaseException | None) -> bool:
    """Return whether another try may succeed: a disk, a network, memory or a peer has failed."""
    while error is not None:
        if isinstance(error, PASSING_TYPES):
            return True
        if isinstance(error, OSError) and error.errno not in LASTING:
            return True
        if isinstance(error, RuntimeError) and PASSING.search(f"{type(error).__name__}: {error}"):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def blamed(what: str = "", way_out: str = MEND) -> Iterator[None]:
    """Turn any error of the block into a UserError if it is one of `what` or of a user's file.

    One that `may_pass` is raised as it is.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        for words, other_way in WORDS_OF_TORCH.items():
            if words in str(error):
                what = what or "a layer"
                way_out = other_way
        place = users_line(error)
        if may_pass(error) or not (what or place):
            raise
        fact = f"{type(error).__name__}: {one_line(error)}"
        if what:
            fact = f"{what}: {fact}"
        raise UserError("\n".join(line for line in (fact, place, way_out) if line)) from error


def users_line(error: BaseException) -> str:
    """Return `FILE, line N: SOURCE` of the newest line in a file that is neither ours nor a library's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {(error.text or '').strip()[:80]}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not is_foreign(path):
            return f"{path}, line {frame.lineno}: {(frame.line or '')[:80]}"
    return ""


def is_foreign(path: Path) -> bool:
    """Return whether a file is ours or a library's, and no user's."""
    return any(path.is_relative_to(place) for place in FOREIGN)


class Outlet:
    """A text stream that falls silent when its reader leaves (`| head`) or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self.stream: TextIO | None = stream  # None once it is silent
        self.terminal = not stream.closed and stream.isatty() and os.environ.get("TERM") != "dumb"

    def write(self, text: str = "") -> None:
        """Write this and what is left in the buffer."""
        if self.stream is None:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):
            # Text left in the buffer would raise again in every later print, and at exit (exit code 120).
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            self.stream = None


def say(text: str, stream: TextIO | None = None) -> None:
    """Print, also to streams that may be closed; on a terminal replace the bar, also that of another rank."""
    outlet = Outlet(stream or sys.stdout)
    outlet.write(("\r\x1b[K" if outlet.terminal else "") + text.translate(CONTROL) + "\n")


def warn(text: str, of_this_rank: bool = False) -> None:
    """Print a warning: once per machine, as all ranks have it, unless it is `of_this_rank` alone."""
    if of_this_rank or here().speaks:
        say("warning: " + text.replace("\n", "\n         "), sys.stderr)


def ready_streams() -> None:
    """Open closed ones: their numbers would go to files and sockets, and C code would print into these.

    A character that stdout does not have is no error.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w")
    sys.stderr = sys.stderr or open(2, "w")
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has not
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def guarded(what: str = "", debug: bool = False) -> Iterator[None]:
    """Surround a whole training or command: print its errors in three lines, and exit with their code.

    Errors of `what`, and of a user's files, end the process so; others are crashes. `debug` shows all stacks.
    """
    try:
        with blamed(what, ""):
            yield
        Outlet(sys.stdout).write()  # at exit, what cannot be written would be an error once more
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        if debug:
            raise
        end(error)


def end(error: UserError, shared: bool = False) -> NoReturn:
    """Print an error in at most three lines, and end this process with its code.

    With `shared` all ranks have it for sure, and only one of a machine prints it. Else a rank that is not the
    first gives the agent some seconds to end it, if all have the error.
    """
    first = here().speaks
    if not first and not shared:
        time.sleep(OTHER_RANKS_SECONDS)
    if first or not shared:
        say("error: " + "\n       ".join(str(error).splitlines()[:3]), sys.stderr)
        note_reason(str(error))
        if error.code != 1 and not here().launched:  # 1: a restart may cure it; our own agent reads the code
            dismiss_agent()
    Outlet(sys.stdout).write()
    if shared or here().size == 1:
        sys.exit(error.code)
    if first:  # other ranks may still have to read what they waited for in rank 0's store
        time.sleep(FIRST_RANK_SECONDS)
    os._exit(error.code)  # no destructors: they may wait for a dead peer


def note_reason(text: str) -> None:
    """Write it into the file that the launcher has made for it, as launch/slurm.sbatch does on its node."""
    path = os.environ.get("TERMINATION_LOG", "")
    if os.path.exists(path):
        with suppress(OSError):
            Path(path).write_text(f"{text}\n")


def dismiss_agent() -> None:
    """Stop torchrun where restarts cannot help: --max_restarts=100 would print the same error 100 times."""
    place = here()
    try:
        command = Path(f"/proc/{place.agent_pid}/cmdline").read_bytes()
    except OSError:
        return
    is_agent = b"torchrun" in command or b"torch.distributed" in command
    if place.agent and place.restarts_left > 0 and is_agent:
        with suppress(ValueError):  # in the thread of a rescue: then the signal is caught already
            # the agent sends it back: our exit code comes first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(place.agent_pid, signal.SIGTERM)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the nearest of the known names as the end of a sentence; nothing if none is near."""
    near = difflib.get_close_matches(name, known, 1) or [entry for entry in known if name in entry]
    return f"; did you mean {near[0]}?" if near else ""


def one_line(error: BaseException) -> str:
    """Return the first line of an exception's message, cut after 200 characters; its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
