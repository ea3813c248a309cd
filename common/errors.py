"""How a mistake reaches a person: once per machine, in at most three lines, with its exit code. No torch."""
import atexit
import contextlib
import difflib
import errno
import functools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn, TextIO

TERMINATION_LOG = os.environ.get("TERMINATION_LOG", "/dev/termination-log")  # written only if it is there


class UserError(Exception):
    """A mistake a person can mend: fact, values, way out, in three lines at most; `code` is the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def refuse(*rules: tuple[Any, str]) -> None:
    """Raises the message of the first of these (broken, message) that is broken."""
    for broken, message in rules:
        if broken:
            raise UserError(message)


class Outlet:
    """A text stream that falls silent when its reader leaves (`| head`) or its disk is full."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream  # None where the process began with a closed stdout

    def write(self, text: str) -> None:
        shown = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._try(lambda: self.stream.write(shown))

    def flush(self) -> None:
        self._try(lambda: self.stream.flush())

    @property
    def encoding(self) -> str:
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self.stream is not None and not self.stream.closed and self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def _try(self, act):
        try:
            if self.stream is not None:
                act()
        except (OSError, ValueError):
            # Text left in the buffer would raise again in every later print, and at exit (exit code 120).
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
            except (OSError, ValueError):
                pass
            self.stream = None


def say(text: str, stream: TextIO | None = None) -> None:
    """print, for streams that may be closed; on a terminal it replaces the bar, also that of another rank."""
    outlet = Outlet(stream or sys.stdout)
    bar = outlet.isatty() and os.environ.get("TERM") != "dumb"
    outlet.write(("\r\x1b[K" if bar else "") + text + "\n")
    outlet.flush()


def fill_closed_streams() -> None:
    """Else the number of a closed one (`>&-`) goes to the next file or socket, and C code prints into it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or open(1, "w"), sys.stderr or open(2, "w")


def run_command(act: Callable[[], int]) -> int:
    """The exit code of a command for people: what `act` returns, 2 for a printed mistake, 130 for Ctrl-C."""
    fill_closed_streams()
    getattr(sys.stdout, "reconfigure", dict)(errors="backslashreplace")  # a notebook's stream has none
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes what is temporary
    try:
        code = act()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except (UserError, OSError, ValueError, RecursionError, ImportError) as error:
        Outlet(sys.stdout).flush()  # at exit, what cannot be written would be an error once more
        if isinstance(error, BrokenPipeError):  # `| head` has seen enough
            return 141
        say("error: " + "\n       ".join(str(error).splitlines()[:3]), sys.stderr)
        return getattr(error, "code", 2)
    finally:
        signal.signal(signal.SIGTERM, before)


def speaks_for_node() -> bool:
    """Whether this process prints errors for its machine.

    That is local rank 0, a process without ranks, or one whose rank variables contradict each other.
    """
    environ = os.environ
    try:
        rank, size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        local_rank, local_size = int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", size))
    except ValueError:
        return True
    return local_rank == 0 or not (0 <= rank < size and 0 <= local_rank < local_size)


def note_reason(text: str) -> None:
    """Writes why this process ends: Kubernetes shows it in the pod's status, Slurm in the job's comment."""
    with contextlib.suppress(OSError), open(os.open(TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC), "w") as file:
        file.write(text[:4000] + "\n")


def fail(message: str | UserError, everyone: bool = False) -> NoReturn:
    """Prints at most three lines on stderr, once per machine (or from everyone); exits with the code."""
    code = getattr(message, "code", 2)
    if everyone or speaks_for_node():
        say("error: " + "\n       ".join(str(message).splitlines()[:3]), sys.stderr)
        note_reason(str(message))
        if code != 1:  # 1: a restart may cure it
            dismiss_agent()
    sys.exit(code)


def dismiss_agent() -> None:
    """Stops torchrun where restarts cannot help: --max_restarts=100 would print the same error 100 times."""
    try:
        most, made = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            command = file.read()
        agent = any(word in command for word in (b"torchrun", b"torch.distributed"))
    except (KeyError, ValueError, OSError):
        return
    if made < most and agent:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent sends it back: our exit code comes first
        os.kill(os.getppid(), signal.SIGTERM)


def did_you_mean(name: str, known: Collection[str], most: int = 1) -> str:
    """The nearest of the known names as a question that ends a sentence; empty if none is near."""
    near = difflib.get_close_matches(name, known, most) or [entry for entry in known if name.lower() in entry]
    return f"; did you mean {' or '.join(near[:most])}?" if near else ""


def one_line(error: BaseException) -> str:
    """The first line of an exception's message, cut after 200 characters; its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


def out_of_memory(error: BaseException | None) -> str:
    """How much memory was missing, in words, if an exception or one of its causes says so; else empty."""
    while error is not None:
        known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" \
            or getattr(error, "errno", 0) == errno.ENOMEM
        if known or any(words in str(error) for words in ("can't allocate memory", "can't start new thread")):
            amount = re.search(r"tried to allocate ([\d.,]+ \w+)", str(error), re.IGNORECASE)
            return f"{amount[1]} could not be had" if amount else one_line(error)
        error = error.__cause__ or error.__context__
    return ""


@contextlib.contextmanager
def only_deterministic() -> Iterator[None]:
    """UserError with the name of an operation that torch refuses: on a GPU it adds in no fixed order."""
    try:
        yield
    except RuntimeError as error:
        if not (found := re.search(r"(\w+) does not have a deterministic implementation", str(error))):
            raise
        raise UserError(f"--virtual-ranks: torch's {found[1]} may have other bits each time\n"
                        "replace the layer that uses it (--debug shows where), as AdaptiveAvgPool2d\n"
                        "by AvgPool2d, bilinear by nearest; or leave out --virtual-ranks") from error


RANK_0_SECONDS = 0.5       # before it leaves: its store ends with it
OTHER_RANKS_SECONDS = 1.0  # before they print: the agent ends them first if all have the error
USE_LESS_MEMORY = {        # by script
    "ddp": "use a smaller --micro-batch-size, or train_mp.py, which splits the net",
    "dp": "use more --devices, or train_mp.py, which splits the net",
    "mp": "use more stages, a smaller --micro-batch-size, --recompute or --shard"}


def end(error: UserError, notebook: bool = False) -> NoReturn:
    """Prints an error that all ranks may have, or this one alone, and ends this rank.

    With `notebook`, a process that is no rank only raises SystemExit: a notebook lives on.
    """
    if notebook and "RANK" not in os.environ:
        fail(error)
    if not speaks_for_node():
        time.sleep(OTHER_RANKS_SECONDS)
    try:
        fail(error, everyone=True)
    except SystemExit:
        # Other ranks may still have to read what they waited for in rank 0's store.
        time.sleep(RANK_0_SECONDS if os.environ.get("RANK") == "0" else 0)
        Outlet(sys.stdout).flush()
        os._exit(error.code)  # no destructors: they may wait for a dead peer


def report_errors(main: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Turns a UserError of `main` into its lines and its exit code, without a traceback."""
    @functools.wraps(main)
    def run(opts):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once: nothing to save yet
        try:
            return main(opts)
        except UserError as error:
            if opts.debug:
                raise
            end(error)
        except Exception as error:
            if opts.debug or not (missing := out_of_memory(error)):
                _write_error_file_at_once()
                raise
            # Exit code 1: another process may have taken the memory for a while, so a restart is worth a try.
            rank = os.environ.get("RANK", 0)
            advice = "raise the limit of threads (ulimit -u, pids.max)" if "thread" in missing else \
                USE_LESS_MEMORY[opts.script]
            say(f"error: rank {rank} is out of memory: {missing}\n       {advice}", sys.stderr)
            os._exit(1)
    return run


def _write_error_file_at_once():
    """torchrun crashes on a half-written error file: `@record` writes it aside, and it is renamed at exit."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        os.environ["TORCHELASTIC_ERROR_FILE"] = aside = f"{path}.new"

        @atexit.register
        def publish():
            with contextlib.suppress(OSError, ValueError), open(aside) as file:
                json.load(file)
                os.rename(aside, path)
