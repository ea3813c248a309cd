"""What workers print where no terminal shows it: a time before each line, and a file for each rank.

RUN/logs/rank-N.log has at most LOG_BYTES; then it becomes rank-N.log.1, and the one before is gone. A process
of its own does it, with a thread for the files: a disk or a reader that stops must stop neither the launcher
nor, for long, the workers, and a disk that stops hides no line. If the launcher is killed, the process shows
what the workers still print while they save.
"""
import contextlib
import fcntl
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time

from patience import wait_for

LOG_BYTES = 5_000_000
LINE_BYTES = 1 << 16     # a longer line is cut
PIPE_BYTES = 1 << 20     # so much a worker can print while nothing is read
LAST_SECONDS = 5.0       # for the last lines, if what the workers have started holds their pipes open
WAITING = 1000           # pieces of text for a disk that has stopped; what comes then is only shown
FINISH = b"0"            # the launcher's last word: all workers have ended


class Output:
    """The launcher's end; `run_dir` is None for a script whose run is not known."""

    def __init__(self, run_dir):
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.line.close()  # or this process would not hear of the launcher's end
                os.setsid()  # Ctrl-C is not for this process: it has to show what it leads to
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                Printer(run_dir).serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self.line.setblocking(False)

    def begin(self, rank):
        """The ends of pipes that a worker of this rank writes to: as standard output, as standard error."""
        one, other = (os.fstat(stream)[:2] for stream in (1, 2))
        ends = [self._pipe(rank, 1)]
        return ends * 2 if one == other else [*ends, self._pipe(rank, 2)]  # in one file, lines in order

    def _pipe(self, rank, stream):
        ours, theirs = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # more than this user may have; no Linux
            fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with contextlib.suppress(OSError):  # the printing process has ended, or does not read
            socket.send_fds(self.line, [b"%d %d" % (stream, rank)], [ours])
        os.close(ours)
        return theirs

    def say(self, text, stream=None):
        """The launcher's own words."""
        self._send(b"%d %s" % (1 if stream in (None, sys.stdout) else 2, text.encode()))

    def finish(self):
        """Waits for the last lines, but not for a disk or a reader that has stopped."""
        self._send(FINISH)
        self.line.close()
        wait_for([self.pid], 2 * LAST_SECONDS)

    def _send(self, words):
        with contextlib.suppress(OSError):  # the printing process has ended, or does not read
            self.line.send(words[:LINE_BYTES])


class Printer:
    """Reads the workers' pipes in a process of its own."""

    def __init__(self, run_dir):
        self.run_dir, self.sources, self.unkept = run_dir, {}, queue.Queue(WAITING)
        self.keeper = threading.Thread(target=self.keep, daemon=True)
        self.keeper.start()

    def serve(self, line):
        """Until the workers have ended, or have left their pipes to others; `line` brings the pipes."""
        ears, open_, end = selectors.DefaultSelector(), True, float("inf")
        ears.register(line, selectors.EVENT_READ)
        while open_ or self.sources and time.monotonic() < end:
            ready = [key.fileobj for key, _ in ears.select(LAST_SECONDS)]
            for source in sorted(ready, key=lambda source: source is line):  # lines before ends
                if source is not line:
                    if self.read(source) is None:
                        ears.unregister(source)
                    continue
                data, pipes, *_ = socket.recv_fds(line, LINE_BYTES, 1)
                stream, _, words = data.partition(b" ")
                if pipes:
                    self.add(pipes[0], int(words), int(stream))
                    ears.register(pipes[0], selectors.EVENT_READ)
                elif data == FINISH:
                    end = time.monotonic() + LAST_SECONDS
                elif data:
                    self._write(None, int(stream), words.split(b"\n"))
                else:
                    ears.unregister(line)
                    open_ = False
        self.finish()

    def finish(self):
        with contextlib.suppress(queue.Full):
            self.unkept.put(None, timeout=LAST_SECONDS)
            self.keeper.join(LAST_SECONDS)

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
        with contextlib.suppress(OSError):  # the reader has gone
            left = memoryview(text)
            while left:
                left = left[os.write(stream, left):]
        if rank is not None and self.run_dir:
            with contextlib.suppress(queue.Full):
                self.unkept.put_nowait((rank, text))

    def keep(self):
        """In a thread of its own: writes what is printed into the files, until None comes."""
        early = {}
        while item := self.unkept.get():
            rank, text = item
            early[rank] = (early.get(rank, b"") + text)[-LOG_BYTES:]
            if (self.run_dir / "options.json").exists():  # else there is no run yet
                for one in list(early):
                    self._append(one, early.pop(one))

    def _append(self, rank, text):
        with contextlib.suppress(OSError):  # a log stops no training
            path = self.run_dir / "logs" / f"rank-{rank}.log"
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if path.exists() and path.stat().st_size + len(text) > LOG_BYTES:
                path.replace(f"{path}.1")
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as file:
                file.write(text)
