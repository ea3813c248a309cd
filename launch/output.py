"""What workers print where no terminal shows it: a time before each line, and a file for each rank.

RUN/logs/rank-N.log has at most LOG_BYTES; then it becomes rank-N.log.1, and the one before is gone. A process
of its own does it: a disk or a reader that stops must stop neither the launcher nor, for long, the workers.
"""
import contextlib
import fcntl
import os
import selectors
import signal
import socket
import sys
import time

LOG_BYTES = 5_000_000
LINE_BYTES = 1 << 16     # a longer line is cut
PIPE_BYTES = 1 << 20     # workers print on while nobody takes what they print
LAST_SECONDS = 5.0       # for the last lines, if what the workers have started holds their pipes open


class Output:
    """The launcher's end; `run_dir` is None for a script whose run is not known."""

    def __init__(self, run_dir):
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.line.close()
                os.setsid()  # Ctrl-C is not for this process: it has to show what it leads to
                signal.pthread_sigmask(signal.SIG_BLOCK, range(1, signal.SIGRTMIN))
                Printer(run_dir).serve(theirs)
            finally:
                os._exit(0)
        theirs.close()

    def begin(self, rank):
        """The ends of pipes that a worker of this rank writes to: as standard output, as standard error."""
        one, other = (os.fstat(stream)[:2] for stream in (1, 2))
        ends = [self._pipe(rank, 1)]
        return ends * 2 if one == other else [*ends, self._pipe(rank, 2)]  # in one file, lines in order

    def _pipe(self, rank, stream):
        ours, theirs = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # more than this user may have; no Linux
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with contextlib.suppress(OSError):  # nobody prints any more
            socket.send_fds(self.line, [f"{stream} {rank}".encode()], [ours])
        os.close(ours)
        return theirs

    def say(self, text, stream=None):
        """The launcher's own words."""
        with contextlib.suppress(OSError):  # nobody takes them
            self.line.send(f"{1 if stream in (None, sys.stdout) else 2} {text}".encode()[:LINE_BYTES],
                           socket.MSG_DONTWAIT)

    def finish(self):
        """Waits for the last lines, but not for a disk or a reader that has stopped."""
        self.line.close()
        end = time.monotonic() + 2 * LAST_SECONDS
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < end and not os.waitpid(self.pid, os.WNOHANG)[0]:
                time.sleep(0.005)


class Printer:
    """Reads the workers' pipes in a process of its own."""

    def __init__(self, run_dir):
        self.run_dir, self.sources, self.early = run_dir, {}, {}

    def serve(self, line):
        """Until the launcher and its workers have ended: `line` brings pipes, and the launcher's words."""
        ears, end = selectors.DefaultSelector(), None
        ears.register(line, selectors.EVENT_READ)
        while end is None or self.sources and time.monotonic() < end:
            for key, _ in ears.select(LAST_SECONDS):
                if key.fileobj is not line:
                    if self.read(key.fileobj) is None:
                        ears.unregister(key.fileobj)
                    continue
                data, pipes, *_ = socket.recv_fds(line, 2 * LINE_BYTES, 1)
                stream, _, words = data.decode().partition(" ")
                if pipes:
                    self.add(pipes[0], int(words), int(stream))
                    ears.register(pipes[0], selectors.EVENT_READ)
                elif data:
                    self._write(None, int(stream), words.encode().split(b"\n"))
                else:
                    ears.unregister(line)
                    end = time.monotonic() + LAST_SECONDS

    def add(self, pipe, rank, stream):
        os.set_blocking(pipe, False)
        self.sources[pipe] = [rank, stream, b""]

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
