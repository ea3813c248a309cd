"""How a mistake reaches a person: once per machine, in at most three lines, with its exit code. No torch
here.
"""
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


class UserError(Exception):
    """What a person can mend: fact, values, way out, in at most three lines; the process leaves with `code`.
    """

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


class Outlet:
    """A text stream whose reader may leave (`| head`) or whose disk may fill up: then it falls silent."""

    def __init__(self, stream):
        self.stream = stream  # None where the process began with a closed stdout

    def write(self, text):
        self._try(lambda: self.stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding)))

    def flush(self):
        self._try(lambda: self.stream.flush())

    @property
    def encoding(self):
        return getattr(self.stream, "encoding", None) or "utf-8"

    def isatty(self):
        return self.stream is not None and not self.stream.closed and self.stream.isatty()

    def fileno(self):
        return self.stream.fileno()

    def _try(self, act):
        try:
            if self.stream is not None:
                act()
        except (OSError, ValueError):
            # What is still in its buffer would raise again in every later print, and at exit: exit code 120.
            try:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
            except (OSError, ValueError):
                pass
            self.stream = None


def say(text, stream=None):
    """print, for streams that may be gone; on a terminal in the place of the bar, whichever rank has drawn
    it.
    """
    outlet = Outlet(stream or sys.stdout)
    bar = outlet.isatty() and os.environ.get("TERM") != "dumb"
    outlet.write(("\r\x1b[K" if bar else "") + text + "\n")
    outlet.flush()


def speaks_for_node(environ=os.environ):
    """Whether this process is its machine's voice: the first there, one started by hand, or one whose place
    makes no sense.
    """
    try:
        rank, size = int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))
        local_rank, local_size = int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", size))
    except ValueError:
        return True
    return local_rank == 0 or not (0 <= rank < size and 0 <= local_rank < local_size)


def fail(message, code=2, everyone=False):
    """Leave with `code` after at most three lines on stderr, said once per machine; `message` may be a
    UserError.
    """
    if everyone or speaks_for_node():
        say("error: " + "\n       ".join(str(message).splitlines()[:3]), sys.stderr)
        if code != 1:  # 1: a restart may cure it
            dismiss_agent()
    sys.exit(code)


def dismiss_agent(environ=os.environ):
    """Tell torchrun that restarts cannot help: it would say the same error again, a hundred times with
    --max_restarts=100.
    """
    try:
        left = int(environ["TORCHELASTIC_MAX_RESTARTS"]) - int(environ["TORCHELASTIC_RESTART_COUNT"])
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            command = file.read()
        agent = any(word in command for word in (b"torchrun", b"torch.distributed"))
    except (KeyError, ValueError, OSError):
        return
    if left > 0 and agent:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its answer must not overtake our exit code
        os.kill(os.getppid(), signal.SIGTERM)


def did_you_mean(text, names):
    close = difflib.get_close_matches(text, names, 1)
    return f"; did you mean {close[0]}?" if close else ""


# ---- shared with the datasets: names, users' own files, randomness that is a function of a key ----
def unknown_name(what, name, known):
    """The error for a name that nothing answers to, with the nearest ones that exist."""
    near = difflib.get_close_matches(name, known, n=3) or [entry for entry in known if name.lower() in entry][:3]
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(list(known)[:12])}"
    return UserError(f"unknown {what} {name!r}\n{hint}\nyour own: --{what} path/to/file.py:function")


def one_line(error):
    """The first line of what an exception says, at most 200 characters of it."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


def out_of_memory(error):
    """What could not be had, as text, if that is what an exception or one of its causes tells of; else an
    empty one.
    """
    while error is not None:
        known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" \
            or getattr(error, "errno", 0) == errno.ENOMEM
        if known or any(words in str(error) for words in ("can't allocate memory", "can't start new thread")):
            amount = re.search(r"tried to allocate ([\d.,]+ \w+)", str(error), re.IGNORECASE)
            return f"{amount[1]} could not be had" if amount else one_line(error)
        error = error.__cause__ or error.__context__
    return ""


# seconds a rank that is not its machine's voice waits: was the error everybody's, the agent ends it meanwhile
OTHERS = 1.0
LESS = {          # where memory runs out
    "ddp": "use a smaller --micro-batch-size, or train_mp.py, which splits the net",
    "dp": "use more --devices, or train_mp.py, which splits the net",
    "mp": "use more stages, a smaller --micro-batch-size, --recompute or --shard"}


def report_errors(main):
    """What a person can mend is said once, without a traceback, and the process leaves with the error's code.
    """
    @functools.wraps(main)
    def run(opts):
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # until there is something to save, Ctrl-C ends it at once
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            return main(opts)
        except UserError as error:
            if opts.debug:
                raise
            if not speaks_for_node():
                time.sleep(OTHERS)
            try:
                fail(error, error.code, everyone=True)
            except SystemExit:
                os._exit(error.code)  # no destructors: they may wait for a dead peer
        except Exception as error:
            if opts.debug or not (missing := out_of_memory(error)):
                _note_whole_or_not_at_all()
                raise
            # Exit code 1: who took the memory may be gone soon, so an agent's restarts are worth a try.
            say(f"error: rank {os.environ.get('RANK', 0)} is out of memory: {missing}\n       {LESS[opts.script]}", sys.stderr)
            os._exit(1)
    return run


def _note_whole_or_not_at_all():
    """`@record` is about to write a file for torchrun, which itself ends of half a file: so aside first, and
    renamed at exit.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        os.environ["TORCHELASTIC_ERROR_FILE"] = aside = f"{path}.new"

        @atexit.register
        def publish():
            with contextlib.suppress(OSError, ValueError), open(aside) as file:
                json.load(file)
                os.rename(aside, path)
