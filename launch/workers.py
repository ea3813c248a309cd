"""The processes of a launcher: forked with everything imported, watched, ended; what their ends mean.

The launcher is the parent of all: of the agent, which meets the other machines and asks over `line` for a
life or for its end, and of the workers. Because it forks, it has one thread and never touches a GPU: a fork
lacks all other threads, and CUDA could not be used in it.
"""
import atexit
import contextlib
import ctypes
import json
import os
import runpy
import selectors
import signal
import sys
import threading
import time
import traceback

from patience import Patience, wait_for

# bad input, no whole checkpoint, saves fail, no progress, another job's run, a device computes wrong numbers
FINAL = (2, 3, 4, 5, 6, 7)
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOPPED = 143
MESSAGE_BYTES = 1 << 18
SILENCE_SECONDS = 20     # without workers: a message
LEAVE_SECONDS = 5.0      # for the agent to tell the others, once it has no workers and shall end
NOTE_SECONDS = 5.0       # for the last deaths to be noted


class Workers:
    """Those of the newest life that run, by pid, and the exit codes of those that have ended."""

    def __init__(self, agent, line, run=None, say=print, died=lambda rank, how: None, output=None):
        """`run(words)` is what a forked worker does; without it `words` are executed afresh."""
        self.agent, self.line, self.run, self.died, self.output = agent, line, run, died, output
        self.say = output.say if output else say
        self.running, self.codes, self.cause, self.patience, self.asked = {}, [], "", None, False
        self.notes = set()  # pids of the processes that note a death

    def serve(self):
        """Starts and ends workers as the agent asks, and ends it on a signal; returns the exit code."""
        self.wake = os.pipe()
        for end in self.wake:
            os.set_blocking(end, False)
        for number in (*STOP, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self.wake[1], warn_on_full_buffer=False)
        self.code, silent, self.until, self.ears = None, True, float("inf"), selectors.DefaultSelector()
        for source in (self.wake[0], self.line):
            self.ears.register(source, selectors.EVENT_READ)
        self.bury()  # what ended before
        while self.code is None or self.running:
            wait = 1 if self.patience or self.asked else SILENCE_SECONDS if silent else None
            ready = [key.fileobj for key, _ in self.ears.select(wait)]
            if silent and not ready and not self.asked:
                self.say(f"torchrun: nothing has met for {SILENCE_SECONDS} s: "
                         "the rendezvous does not answer, or machines are missing", sys.stderr)
            silent = False
            if self.line in ready:
                if words := self.hear():
                    self.obey(*json.loads(words))
                else:  # it has ended
                    self.ears.unregister(self.line)
            for number in os.read(self.wake[0], 256) if self.wake[0] in ready else b"":
                self.bury() if number == signal.SIGCHLD else self.stop(number)
            if self.running and self.patience and not self.patience.lasts(self.running):
                self.signal(signal.SIGKILL)
            if self.asked and not self.running and time.monotonic() > self.until:
                os.kill(self.agent, signal.SIGKILL)
        wait_for(self.notes, NOTE_SECONDS)
        if self.output:
            self.output.finish()
        return self.verdict()

    def hear(self):
        with contextlib.suppress(ConnectionError):
            return self.line.recv(MESSAGE_BYTES)

    def obey(self, what, *words):
        """A message of the agent's."""
        if what == "end":
            self.end(*words)
        elif self.asked and not self.code:  # it has not heard yet
            os.kill(self.agent, signal.SIGKILL)
        elif what == "life":
            if self.cause:
                self.say(f"torchrun: {self.cause}, starting again", sys.stderr)
            self.codes, self.cause, self.patience = [], "", None
        else:
            self.start(*words)

    def start(self, place, words, environ, files):
        """Forks a worker, number `place` of this machine; its output goes into these files, if named."""
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = self.output.begin(int(environ["RANK"])) if self.output and not any(files) else []
        if (pid := self._fork(signal.SIGTERM)) == 0:
            code = 1
            try:
                for stream, path in enumerate(files, 1):
                    if path:
                        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
                for stream, end in enumerate(pipes, 1):
                    os.dup2(end, stream)
                for end in {*pipes}:
                    os.close(end)
                os.environ.update(environ)
                code = self.run(words) if self.run else os.execvp(words[0], words)
            except OSError as error:
                print(f"error: {words[0]}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        for end in {*pipes}:
            os.close(end)
        self.running[pid] = place, int(environ["RANK"])
        self.tell("began", place, pid)

    def _fork(self, number):
        """os.fork; the child hears no more of what the launcher hears, and gets the signal if that dies."""
        launcher = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP)  # else the child would tell us of its signals
        if pid := os.fork():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
            return pid
        die_with(launcher, number)
        os.setsid()  # Ctrl-C reaches the launcher, and through it the workers
        signal.set_wakeup_fd(-1)
        for number in (*STOP, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
        self.line.close()
        self.ears.close()
        for end in self.wake:
            os.close(end)
        if self.output:
            self.output.line.close()
        return 0

    def bury(self):
        """Takes note of every process that has ended; one SIGCHLD may stand for several."""
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = found[0], os.waitstatus_to_exitcode(found[1])
                self.until = time.monotonic() + LEAVE_SECONDS
                if pid == self.agent:
                    self.code = code
                    self.end(signal.SIGTERM)
                elif pid in self.running:
                    place, rank = self.running.pop(pid)
                    self.codes.append(code)
                    self.tell("ended", place, code)
                    if code:
                        self.failed(pid, rank, code)
                self.notes.discard(pid)

    def failed(self, pid, rank, code):
        how = f"was killed by {name_of(-code)}" if code < 0 else f"ended with {code}"
        if not self.patience:  # else it was told to end
            self.cause = f"rank {rank} (pid {pid}) {how}"
        if code in FINAL:
            self.stop(signal.SIGTERM)
        self.end(signal.SIGTERM)  # a survivor saves, if it has not done so already
        if code not in (1, STOPPED, *FINAL):  # the others may stop before they miss it
            self.note(rank, how)

    def note(self, rank, how):
        """Notes a death, in a process of its own: the disk may have stopped."""
        if pid := self._fork(signal.SIGKILL):
            self.notes.add(pid)
            return
        try:
            self.died(rank, how)
        finally:
            os._exit(0)

    def stop(self, number):
        """A signal: the workers get it too, and there will be no other life."""
        again, self.asked = self.asked, True
        if self.running or self.codes and not again:
            self.tell("leave", number)
            self.end(number)
        elif self.code is None:
            os.kill(self.agent, signal.SIGKILL)

    def end(self, number):
        if self.running:
            self.signal(number)
            self.patience = self.patience or Patience(self.running)
            self.patience.lasts(self.running)

    def signal(self, number):
        for pid in self.running:
            os.kill(pid, number)

    def tell(self, *words):
        with contextlib.suppress(OSError):  # it has ended
            self.line.send(json.dumps(words).encode())

    def verdict(self):
        """The launcher's exit code."""
        if final := [code for code in self.codes if code in FINAL]:
            return final[0]
        if self.codes and not any(self.codes) and (self.asked or not self.code):
            return 0
        if not self.asked:
            return self.code if self.code in (0, 1, 2) else 1
        # killed: it had no time to save
        return STOPPED if STOPPED in self.codes or -signal.SIGKILL not in self.codes else 1


def name_of(number):
    """Of a signal; most of the real-time ones have only a number."""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def die_with(parent, number):
    """Lets the kernel send this process the signal when its parent dies: no orphan trains."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def run_script(words):
    """Does in this process what `python -u SCRIPT ...` does; returns its exit code."""
    code, sys.argv = 0, words[2:]
    sys.stdout.reconfigure(write_through=True)
    try:
        runpy.run_path(words[2], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return code
