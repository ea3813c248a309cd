"""A process with torch imported that forks what a test wants to start: tenths of a second where every start
would pay for importing torch again. What it starts has a session, signal handlers, environment and exit of
its own, as after an exec.

A line of JSON asks for one: {"argv", "env", "cwd", "out"}. The answer is its pid, and the file OUT.code has
its exit code once it has ended. argv[0] is a script of Python, "-m" before a module's name, or the word
torchrun: then the workers are forked from the agent in the same way, and so is the fork server of
launch/torchrun.py.
"""

import atexit
import contextlib
import functools
import gc
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

import pages
from police import alive

ROOT = os.path.abspath(f"{__file__}/../../..")
HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCHLD")


class Forked(subprocess.Popen):
    """subprocess.Popen, by a fork without the exec for `python -u SCRIPT ...` and `python -m MODULE ...`."""

    gate = None  # a pipe: at its end the ranks begin

    def _execute_child(self, args, *rest):
        argv = [word for word in args[1:] if word != "-u"]
        if args[0] != sys.executable or argv[0].startswith("-") and argv[0] != "-m":
            return super()._execute_child(args, *rest)
        cwd, env = rest[4:6]  # Popen's own order
        pipes = rest[9:15]
        self.pid = os.fork()
        if self.pid == 0:
            for fd, wanted in zip((pipes[0], pipes[3], pipes[5]), range(3), strict=True):
                if fd >= 0:
                    os.dup2(fd, wanted)
            if not self.gate:
                os.closerange(3, 256)
            become(argv, dict(os.environ) if env is None else env, cwd, self.gate, new_session=rest[20])
        self._child_created = True
        self._close_pipe_fds(*pipes)


def start_together(ranks, start):
    """No rank runs before all are forked: the agent's store looks up who connects, in a thread of its own;
    a rank that was forked meanwhile would wait for glibc's lock for ever.
    """
    Forked.gate = os.pipe()
    start(ranks)
    for fd in Forked.gate:
        os.close(fd)


def become(argv, env, cwd, gate=None, new_session=True):
    """This forked process is `python argv...` from here on, and ends as that would; never returns."""
    code = 1
    gc.freeze()  # a search through all of torch's objects would copy each of their pages, 0.3 s
    gc.enable()
    try:
        if new_session:
            os.setsid()
        for name in HANDLED:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if gate:
            os.close(gate[1])
            os.read(gate[0], 1)
            os.close(gate[0])
        atexit._clear()
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = env.get("TMPDIR")  # looked for by a trial, it would leave that file when killed
        os.chdir(cwd or ".")
        sys.argv = argv
        subprocess.Popen = Forked
        own = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
        if argv[0] == "torchrun":
            import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler
            from torch.distributed.elastic.multiprocessing.api import PContext
            from torch.distributed.run import main

            handler.Popen = Forked
            PContext.start = functools.partialmethod(start_together, PContext.start)
            main()
        elif argv[0] == "-m":
            sys.path[:1] = [cwd or ".", *own]
            sys.argv = argv[1:]
            forget_another_common(".")
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            multiprocessing.util.spawnv_passfds = fork_python
            beside = [] if "PYTHONSAFEPATH" in env else [os.path.dirname(os.path.abspath(argv[0]))]
            sys.path[:1] = [*beside, *own]
            forget_another_common(argv[0])
            runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def forget_another_common(script):
    """common/ of this checkout is imported, too; this process may be about to find another one, also beside
    it, or none.
    """
    found = {path for path in sys.path if os.path.isdir(os.path.join(path, "common"))}
    if os.path.abspath(script).startswith(f"{ROOT}/"):
        found.add(ROOT)
    if found != {ROOT}:
        for name in [name for name in sys.modules if name.partition(".")[0] == "common"]:
            del sys.modules[name]


def fork_python(_, args, fds):
    """multiprocessing's start of `python -c CODE`, as its fork server, without the seconds of the imports."""
    if pid := os.fork():
        return pid
    for number in range(3, 256):
        if number not in fds:
            with contextlib.suppress(OSError):
                os.close(number)
    for name in HANDLED:
        if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules["__main__"] = types.ModuleType("__main__")
    code = 1
    try:
        exec(args[-1], {"__name__": "__main__"})
        code = 0
    except SystemExit:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main():
    gc.disable()  # imports make no garbage
    import torch._dynamo  # noqa: F401  (DDP and optimizers import it: as many seconds as torch itself)
    import torch.distributed.run  # noqa: F401
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda: ""  # as launch/agent.py; with all modules here, a whole core
    sys.path.append(ROOT)
    import common.elastic  # noqa: F401

    sys.path.remove(ROOT)
    pages.gather()
    print("ready", flush=True)
    running = {}  # {process: where its output goes}
    while True:
        if select.select([0], [], [], 0.02 if running else None)[0]:
            line = sys.stdin.readline()
            if not line:  # the test is over: it has ended what it started, unless it was killed itself
                for pid in alive(os.environ["JOBS_TOKEN"]):
                    if pid != os.getpid():
                        os.kill(pid, signal.SIGKILL)
                return
            request = json.loads(line)
            pid = _start(request)
            running[pid] = request["out"]
            print(pid, flush=True)
        for pid, out in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                Path(f"{out}.code").write_text(str(os.waitstatus_to_exitcode(status)))
                del running[pid]


def _start(request):
    if pid := os.fork():
        return pid
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, wanted in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(fd, wanted)
    os.closerange(3, 256)
    become(request["argv"], request["env"], request["cwd"])


if __name__ == "__main__":
    main()
