"""An agent for one machine that forks its workers with torch imported: a restart takes tenths of a second.

    python launch/warm.py --nproc 2 train_ddp.py --epochs 5

It starts, watches and restarts like torchrun on one machine. Unlike torchrun it returns the workers' exit
code: 0 done, 143 stopped on request and saved, 2 to 6 an error that a restart cannot mend. Not for several
machines (use torchrun), and not for GPUs without --gpu, for it was never tried on one.
"""
import argparse
import atexit
import contextlib
import ctypes
import gc
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
import uuid

from patience import Patience

# bad input, no whole checkpoint, saves fail, no progress, another job's run, a device computes wrong numbers
FINAL = (2, 3, 4, 5, 6, 7)
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
STOPPED = 143
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--nproc", type=int, default=2, help="processes")
    parser.add_argument("--max-restarts", type=int, default=1_000_000, help="without progress it ends anyway")
    parser.add_argument("--gpu", action="store_true", help="also where there are GPUs")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.nproc < 1 or not os.path.isfile(given.script):
        parser.error(f"--nproc {given.nproc}: at least 1" if given.nproc < 1 else f"no file {given.script}")
    if os.path.exists("/dev/nvidia0") and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and not given.gpu:
        parser.error("this machine has GPUs, with which forked workers have not been tried\n"
                     "use torchrun, or insist with --gpu")
    handlers = leave_on_a_signal()
    project = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:0] = [os.path.dirname(os.path.abspath(given.script)), project]
    sys.argv = [given.script, *given.arguments]
    os.environ.setdefault("OMP_NUM_THREADS", "1" if given.nproc > 1 else str(os.cpu_count()))
    # numpy starts threads when imported, and a fork has none of them
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    opts = check_options(given.script, given.nproc)
    from common.errors import say
    from common.ledger import Ledger
    given.ledger, given.say = opts and Ledger(opts.run_dir), say
    preload(given.script if opts else None)
    if len(os.listdir("/proc/self/task")) > 1:
        print("warm: the imports have started threads, which a fork lacks; if workers hang, use torchrun",
              file=sys.stderr)
    # From here on signals stay pending until `Life.code` waits for them, so that none is missed.
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # then SIGHUP stays ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP, signal.SIGCHLD} - ({signal.SIGHUP} if nohup else set()))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    with tempfile.TemporaryDirectory(prefix="torchelastic_") as folder:
        sys.exit(train(given, folder))


def train(given, folder):
    """Life after life; returns the exit code."""
    run_id, restarts = uuid.uuid4().hex, 0
    while True:
        life = Life(given, run_id, restarts, folder)
        code = life.code()
        if code is not None or restarts >= given.max_restarts:
            return 1 if code is None else code
        restarts += 1
        given.say(f"warm: {life.cause}, restart {restarts}", sys.stderr)  # above a bar


def leave_on_a_signal():
    """Without workers a signal ends this process at once, even process 1, which has no default handlers."""
    handlers = {number: signal.getsignal(number) for number in STOP}
    for number in STOP:
        if handlers[number] is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(STOPPED))
    return handlers


def check_options(script, processes):
    """Refuses a wrong flag before torch is imported; `processes` is 0 if the number is not known yet.

    None for a script that has flags of its own, or none.
    """
    import ast

    from common.options import parse_options
    for name in PLACES:
        os.environ.pop(name, None)  # of an outer job: each worker gets its own
    with open(script, encoding="utf-8") as file:
        text = file.read()
    if "parse_options" not in text:
        return None
    return parse_options(ast.get_docstring(ast.parse(text)) or "", processes=processes)


def preload(script):
    """Imports everything that a worker would import, also what torch imports in the first step."""
    # counting GPUs must not touch CUDA in this process
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gc.disable()  # imports make no garbage
    if script:
        runpy.run_path(script, run_name="preload")
    else:  # its code may lack `if __name__ == "__main__"`
        import common.elastic  # noqa: F401
    if "--no-tensorboard" not in sys.argv:
        with contextlib.suppress(ImportError):
            import torch.utils.tensorboard  # noqa: F401
    gc.freeze()  # the collector leaves these objects alone: workers share their memory without a copy
    atexit.register(gc.unfreeze)  # at the end triton counts what is left, and complains
    gc.enable()


class Life:
    """One set of workers, from the fork until the last one has ended."""

    def __init__(self, given, run_id, restart, folder):
        self.given, self.asked, self.patience, self.codes, self.cause = given, False, None, [], ""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": given.nproc, "LOCAL_WORLD_SIZE": given.nproc, "GROUP_RANK": 0,
                  "GROUP_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                  "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": restart,
                  "TORCHELASTIC_MAX_RESTARTS": given.max_restarts,
                  "TORCHELASTIC_USE_AGENT_STORE": False}
        agent, self.workers = os.getpid(), {}
        for rank in range(given.nproc):
            notes = f"{folder}/warm/attempt_{restart}/{rank}"  # as torchrun has them
            os.makedirs(notes)
            own = {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_ERROR_FILE": f"{notes}/error.json"}
            self.workers[self._fork(common | own, agent)] = rank

    def _fork(self, environ, agent):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: no orphan trains
                if os.getppid() != agent:
                    os._exit(1)
                os.setsid()  # Ctrl-C reaches the agent, and through it the workers
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP, signal.SIGCHLD))
                os.environ.update({name: str(value) for name, value in environ.items()})
                code = run(self.given.script)
            finally:
                os._exit(code)
        return pid

    def code(self):
        """The agent's exit code, or None for another life."""
        while self.workers:
            waited = (*STOP, signal.SIGCHLD)
            got = signal.sigtimedwait(waited, 1.0) if self.patience else signal.sigwaitinfo(waited)
            if got is None:
                if not self.patience.lasts(self.workers):
                    self._signal(signal.SIGKILL)
            elif got.si_signo == signal.SIGCHLD:
                self._reap()
            else:
                self.asked = True
                self._end(got.si_signo)
        if final := [code for code in self.codes if code in FINAL]:
            return final[0]
        if not any(self.codes):
            return 0
        if not self.asked:
            return None
        # killed: it had no time to save
        return STOPPED if STOPPED in self.codes or -signal.SIGKILL not in self.codes else 1

    def _reap(self):
        """One SIGCHLD may stand for several ends."""
        for pid in list(self.workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank, code = self.workers.pop(pid), os.waitstatus_to_exitcode(status)
                self.codes.append(code)
                if code:
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
                    self.cause = self.cause or f"rank {rank} (pid {pid}) {how}"
                    if self.given.ledger and code not in (1, STOPPED, *FINAL):
                        self.given.ledger.death(rank, how)  # the others may stop before they miss it
                    self._end(signal.SIGTERM)  # a survivor saves, if it has not done so already

    def _end(self, number):
        self._signal(number)
        self.patience = self.patience or Patience(self.workers)
        self.patience.lasts(self.workers)

    def _signal(self, number):
        for pid in self.workers:
            os.kill(pid, number)


def run(script):
    """Runs the script as if it had been started; returns its exit code."""
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


if __name__ == "__main__":
    main()
