"""One machine's agent that has torch imported already and forks its workers: a restart costs tenths of a second, not seconds.

    python launch/warm.py --nproc 2 train_ddp.py --epochs 5

It starts, watches and restarts like torchrun on one machine, and unlike it passes the workers' exit codes on: 0 done, 143
stopped on request and saved, 2 to 5 what a restart cannot mend. Not for several machines (use torchrun), and not for
GPUs unless asked (--gpu): a fork of a process that has touched CUDA is unusable, which has not been tried on a GPU yet.
"""
import argparse
import atexit
import ctypes
import gc
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import uuid

FINAL = (2, 3, 4, 5)               # bad input, no whole checkpoint, saves fail, no progress: a restart would end the same
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
GRACE = 30.0                       # seconds from the first signal to SIGKILL, as torchrun gives
STOPPED = 143
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="processes")
    parser.add_argument("--max-restarts", type=int, default=1_000_000, help="a run that makes no progress stops by itself")
    parser.add_argument("--gpu", action="store_true", help="also where there are GPUs")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.nproc < 1 or not os.path.isfile(given.script):
        parser.error(f"--nproc {given.nproc}: at least 1" if given.nproc < 1 else f"no file {given.script}")
    if os.path.exists("/dev/nvidia0") and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and not given.gpu:
        parser.error("this machine has GPUs, with which forked workers have not been tried\nuse torchrun, or insist with --gpu")
    sys.path.insert(0, os.path.dirname(os.path.abspath(given.script)))
    sys.argv = [given.script, *given.arguments]
    os.environ.setdefault("OMP_NUM_THREADS", "1" if given.nproc > 1 else str(os.cpu_count()))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ["OMP_NUM_THREADS"])    # its threads would not survive the fork
    check_options(given.script, given.nproc)
    preload(given.script)
    if len(os.listdir("/proc/self/task")) > 1:
        print("warm: the imports have started threads, which a fork does not have; if workers hang, use torchrun", file=sys.stderr)
    # From here on signals wait until they are asked for, so that none falls between a look and a wait.
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN        # left as it is, it stays ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP, signal.SIGCHLD} - ({signal.SIGHUP} if nohup else set()))
    run_id, restarts = uuid.uuid4().hex, 0
    while True:
        code = Life(given, run_id, restarts).code()
        if code is not None or restarts >= given.max_restarts:
            sys.exit(1 if code is None else code)
        restarts += 1
        print(f"warm: a worker died, restart {restarts}", file=sys.stderr, flush=True)


def check_options(script, processes):
    """A wrong flag ends here, before torch is imported and before there is anything to clean up; 0 processes: not known yet."""
    import ast

    from common.options import parse_options
    for name in PLACES:
        os.environ.pop(name, None)                                   # of an outer job: each worker gets its own
    with open(script, encoding="utf-8") as file:
        parse_options(ast.get_docstring(ast.parse(file.read())) or "", processes=processes)


def preload(script):
    """Everything a worker would import: the script's own imports, and those that torch leaves for the first step."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")      # counting GPUs must not touch CUDA in this process
    gc.disable()                                                     # imports make no garbage
    runpy.run_path(script, run_name="preload")
    if "--no-tensorboard" not in sys.argv:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError:
            pass
    gc.freeze()                                                      # nobody looks through it again: workers share it uncopied
    atexit.register(gc.unfreeze)                                     # but at the end: triton counts what is left, and complains
    gc.enable()


class Life:
    """One set of workers, from fork to the last one's end."""

    def __init__(self, given, run_id, restart):
        self.given, self.asked, self.deadline, self.codes = given, False, None, []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": given.nproc, "LOCAL_WORLD_SIZE": given.nproc, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1,
                  "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run_id,
                  "TORCHELASTIC_RESTART_COUNT": restart, "TORCHELASTIC_MAX_RESTARTS": given.max_restarts,
                  "TORCHELASTIC_USE_AGENT_STORE": False}
        agent = os.getpid()
        self.workers = {self._fork(common | {"RANK": rank, "LOCAL_RANK": rank}, agent): rank for rank in range(given.nproc)}

    def _fork(self, environ, agent):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: no orphan trains on
                if os.getppid() != agent:
                    os._exit(1)
                os.setsid()                                          # Ctrl-C reaches the agent, and through it the workers
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP, signal.SIGCHLD))
                os.environ.update({name: str(value) for name, value in environ.items()})
                code = run(self.given.script)
            finally:
                os._exit(code)
        return pid

    def code(self):
        """What the agent should leave with, or None for another life."""
        while self.workers:
            left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            waited = (*STOP, signal.SIGCHLD)
            got = signal.sigwaitinfo(waited) if left is None else signal.sigtimedwait(waited, left)
            if got is None:
                self._signal(signal.SIGKILL)
                self.deadline = time.monotonic() + GRACE
            elif got.si_signo == signal.SIGCHLD:
                self._reap()
            else:
                self.asked = True
                self._end(got.si_signo)
        for code in self.codes:
            if code in FINAL:
                return code
        if not any(self.codes):
            return 0
        if not self.asked:
            return None
        return STOPPED if STOPPED in self.codes or -signal.SIGKILL not in self.codes else 1      # killed: it never came to save

    def _reap(self):
        """One SIGCHLD may stand for several ends."""
        for pid in list(self.workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.workers[pid]
                self.codes.append(os.waitstatus_to_exitcode(status))
                if self.codes[-1]:
                    self._end(signal.SIGTERM)                        # a survivor saves, if it has not done so already

    def _end(self, number):
        self._signal(number)
        self._signal(signal.SIGCONT)                                 # who is stopped would only be waited for
        self.deadline = self.deadline or time.monotonic() + GRACE

    def _signal(self, number):
        for pid in self.workers:
            os.kill(pid, number)


def run(script):
    """The script as if it had been started; returns its exit code."""
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    return code


if __name__ == "__main__":
    main()
