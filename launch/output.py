"""What workers print where no terminal shows it: a time before each line, and a file for each rank.

RUN/logs/rank-N.log has at most LOG_BYTES; then it becomes rank-N.log.1, and the one before is gone.
"""
import contextlib
import fcntl
import os
import sys
import time

LOG_BYTES = 5_000_000
LINE_BYTES = 1 << 16     # a longer line is cut
PIPE_BYTES = 1 << 20     # workers print on while the launcher is stopped


class Output:
    """Reads the workers' pipes; `run_dir` is None for a script whose run is not known."""

    def __init__(self, run_dir):
        self.run_dir, self.sources, self.early = run_dir, {}, {}

    def begin(self, rank):
        """The ends of pipes that a worker of this rank writes to: as standard output, as standard error."""
        one, other = (os.fstat(stream)[:2] for stream in (1, 2))
        ends = [self._pipe(rank, 1)]
        return ends * 2 if one == other else [*ends, self._pipe(rank, 2)]  # in one file, lines in order

    def _pipe(self, rank, stream):
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        with contextlib.suppress(OSError, AttributeError):  # more than this user may have; no Linux
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.sources[ours] = [rank, stream, b""]
        return theirs

    def read(self, ours):
        """Hands on what has come through a pipe; returns None if its other end is closed."""
        try:
            data = os.read(ours, LINE_BYTES)
        except BlockingIOError:
            return False
        rank, stream, begun = self.sources[ours]
        *lines, begun = (begun + data).split(b"\n")
        if begun and (not data or len(begun) > LINE_BYTES):
            lines, begun = [*lines, begun], b""
        self.sources[ours][2] = begun
        self._write(rank, stream, lines)
        if not data:
            del self.sources[ours]
            os.close(ours)
            return None
        return True

    def say(self, text, stream=None):
        """The launcher's own words."""
        self._write(None, 1 if stream in (None, sys.stdout) else 2, text.encode().split(b"\n"))

    def finish(self):
        """Hands on what is still there; what the workers have started may hold the pipes open."""
        for ours in list(self.sources):
            while self.read(ours):
                pass

    def _write(self, rank, stream, lines):
        now = time.strftime("%Y-%m-%d %H:%M:%S ").encode()
        if not (text := b"".join(now + line + b"\n" for line in lines)):
            return
        with contextlib.suppress(OSError):  # nobody reads it any more
            left = memoryview(text)
            while left:
                left = left[os.write(stream, left):]
        if rank is not None and self.run_dir:
            self.early[rank] = (self.early.get(rank, b"") + text)[-LOG_BYTES:]
            if (self.run_dir / "options.json").exists():  # else there is no run yet
                for one in list(self.early):
                    self._keep(one, self.early.pop(one))

    def _keep(self, rank, text):
        with contextlib.suppress(OSError):  # a log stops no training
            path = self.run_dir / "logs" / f"rank-{rank}.log"
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if path.exists() and path.stat().st_size + len(text) > LOG_BYTES:
                path.replace(f"{path}.1")
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
                file.write(text)
