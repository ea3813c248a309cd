"""A small process that ends its rank if C code holds Python's lock for ever: no thread of the rank can.

It sees two things that a timer inside the rank does not: that the rank is stopped (SIGSTOP, a debugger), and
that it stood still itself (Slurm's suspend, a frozen container). Such seconds do not count.
"""
import contextlib
import faulthandler
import os
import select
import signal
import subprocess
import sys
import time

LATE_SECONDS = 1.5       # a wait of one second that takes longer: this process did not run
STACKS_SECONDS = 2.0     # the rank may take to print its stacks


class Guard:
    """Call `beat(seconds)` often: without another beat for so long, the rank prints its stacks and ends."""

    def __init__(self):
        self.process = None

    def beat(self, seconds):
        if self.process is None:
            with contextlib.suppress(ValueError, OSError, RuntimeError, AttributeError):  # there is no stderr
                faulthandler.enable()  # at SIGABRT it prints the stacks of all threads, without Python's lock
            with contextlib.suppress(OSError):  # no process can be started
                command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                                stderr=subprocess.DEVNULL, bufsize=0)
                os.set_blocking(self.process.stdin.fileno(), False)
        with contextlib.suppress(OSError, AttributeError):  # it was killed, or is stopped and reads nothing
            self.process.stdin.write(f"{seconds:.1f}\n".encode())

    def stop(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()


def watch(pid, beats=0):
    """Reads beats until the rank ends, or has been silent for too long and is ended."""
    left = float("inf")
    while os.getppid() == pid and left > 0:
        began = time.monotonic()
        if select.select([beats], [], [], 1.0)[0]:
            if not (text := os.read(beats, 1 << 16)):
                return
            left = float(text.split()[-1])
        elif time.monotonic() - began < LATE_SECONDS and not _stopped(pid):
            left -= 1.0
    for number in (signal.SIGABRT, signal.SIGKILL):
        if os.getppid() == pid:
            os.kill(pid, number)
            time.sleep(STACKS_SECONDS)


def _stopped(pid):
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rsplit(b")", 1)[1].split()[0] in (b"T", b"t")


if __name__ == "__main__":
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):  # for the rank, not for this process
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    watch(int(sys.argv[1]))
