"""torchrun, for GPUs and several machines, with the settings that the promises of this project need; its options are torchrun's.

    python launch/torchrun.py --nproc_per_node=2 train_ddp.py
    python launch/torchrun.py --nnodes=1:4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=JOB --rdzv_endpoint=HOST:29400 \\
        train_ddp.py --run-dir /shared/run                          # on each of one to four machines

A wrong flag of the training is refused before any process is started, and the training's exit code is handed on, where
torchrun itself turns every one into 1.
"""
import logging
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from warm import FINAL, STOPPED, check_options

SETTINGS = {
    # Counted on each node, other nodes' failures too, and the first node to run out ends the job for all. What has to be
    # bounded is lives without progress, and the training does that by itself.
    "PET_MAX_RESTARTS": "1000000",
    # With one store for all its restarts, workers on other nodes keep the address of a rank 0 that is dead; and it listens
    # on every network interface.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # A dead node is missed after 6 seconds instead of 15, a missing one waited for 3 instead of 30. Clocks may differ by less
    # than those 6 seconds: a live node would count as dead.
    "PET_RDZV_CONF": "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3",
    # Slurm's early warning too reaches the workers, which save; and nohup means what it says.
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1" + (
        "" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else ",SIGHUP"),
    "OMP_NUM_THREADS": "1",                      # torchrun's own default, without its warning; --threads says otherwise
}
MEETING = ("nnodes", "rdzv", "standalone", "master", "node")


class Worker(subprocess.Popen):
    """What torchrun starts its workers with; keeps those of the newest life, for their exit codes."""

    started = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if kwargs.get("start_new_session"):
            self.started[:] = [worker for worker in self.started if worker.returncode is None] + [self]


def main(arguments):
    at = next((i for i, text in enumerate(arguments) if Path(text).name in ("train_ddp.py", "train_mp.py")), len(arguments))
    if at < len(arguments) and Path(arguments[at]).is_file():
        sys.path.insert(0, str(Path(arguments[at]).resolve().parent))
        sys.argv = arguments[at:]
        check_options(arguments[at], count(arguments[:at]))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # What the command line says comes on top: torchrun would drop the environment's settings altogether.
    arguments = [text.replace("=", f"={os.environ['PET_RDZV_CONF']},", 1) if text.startswith(("--rdzv_conf=", "--rdzv-conf="))
                 else text for text in arguments[:at]] + arguments[at:]
    subprocess.Popen = Worker                    # before torch takes it from there
    with tempfile.TemporaryDirectory(prefix="torchelastic_") as folder:
        os.environ.setdefault("PET_LOG_DIR", folder)                # torchrun by itself leaves such a one at every start
        elsewhere = any(text.lstrip("-").startswith(MEETING) for text in arguments[:at])
        if not elsewhere and not {"PET_NNODES", "PET_RDZV_ENDPOINT", "PET_STANDALONE"} & set(os.environ):
            # On one machine the agent meets only itself: a file will do, where a port would be open to the network.
            os.environ["PET_RDZV_CONF"] += ",store_type=file"
            arguments = ["--rdzv_backend=c10d", f"--rdzv_endpoint={folder}/rendezvous", f"--rdzv_id={uuid.uuid4()}",
                         "--local_addr=127.0.0.1", *arguments]
        return run(arguments)


def count(arguments):
    """How many processes torchrun will start, or 0 where only torchrun knows: several machines, or as many as there are GPUs."""
    from common.environment import flag_in
    each, nodes = (flag_in(arguments, name, os.environ) for name in ("nproc_per_node", "nnodes"))
    return int(each or 1) if nodes in (None, "1", "1:1") and (each or "1").isdecimal() else 0


def run(arguments):
    """torchrun; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun
    if "LOGLEVEL" not in os.environ:
        for name in ("agent.server.api", "multiprocessing.api"):    # they report each signal they pass on
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    try:
        torchrun(arguments)
        return 0
    except (SignalException, ChildFailedError) as error:
        codes = [worker.returncode for worker in reversed(Worker.started)]
        for code in codes:
            if code in FINAL:
                return code
        if isinstance(error, SignalException):
            return STOPPED if STOPPED in codes or -signal.SIGKILL not in codes else 1      # killed: it never came to save
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
