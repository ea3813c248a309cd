"""torchrun with the settings that this project needs; a restart takes tenths of a second.

    python launch/torchrun.py --nproc_per_node=2 train_ddp.py       # takes all options of torchrun
    python launch/torchrun.py --nnodes=1:4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=JOB \\
        --rdzv_endpoint=HOST:29400 train_ddp.py --run-dir /shared/run    # on each of one to four machines

It refuses a wrong flag of the training before it starts a process. multiprocessing's fork server imports the
training once; each process is a fork of it (`--start_method=spawn`: each process imports afresh). It returns
the training's exit code, where torchrun itself turns every code into 1.
"""

import argparse
import ast
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(ROOT)]

from common.errors import UserError, blamed, say  # noqa: E402
from common.extras.command import run_command  # noqa: E402
from common.ledger import named, newest_lives  # noqa: E402
from common.options import parse_options  # noqa: E402
from common.place import MEETING, STOP, STOPPED  # noqa: E402
from common.torch_names import missing  # noqa: E402
from launch.torch_names import LAUNCHER  # noqa: E402

SETTINGS = {
    # Each node counts its own and other nodes' failures, and the first node to run out ends the job for all.
    # The training itself stops after some lives without progress.
    "PET_MAX_RESTARTS": "1000000",
    # With one store for all restarts, workers on other nodes keep the address of a dead rank 0; and that
    # store listens on every network interface.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # A process that is told to end has so long to save; torch's own 30 seconds kill large saves.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    "PET_MASTER_PORT": "29500",
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1",
    "PET_MONITOR_INTERVAL": "0.02",
    "PYTHONUNBUFFERED": "1",
    # torch's stores ask for the name of each process that connects, 10 seconds where the name server is away
    "RES_OPTIONS": "timeout:1 attempts:2",
    # numpy starts threads when imported, and a fork has none of them
    "OPENBLAS_NUM_THREADS": "1",
    # counting GPUs must not touch CUDA in a process that forks
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
LONGEST_PLACE = 40  # characters; the fork server's socket lies below, and the kernel takes 107


def main(arguments):
    """Return the exit code."""
    return run_command(lambda: launch_in_a_folder(arguments), "")


def launch_in_a_folder(arguments):
    """Launch in a folder with the fork server's socket, the agent's notes, and logs of processes."""
    with blamed("the launcher needs a temporary folder", "give TMPDIR one that can be written to"):
        place = tempfile.gettempdir()
        if len(place) >= LONGEST_PLACE:
            place = "/tmp"
        made = tempfile.TemporaryDirectory(prefix="torchelastic_", dir=place, ignore_cleanup_errors=True)
    with made as folder:
        return launch(arguments, folder)


def launch(arguments, folder):
    """Check the training's options and start its imports; then torchrun's agent takes over."""

    def stop(*_):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(STOPPED)

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup has started this
        SETTINGS["PET_SIGNALS_TO_HANDLE"] += ",SIGHUP"
    for name in MEETING:
        os.environ.pop(name, None)  # of an outer job: each worker gets its own
    os.environ |= SETTINGS | os.environ  # a setting that is there stays
    position = find_script(arguments)
    script = arguments[position:]
    processes, asked = glance(arguments[:position])
    for number in STOP:  # others stay as they are: torch's handler would not follow on this one
        if number.name in asked.signals_to_handle:
            signal.signal(number, stop)  # process 1 has no default handlers
    options = check_options(script, processes) if script else None
    line = options and processes and line_if_complete(options)  # on one machine
    if line:
        say(line)
        return 0
    if processes != 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, without its warning
    if script:
        os.environ.setdefault("PET_START_METHOD", "forkserver")
        if asked.start_method in (None, "", "forkserver"):
            start_importing(Path(script[0]), options, folder)
    lack = missing(LAUNCHER)
    if lack:
        raise UserError(f"{lack}; with another one plain torchrun may train (launch/README.md)")
    from launch.agent import serve

    return serve(arguments, folder, options)


def find_script(arguments):
    """Find where the script stands among torchrun's words; their number if there is none."""
    for position, word in enumerate(arguments):
        if word.endswith(".py") and Path(word).is_file():
            return position
    return len(arguments)


def glance(words):
    """Return (how many processes torchrun will start, what else it is asked), before torch is imported.

    0 if only torchrun knows (several machines, one per GPU). Its own parser reads all options later.
    """
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("nproc_per_node", "nnodes", "start_method", "signals_to_handle"):
        default = os.environ.get(f"PET_{name.upper()}")
        parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", default=default, const="", nargs="?")
    asked, _ = parser.parse_known_args(words)
    processes = asked.nproc_per_node or "1"
    if asked.nnodes not in (None, "1", "1:1") or not processes.isdecimal():
        processes = "0"
    return int(processes), asked


def check_options(script, processes):
    """Refuse a wrong flag of the training; None for a script that has flags of its own, or none."""
    sys.argv = script
    text = Path(script[0]).read_bytes()
    if b"common.options" not in text:
        return None
    return parse_options(ast.get_docstring(ast.parse(text)) or "", processes=processes)


def line_if_complete(options):
    """Return what each process would say of a complete run; nothing if there is something to train.

    Reads the ledger's last life alone: a long run has thousands.
    """
    if named(next(newest_lives(options.run_dir), []), "done"):
        from common.story import complete  # imports torch

        return complete(options)


def start_importing(script, options, folder):
    """Start the fork server, which imports beside us."""
    tempfile.tempdir = folder  # of multiprocessing, which would leave its own behind
    # else each process would run this file again, as it is by then
    vars(sys.modules["__main__"]).update(__file__=None, __spec__=None)
    places = f"{script.resolve().parent}:{ROOT}"
    inherited = os.environ.get("PYTHONPATH")
    # without a guard of `main` an import would train
    module = script.stem if options and b"__main__" in script.read_bytes() else "common.elastic"
    os.environ |= {
        "PYTHONPATH": f"{places}:{inherited}" if inherited else places,
        "LAUNCHER_PID": str(os.getpid()),
        "LAUNCH_PRELOAD": json.dumps([str(script), module, options.to_json() if options else {}]),
    }
    multiprocessing.set_forkserver_preload(["launch.worker"])
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for this process, which tells the others
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, heard)
    del os.environ["LAUNCH_PRELOAD"]


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # to take torch down again would be half a second
