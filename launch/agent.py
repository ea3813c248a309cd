"""torchrun with the settings that this project's promises need; everything else is torchrun's, its options too.

    python launch/agent.py --nproc_per_node=2 train_ddp.py
    python launch/agent.py --nnodes=1:4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=JOB --rdzv_endpoint=HOST:29400 \\
        train_ddp.py --run-dir /shared/run                          # on each of one to four machines

A wrong flag of the training is refused before any process is started, and its exit code is the agent's (torchrun itself
turns every one into 1): 0 done, 2 bad input, 3 no checkpoint verifies, 4 saving fails, 5 no progress, 143 stopped and saved.
"""
import ast
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = (2, 3, 4, 5)                              # exit codes that a person has to act on
SETTINGS = {
    # Restarts are counted on each node, other nodes' failures too, and the first node to run out ends the job for all. Lives
    # without progress are what has to be bounded, and the training does that by itself.
    "PET_MAX_RESTARTS": "1000000",
    # With one store for all its restarts a life could read the addresses of its dead predecessor, and workers on other nodes
    # those of a dead rank 0; it would also listen on every network interface.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # A node that dies is missed after 6 seconds instead of 15, and others are waited for 3 instead of 30. Clocks of the nodes
    # may differ by less than those 6 seconds: a live node would count as dead.
    "PET_RDZV_CONF": "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3",
    "OMP_NUM_THREADS": "1",                      # torchrun's own default, without its warning; --threads says otherwise
}
PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Worker(subprocess.Popen):
    """What torchrun starts its workers with; keeps them, for their exit codes."""

    started = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if kwargs.get("start_new_session"):
            self.started.append(self)


def main(arguments):
    for name in PLACES:
        os.environ.pop(name, None)               # of an outer job: torchrun gives the workers their own
    check_options(arguments)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    options = arguments[:where_script_is(arguments)]
    alone = "PET_RDZV_ENDPOINT" not in os.environ and not any(
        option.lstrip("-").startswith(("nnodes", "rdzv", "standalone", "master", "node")) for option in options)
    subprocess.Popen = Worker                    # before torch takes it from there
    with tempfile.TemporaryDirectory(prefix="agent-") as folder:
        os.environ.setdefault("PET_LOG_DIR", folder)                # torchrun would leave one behind at every start
        if alone:
            # The agent meets only itself: a file will do, where a port would be open to the network.
            os.environ["PET_RDZV_CONF"] += ",store_type=file"
            arguments = ["--rdzv_backend=c10d", f"--rdzv_endpoint={folder}/rendezvous", f"--rdzv_id={os.getpid()}",
                         "--local_addr=127.0.0.1", *arguments]
        return run(arguments)


def where_script_is(arguments):
    """Index of the script among torchrun's arguments; the end, if it is none of this project's."""
    return next((i for i, text in enumerate(arguments) if Path(text).name in ("train_ddp.py", "train_mp.py")), len(arguments))


def check_options(arguments):
    """Exits as the training would; --help is the training's own, if it follows the script."""
    at = where_script_is(arguments)
    if at < len(arguments) and Path(arguments[at]).is_file():
        sys.path.insert(0, str(ROOT))
        from common.options import parse_options
        doc = ast.get_docstring(ast.parse(Path(arguments[at]).read_text()))
        parse_options(doc, arguments[at + 1:], Path(arguments[at]).stem.removeprefix("train_"))


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
    except SignalException as error:
        codes = [worker.returncode for worker in Worker.started]
        return next((code for code in codes if code in OURS), 143 if 143 in codes else 128 + error.sigval)
    except ChildFailedError as error:
        codes = [worker.returncode for worker in Worker.started]
        code = next((code for code in reversed(codes) if code in OURS), 1)
        if code == 1:
            print(error, file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
