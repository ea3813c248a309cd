"""How long a launcher waits for processes that must end: while they save, minutes; else half a minute."""
import contextlib
import os
import signal
import time

GRACE_SECONDS = 30.0  # from the first signal to SIGKILL for workers that do nothing, as with torchrun
LONGEST_SECONDS = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 600))


class Patience:
    """How long to wait for workers that must end: while they work (they save), at most LONGEST_SECONDS."""

    def __init__(self, pids, grace=GRACE_SECONDS, longest=LONGEST_SECONDS):
        self.grace, self.work = grace, work_of(pids)
        self.look, self.last = time.monotonic() + grace, time.monotonic() + longest

    def lasts(self, pids):
        """Whether to wait longer; resumes stopped workers, which nothing else would resume."""
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        now, before = time.monotonic(), self.work
        if now >= self.look:
            self.look, self.work = now + self.grace, work_of(pids)
            return now < self.last and self.work != before
        return now < self.last


def wait_for(pids, seconds):
    """Waits until these children have ended, at most so many seconds."""
    end = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < end:
                time.sleep(0.005)


def work_of(pids):
    """A number that changes while these processes compute, read, write, or wait for a disk."""
    done = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/io") as file:
                done += sum(int(line.split()[1]) for line in file)
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                done += int(fields[11]) + int(fields[12]) + (time.monotonic_ns() if fields[0] == "D" else 0)
        except OSError:
            pass  # it has ended, or this is no Linux
    return done
