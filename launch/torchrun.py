"""torchrun with the settings that this project needs; a restart takes tenths of a second.

    python launch/torchrun.py --nproc_per_node=2 train_ddp.py       # takes all options of torchrun
    python launch/torchrun.py --nnodes=1:4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=JOB \\
        --rdzv_endpoint=HOST:29400 train_ddp.py --run-dir /shared/run    # on each of one to four machines

It refuses a wrong flag of the training before it starts a process, imports what the training imports, and
forks its processes (workers.py). `--start_method=spawn` lets each one start Python afresh instead. It returns
the training's exit code, where torchrun itself turns every code into 1. A signal before there are processes
ends it at once, with 143. Machines that cannot meet end with 1, for another try may succeed. `--check` as the
first word only looks whether the training could run (doctor.py).
"""
import ast
import atexit
import contextlib
import gc
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "launch"
sys.path[:0] = [str(ROOT), str(HERE)]

from keep import keep  # noqa: E402
from output import Output  # noqa: E402
from workers import STOP, STOPPED, Workers, run_script  # noqa: E402

from common.errors import fill_closed_streams, say  # noqa: E402
from common.options.environment import flag_in  # noqa: E402

SETTINGS = {
    # Each node counts its own and other nodes' failures, and the first node to run out ends the job for all.
    # The training itself stops after some lives without progress.
    "PET_MAX_RESTARTS": "1000000",
    # With one store for all restarts, workers on other nodes keep the address of a dead rank 0; and that
    # store listens on every network interface.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # A dead node is noticed after 6 seconds instead of 15, and a missing one waited for 1 instead of 30: one
    # that comes later is taken in within seconds. The nodes' clocks must differ by less than 6 seconds, or a
    # live node counts as dead.
    "PET_RDZV_CONF": "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=3",
    # numpy starts threads when imported, and a fork has none of them
    "OPENBLAS_NUM_THREADS": "1",
    # counting GPUs must not touch CUDA in a process that forks
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
UNSAVED = 4  # exit code
MEETING = ("nnodes", "rdzv", "standalone", "master", "node")
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main(arguments):
    """Returns the exit code."""
    if arguments[:1] == ["--check"]:
        from doctor import main as look
        return look(arguments[1:])
    fill_closed_streams()
    before = {number: signal.getsignal(number) for number in STOP}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # also as process 1, which has no default handlers
            signal.signal(number, lambda *_: os._exit(STOPPED))
    at = next((i for i, text in enumerate(arguments) if text.endswith(".py") and Path(text).is_file()),
              len(arguments))
    own, script = arguments[:at], arguments[at:]
    for name in PLACES:
        os.environ.pop(name, None)  # of an outer job: each worker gets its own
    opts = script and check_options(script, count(own))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    if count(own) != 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    forks = bool(script) and preload(script, own, opts)
    folder = tempfile.mkdtemp(prefix="torchelastic_")
    line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher, agent = os.getpid(), os.fork()
    if agent == 0:
        code = 1
        try:
            line.close()
            forget_modules()
            sys.path.insert(0, str(HERE))
            from agent import serve
            code = serve(settled(own, folder) + script, theirs, launcher, own)
        except SystemExit as end:  # a wrong flag
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    theirs.close()
    try:
        seen = sys.stdout.isatty() or sys.stderr.isatty()
        output = None if seen else Output(opts.run_dir if opts else None)
        code = Workers(agent, line, run_script if forks else None, say, deaths_in(opts), output).serve()
        return code if not opts or keep(opts, say) or code != STOPPED else UNSAVED
    finally:
        line.close()
        shutil.rmtree(folder, ignore_errors=True)


def check_options(script, processes):
    """Refuses a wrong flag before torch is imported; `processes` is 0 if the number is not known yet.

    None for a script that has flags of its own, or none.
    """
    sys.argv = script
    text = Path(script[0]).read_bytes()
    if b"parse_options" not in text:
        return None
    from common.options import parse_options
    return parse_options(ast.get_docstring(ast.parse(text)) or "", processes=processes)


def deaths_in(opts):
    """The function that notes the death of a worker: in the ledger, if the run is known."""
    from common.ledger import Ledger
    return Ledger(opts.run_dir).death if opts else lambda rank, how: None


def preload(script, own, opts):
    """Imports everything that a worker will import; returns whether to fork workers."""
    if "spawn" in (flag_in(own, "start_method", os.environ) or ("" if sys.platform == "linux" else "spawn")):
        return False
    if {"--no-python", "--no_python"} & set(own) or "PET_NO_PYTHON" in os.environ:
        return False
    elsewhere = [place for place in sys.path if Path(place).resolve() != HERE]
    sys.path[:] = [str(Path(script[0]).resolve().parent), *elsewhere]
    forget_modules()
    gc.disable()  # imports make no garbage
    if opts:
        runpy.run_path(script[0], run_name="preload")
        if "--no-tensorboard" not in script:
            with contextlib.suppress(ImportError):
                import torch.utils.tensorboard  # noqa: F401
    else:  # its code may lack `if __name__ == "__main__"`
        import common.elastic  # noqa: F401
    gc.freeze()  # the collector leaves these objects alone: processes share their memory without a copy
    atexit.register(gc.unfreeze)  # at the end triton counts what is left, and complains
    gc.enable()
    import torch
    if torch.cuda.is_initialized() or sys.platform == "linux" and len(os.listdir("/proc/self/task")) > 1:
        say("torchrun: the imports have touched a GPU or started threads, which no fork can use: "
            "each process will import for itself", sys.stderr)
        return False
    return True


def forget_modules():
    """A script may have modules named as those of this folder: output.py, agent.py, ..."""
    for name in [name for name in sys.modules if (HERE / f"{name}.py").is_file()]:
        del sys.modules[name]


def settled(own, folder):
    """torchrun's arguments with our settings; `folder` is temporary."""
    # The command line's settings are added to these: torchrun alone would drop those of the environment.
    conf = ("--rdzv_conf=", "--rdzv-conf=")
    own = [text.replace("=", f"={os.environ['PET_RDZV_CONF']},", 1) if text.startswith(conf) else text
           for text in own]
    os.environ.setdefault("PET_LOG_DIR", folder)  # else torchrun leaves a folder behind at every start
    elsewhere = any(text.lstrip("-").startswith(MEETING) for text in own)
    if not elsewhere and not {"PET_NNODES", "PET_RDZV_ENDPOINT", "PET_STANDALONE"} & set(os.environ):
        # On one machine the agent meets only itself: a file is enough, and no port is open to the network.
        os.environ["PET_RDZV_CONF"] += ",store_type=file"
        os.environ.setdefault("PET_MONITOR_INTERVAL", "0.02")
        return ["--rdzv_backend=c10d", f"--rdzv_endpoint={folder}/rendezvous", f"--rdzv_id={uuid.uuid4()}",
                "--local_addr=127.0.0.1", *own]
    if flag_in(own, "local_addr", os.environ):
        return own
    if "--standalone" in own:
        return ["--local_addr=127.0.0.1", *own]
    address = address_towards(flag_in(own, "rdzv_endpoint", os.environ))
    return [f"--local_addr={address}", *own] if address else own


def address_towards(endpoint):
    """This machine's address towards HOST:PORT if its own name is a loopback, as on Debian; else None."""
    host, _, port = (endpoint or "").rpartition(":")
    with contextlib.suppress(OSError):
        if not socket.gethostbyname(socket.getfqdn()).startswith("127."):
            return None
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port) % 65536))  # sends nothing
        address = probe.getsockname()[0]
        return None if address.startswith("127.") else address


def count(own):
    """How many processes torchrun will start; 0 if only torchrun knows (several machines, one per GPU)."""
    each, nodes = (flag_in(own, name, os.environ) for name in ("nproc_per_node", "nnodes"))
    return int(each or 1) if nodes in (None, "1", "1:1") and (each or "1").isdecimal() else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BlockingIOError as error:
        say(f"error: no more processes can be started ({error.strerror})\n"
            "       raise the limit (ulimit -u, pids.max), or start fewer", sys.stderr)
        sys.exit(1)
