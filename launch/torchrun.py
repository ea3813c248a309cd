"""torchrun, for GPUs and several machines, with the settings that the promises of this project need; its
options are torchrun's.

    python launch/torchrun.py --nproc_per_node=2 train_ddp.py
    python launch/torchrun.py --nnodes=1:4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=JOB --rdzv_endpoint=HOST:29400 \\
        train_ddp.py --run-dir /shared/run                          # on each of one to four machines

A wrong flag of the training is refused before any process is started, and the training's exit code is handed
on, where torchrun itself turns every one into 1. A signal that comes before there are processes ends it at
once, with 143. Machines that cannot meet end with 1, for another try may succeed.
"""
import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

from warm import FINAL, STOP, STOPPED, Patience, check_options

SETTINGS = {
    # Counted on each node, other nodes' failures too, and the first node to run out ends the job for all.
    # What has to be
    # bounded is lives without progress, and the training does that by itself.
    "PET_MAX_RESTARTS": "1000000",
    # With one store for all its restarts, workers on other nodes keep the address of a rank 0 that is dead;
    # and it listens
    # on every network interface.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # A dead node is missed after 6 seconds instead of 15, a missing one waited for 3 instead of 30. Clocks
    # may differ by less
    # than those 6 seconds: a live node would count as dead.
    "PET_RDZV_CONF": "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3",
    # Slurm's early warning too reaches the workers, which save; and nohup means what it says.
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1" + (
        "" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else ",SIGHUP"),
    "OMP_NUM_THREADS": "1",  # torchrun's own default, without its warning; --threads says otherwise
}
SILENCE = 20                                     # seconds
MEETING = ("nnodes", "rdzv", "standalone", "master", "node")


class Worker(subprocess.Popen):
    """What torchrun starts its workers with; keeps those of the newest life, for their exit codes."""

    started = []
    starting = threading.RLock()  # held while one is born, so that nobody leaves without it

    def __init__(self, *args, **kwargs):
        with self.starting:
            super().__init__(*args, **kwargs)
            if kwargs.get("start_new_session"):
                self.started[:] = [worker for worker in self.started if worker.returncode is None] + [self]

    def alive(self):
        return [worker.pid for worker in self.started if worker.poll() is None]

    def wait(self, timeout=None):
        """torchrun gives its workers 30 s to end, which a large state is not saved in: who moves has longer.
        """
        if timeout and timeout > 1:
            patience = Patience(self.alive())
            while (alive := self.alive()) and patience.lasts(alive):
                time.sleep(0.05)
            timeout = 0.05
        return super().wait(timeout)


def leave_before_there_are_workers(folder):
    """torchrun hears signals once its workers run; until then process 1 of a container hears none, and nobody
    does in C.
    """
    def wait_for_a_signal():
        if not select.select([reader], [], [], SILENCE)[0] and not Worker.started:
            print(f"torchrun: nothing has met for {SILENCE} s: the rendezvous does not answer, or machines are missing",
                  file=sys.stderr, flush=True)
        while True:
            number = os.read(reader, 1)[0]
            with Worker.starting:
                if number in STOP and all(worker.returncode is not None for worker in Worker.started):
                    shutil.rmtree(folder, ignore_errors=True)
                    os._exit(code_of_a_stop())

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in STOP:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=wait_for_a_signal, daemon=True).start()


def main(arguments, folder):
    """The exit code of torchrun with these arguments and our settings; `folder` is for what must go when it
    does.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from common.options import flag_in
    at = next((i for i, text in enumerate(arguments) if Path(text).name in ("train_ddp.py", "train_mp.py")), len(arguments))
    if at < len(arguments) and Path(arguments[at]).is_file():
        sys.argv = arguments[at:]
        check_options(arguments[at], count(arguments[:at]))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # What the command line says comes on top: torchrun would drop the environment's settings altogether.
    arguments = [text.replace("=", f"={os.environ['PET_RDZV_CONF']},", 1) if text.startswith(("--rdzv_conf=", "--rdzv-conf="))
                 else text for text in arguments[:at]] + arguments[at:]
    subprocess.Popen = Worker  # before torch takes it from there
    os.environ.setdefault("PET_LOG_DIR", folder)  # torchrun by itself leaves such a one at every start
    elsewhere = any(text.lstrip("-").startswith(MEETING) for text in arguments[:at])
    if not elsewhere and not {"PET_NNODES", "PET_RDZV_ENDPOINT", "PET_STANDALONE"} & set(os.environ):
        # On one machine the agent meets only itself: a file will do, where a port would be open to the
        # network.
        os.environ["PET_RDZV_CONF"] += ",store_type=file"
        return run(["--rdzv_backend=c10d", f"--rdzv_endpoint={folder}/rendezvous", f"--rdzv_id={uuid.uuid4()}",
                    "--local_addr=127.0.0.1", *arguments])
    address = address_towards(flag_in(arguments[:at], "rdzv_endpoint", os.environ))
    if address and not flag_in(arguments[:at], "local_addr", os.environ):
        arguments = [f"--local_addr={address}", *arguments]
    return run(arguments)


def address_towards(endpoint):
    """This machine's address on the way to HOST:PORT where its own name is a loopback, as Debian has it; or
    None.
    """
    host, _, port = (endpoint or "").rpartition(":")
    with contextlib.suppress(OSError):
        if not socket.gethostbyname(socket.getfqdn()).startswith("127."):
            return None
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        address = probe.getsockname()[0]
        return None if address.startswith("127.") else address


def count(arguments):
    """How many processes torchrun will start, or 0 where only torchrun knows: several machines, or as many as
    there are GPUs.
    """
    from common.options import flag_in
    each, nodes = (flag_in(arguments, name, os.environ) for name in ("nproc_per_node", "nnodes"))
    return int(each or 1) if nodes in (None, "1", "1:1") and (each or "1").isdecimal() else 0


def run(arguments):
    """torchrun; returns the exit code."""
    began = time.monotonic()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun
    if "LOGLEVEL" not in os.environ:
        for name in ("agent.server.api", "multiprocessing.api"):  # they report each signal they pass on
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.ERROR)
    try:
        torchrun(arguments)
        return 0
    except SignalException:
        return code_of_a_stop()
    except (ChildFailedError, RendezvousError) as error:
        if final := [code for code in codes() if code in FINAL]:
            return final[0]
        child = isinstance(error, ChildFailedError)
        print(error if child else f"error: {not_met(error, arguments, time.monotonic() - began)}", file=sys.stderr)
        return 1


def codes():
    """The exit codes of the newest life's workers, the last one first."""
    return [worker.returncode for worker in reversed(Worker.started)]


def code_of_a_stop():
    """What to leave with when asked to stop."""
    found = codes()
    if final := [code for code in found if code in FINAL]:
        return final[0]
    return STOPPED if STOPPED in found or -signal.SIGKILL not in found else 1  # killed: it never came to save


def not_met(error, arguments, seconds):
    """Why the machines did not find each other, in three lines."""
    from common.options import flag_in
    place, name = (flag_in(arguments, flag, os.environ) for flag in ("rdzv_endpoint", "rdzv_id"))
    match type(error).__name__:
        case "RendezvousClosedError":
            return (f"job {name} at {place} is over: it is complete, or a machine gave it up\n"
                    "       to train on, start all machines again with a new --rdzv_id")
        case "RendezvousTimeoutError":
            return (f"job {name} at {place}: too few machines came in {seconds:.0f} s\n"
                    "       are all started, with the same --rdzv_id, --rdzv_endpoint and --nnodes?")
    return (f"job {name}: no rendezvous at {place} in {seconds:.0f} s ({' '.join(str(error).split())[:100]})\n"
            "       does `python launch/store.py` run there? is the address one of that machine, not 127.0.1.1?\n"
            "       does a firewall stand between? then start it again")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="torchelastic_") as notes:
        leave_before_there_are_workers(notes)
        sys.exit(main(sys.argv[1:], notes))
