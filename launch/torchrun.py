"""torchrun with the settings that this project needs, for GPUs and several machines; options are torchrun's.

    python launch/torchrun.py --nproc_per_node=2 train_ddp.py
    python launch/torchrun.py --nnodes=1:4 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_id=JOB \\
        --rdzv_endpoint=HOST:29400 train_ddp.py --run-dir /shared/run    # on each of one to four machines

It refuses a wrong flag of the training before it starts a process, and returns the training's exit code,
where torchrun itself turns every code into 1. A signal before there are processes ends it at once, with 143.
Machines that cannot meet end with 1, for another try may succeed. `--check` as the first word only looks
whether the training could run (launch/doctor.py).
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

from patience import Patience
from warm import FINAL, STOP, STOPPED, check_options

SETTINGS = {
    # Each node counts its own and other nodes' failures, and the first node to run out ends the job for all.
    # The training itself stops after some lives without progress.
    "PET_MAX_RESTARTS": "1000000",
    # With one store for all restarts, workers on other nodes keep the address of a dead rank 0; and that
    # store listens on every network interface.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # A dead node is noticed after 6 seconds instead of 15, and a missing one waited for 3 instead of 30. The
    # nodes' clocks must differ by less than 6 seconds, or a live node counts as dead.
    "PET_RDZV_CONF": "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3",
    # Slurm's early warning also reaches the workers, which save; under nohup SIGHUP stays ignored.
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1" + (
        "" if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else ",SIGHUP"),
    "OMP_NUM_THREADS": "1",  # torchrun's own default, without its warning; --threads says otherwise
}
SILENCE_SECONDS = 20  # without workers: a message
MEETING = ("nnodes", "rdzv", "standalone", "master", "node")


class Worker(subprocess.Popen):
    """What torchrun starts its workers with; keeps those of the newest life, for their exit codes."""

    started = []
    starting = threading.RLock()  # held while one starts, so that this process does not exit without it

    def __init__(self, *args, **kwargs):
        with self.starting:
            super().__init__(*args, **kwargs)
            if kwargs.get("start_new_session"):
                self.started[:] = [worker for worker in self.started if worker.returncode is None] + [self]

    def alive(self):
        return [worker.pid for worker in self.started if worker.poll() is None]

    def wait(self, timeout=None):
        """torchrun gives workers 30 s to end, too few to save a large state: those that work get more."""
        if timeout and timeout > 1:
            patience = Patience(self.alive())
            while (alive := self.alive()) and patience.lasts(alive):
                time.sleep(0.05)
            timeout = 0.05
        return super().wait(timeout)


def leave_before_there_are_workers(folder):
    """Ends this process on a signal: torchrun handles signals only once its workers run."""
    def wait_for_a_signal():
        if not select.select([reader], [], [], SILENCE_SECONDS)[0] and not Worker.started:
            print(f"torchrun: nothing has met for {SILENCE_SECONDS} s: the rendezvous does not answer, "
                  "or machines are missing", file=sys.stderr, flush=True)
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
    """Runs torchrun with these arguments and our settings; returns its exit code. `folder` is temporary."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from common.options.environment import flag_in
    if arguments[:1] == ["--check"]:
        from doctor import main as look
        return look(arguments[1:])
    scripts = [i for i, text in enumerate(arguments) if Path(text).name in ("train_ddp.py", "train_mp.py")]
    at = scripts[0] if scripts else len(arguments)
    if at < len(arguments) and Path(arguments[at]).is_file():
        sys.argv = arguments[at:]
        check_options(arguments[at], count(arguments[:at]))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # The command line's settings are added to these: torchrun alone would drop those of the environment.
    conf = ("--rdzv_conf=", "--rdzv-conf=")
    arguments = [text.replace("=", f"={os.environ['PET_RDZV_CONF']},", 1) if text.startswith(conf) else text
                 for text in arguments[:at]] + arguments[at:]
    subprocess.Popen = Worker  # before torch takes it from there
    os.environ.setdefault("PET_LOG_DIR", folder)  # else torchrun leaves a folder behind at every start
    elsewhere = any(text.lstrip("-").startswith(MEETING) for text in arguments[:at])
    if not elsewhere and not {"PET_NNODES", "PET_RDZV_ENDPOINT", "PET_STANDALONE"} & set(os.environ):
        # On one machine the agent meets only itself: a file is enough, and no port is open to the network.
        os.environ["PET_RDZV_CONF"] += ",store_type=file"
        return run(["--rdzv_backend=c10d", f"--rdzv_endpoint={folder}/rendezvous",
                    f"--rdzv_id={uuid.uuid4()}", "--local_addr=127.0.0.1", *arguments])
    address = address_towards(flag_in(arguments[:at], "rdzv_endpoint", os.environ))
    if address and not flag_in(arguments[:at], "local_addr", os.environ):
        arguments = [f"--local_addr={address}", *arguments]
    return run(arguments)


def address_towards(endpoint):
    """This machine's address towards HOST:PORT if its own name is a loopback, as on Debian; else None."""
    host, _, port = (endpoint or "").rpartition(":")
    with contextlib.suppress(OSError):
        if not socket.gethostbyname(socket.getfqdn()).startswith("127."):
            return None
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        address = probe.getsockname()[0]
        return None if address.startswith("127.") else address


def count(arguments):
    """How many processes torchrun will start; 0 if only torchrun knows (several machines, one per GPU)."""
    from common.options.environment import flag_in
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
        seconds = time.monotonic() - began
        print(error if child else f"error: {not_met(error, arguments, seconds)}", file=sys.stderr)
        return 1


def codes():
    """The exit codes of the newest life's workers, the last one first."""
    return [worker.returncode for worker in reversed(Worker.started)]


def code_of_a_stop():
    """The exit code after a requested stop."""
    found = codes()
    if final := [code for code in found if code in FINAL]:
        return final[0]
    return STOPPED if STOPPED in found or -signal.SIGKILL not in found else 1  # killed: nothing was saved


def not_met(error, arguments, seconds):
    """Why the machines did not find each other, in three lines."""
    from common.options.environment import flag_in
    place, name = (flag_in(arguments, flag, os.environ) for flag in ("rdzv_endpoint", "rdzv_id"))
    match type(error).__name__:
        case "RendezvousClosedError":
            return (f"job {name} at {place} is over: it is complete, or a machine gave it up\n"
                    "       to train on, start all machines again with a new --rdzv_id")
        case "RendezvousTimeoutError":
            return (f"job {name} at {place}: too few machines came in {seconds:.0f} s\n"
                    "       are all started, with the same --rdzv_id, --rdzv_endpoint and --nnodes?")
    words = " ".join(str(error).split())[:100]
    return (f"job {name}: no rendezvous at {place} in {seconds:.0f} s ({words})\n"
            "       does `python launch/store.py` run there? "
            "is the address one of that machine, not 127.0.1.1?\n"
            "       does a firewall stand between? then start it again")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="torchelastic_") as notes:
        leave_before_there_are_workers(notes)
        sys.exit(main(sys.argv[1:], notes))
