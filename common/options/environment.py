"""The variables that torchrun, Slurm or a person sets, checked without torch.

torch answers most of these mistakes with a traceback, or waits half an hour for a rank that cannot come.
"""
import contextlib
import ipaddress
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.errors import UserError, fill_closed_streams, refuse, say
from common.options.process import die_with_the_agent

SMALLEST = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "GROUP_RANK": 0}
DEVICE = re.compile(r"-?\d+|(GPU|MIG)-[\w/-]+|NoDevFiles")  # the last is Slurm's word for none
FAILED_STARTS = 5        # lives in a row that end before they train
RESOLVE_SECONDS = 3      # without a network a resolver may take minutes
LATE_SECONDS = 60        # in Kubernetes, where the name of a new pod comes late


def check_environment(environ):
    """Raises UserError for variables with which the processes could not meet."""
    numbers = {name: _number(environ, name, low) for name, low in SMALLEST.items() if name in environ}
    size, rank = numbers.get("WORLD_SIZE"), numbers.get("RANK")
    alone, size, local_rank = size is None, size or 1, numbers.get("LOCAL_RANK", 0)
    local_size = numbers.get("LOCAL_WORLD_SIZE", size)
    refuse(
        (alone and rank is not None,
         f"RANK={rank} is set, but WORLD_SIZE is not\nset both, or neither for a single process"),
        (size > 1 and rank is None,
         f"WORLD_SIZE={size} is set, but RANK is not\n"
         "start with torchrun, or give each process its own RANK"),
        ((rank or 0) >= size, f"RANK={rank} with WORLD_SIZE={size}: ranks go from 0 to {size - 1}\n"
         "lower RANK, or raise WORLD_SIZE"),
        (local_size > size, f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={size}\n"
         "it counts the processes of this machine only"),
        (local_rank >= local_size, f"LOCAL_RANK={local_rank} with {local_size} processes on this machine\n"
         f"local ranks go from 0 to {local_size - 1}; set LOCAL_WORLD_SIZE if that is too few"))
    if size > 1:  # a single process needs no address, and Kubernetes may set MASTER_PORT=tcp://... by itself
        _check_meeting_point(environ, size)
    threads, devices = environ.get("OMP_NUM_THREADS", "1"), environ.get("CUDA_VISIBLE_DEVICES", "")
    refuse(
        (not re.fullmatch(r"\s*0*[1-9]\d*\s*(,\s*0*[1-9]\d*\s*)*", threads),
         f"OMP_NUM_THREADS={threads!r} is not a whole number from 1\n"
         "unset it, or set how many cores one process may use"),
        (devices.strip() and not all(DEVICE.fullmatch(name.strip()) for name in devices.split(",")),
         f"CUDA_VISIBLE_DEVICES={devices!r} is not a list of GPUs\n"
         "numbers like 0,2 or names like GPU-8f2c...; empty hides all GPUs"))


def _number(environ, name, low):
    text = environ[name]
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or int(text) < low:
        raise UserError(f"{name}={text!r} is not a whole number from {low}\n"
                        "unset it, or start with torchrun, which sets it")
    return int(text)


def _check_meeting_point(environ, size):
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port)):
        if not value:
            raise UserError(f"WORLD_SIZE={size} is set, but {name} is not\n"
                            "start with torchrun, or set MASTER_ADDR and MASTER_PORT to where rank 0 listens")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise UserError(f"MASTER_PORT={port!r} is not a port\n"
                        "take a free one from 1024 to 65535, the same for every rank")
    # torchrun silently merges two jobs with its default id at one endpoint, unless each node has its number.
    if (environ.get("TORCHELASTIC_RUN_ID") == "none" and environ.get("GROUP_WORLD_SIZE", "1") != "1"
            and agents_flag("rdzv_backend", environ) not in (None, "static")):
        raise UserError("torchrun on several machines without a run id would merge two jobs at one endpoint\n"
                        "add --rdzv_id=NAME to every torchrun, a name that no other job uses")
    late = "KUBERNETES_SERVICE_HOST" in environ
    _resolve(host, LATE_SECONDS if late else RESOLVE_SECONDS, again=late)


def _resolve(host, seconds, again):
    if host in ("localhost", socket.gethostname()):
        return
    with contextlib.suppress(ValueError):  # a name
        if (address := ipaddress.ip_address(host.partition("%")[0])).is_loopback:
            _reach_itself(address)
        return
    answer, end = [], time.monotonic() + seconds

    def look_up():
        while not answer:
            try:
                socket.getaddrinfo(host, None)
                answer.append("")
            except (OSError, UnicodeError) as error:
                if not again or time.monotonic() > end:
                    answer.append(f" ({getattr(error, 'strerror', None) or error})")
                time.sleep(0.2 if again else 0)

    resolver = threading.Thread(target=look_up, daemon=True)  # getaddrinfo itself has no time-out
    resolver.start()
    resolver.join(seconds)
    problem = answer[0] if answer else f" within {seconds} s"
    if problem:
        raise UserError(f"MASTER_ADDR={host!r} cannot be resolved{problem}\n"
                        "set it to a name or an address of rank 0's machine", code=1 if again else 2)


def _reach_itself(address):
    """In a sandbox the loopback interface may be down: torch would try to connect for ten minutes."""
    try:
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # sends nothing
    except OSError as error:
        raise UserError(f"MASTER_ADDR={address}: this machine does not reach itself ({error.strerror})\n"
                        "ip link set lo up; has lo that address (ip address show lo)?") from None


def end_a_crash_loop(notes, life):
    """UserError once FAILED_STARTS lives in a row have ended before they trained; from the third on, a delay.

    An agent would restart them for ever. It counts its restarts, and `life_is_open` writes the number of the
    life beside the agent's logs, which end with the agent: each machine judges its own lives. Failures of
    a life that trains are in the ledger.
    """
    try:
        opened = int((notes / "open").read_text())
    except (OSError, ValueError):
        opened = -1
    failed = life - opened - 1
    if failed >= FAILED_STARTS:
        why = _why_it_ended(notes / f"attempt_{life - 1}")
        raise UserError(f"{failed} lives in a row ended before they could train; {why}\n"
                        "mend the cause, then start again", code=5)
    if failed > 1:
        time.sleep(min(30, 2 ** (failed - 3)))


def begin_life(environ: Mapping[str, str] = os.environ) -> None:
    """Call first in every process; UserError if it cannot meet others, or has failed too often.

    The file `start-RANK` tells launch/meeting.py that this rank still waits for others.
    """
    fill_closed_streams()
    die_with_the_agent()
    check_environment(environ)
    if notes := _notes(environ):
        end_a_crash_loop(notes, int(environ["TORCHELASTIC_RESTART_COUNT"]))
        with contextlib.suppress(OSError):
            (notes / f"start-{environ['RANK']}").touch()


def life_is_open(environ: Mapping[str, str] = os.environ) -> None:
    """Call when this life is ready to train: failed starts before it no longer count."""
    if notes := _notes(environ):
        with contextlib.suppress(OSError):
            (notes / f"start-{environ['RANK']}").unlink(missing_ok=True)
            if environ["LOCAL_RANK"] == "0":
                (notes / "open").write_text(environ["TORCHELASTIC_RESTART_COUNT"])


def _notes(environ):
    """The folder in which an agent keeps each rank's error, as attempt_N/RANK/; None without an agent."""
    path = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    return path.parents[2] if path.match(f"attempt_{environ.get('TORCHELASTIC_RESTART_COUNT')}/*/*") else None


def _why_it_ended(attempt):
    """The last error of a rank, in words; errors that only follow from another rank's end do not count."""
    for path in sorted(attempt.glob("*/error.json*")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            words = " ".join(json.loads(path.read_text())["message"]["message"].split())[:200]
            if not words.startswith(("DistNetworkError", "DistStoreError")) and "by peer" not in words:
                return f"the last error: {words}"
    return "no error was noted (killed? out of memory?)"


def agents_flag(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """--NAME or PET_NAME of the agent above this process; None if it is not set or cannot be read."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", encoding="utf-8", errors="replace") as file:
            return flag_in(file.read().split("\0"), name, environ)
    except OSError:
        return flag_in((), name, environ)


def flag_in(arguments: Iterable[str], name: str, environ: Mapping[str, str]) -> str | None:
    """torchrun's --NAME as torchrun reads it: the last of these arguments, else the variable PET_NAME."""
    found = re.findall(rf"^--{name.replace('_', '[-_]')}[=\n](.*)$", "\n".join(arguments), re.MULTILINE)
    return found[-1] if found else environ.get(f"PET_{name.upper()}")


def warn_of_late_joins():
    """Warns that a machine which joins this job later waits for an address in vain, and all agents end.

    Plain torchrun gives the rendezvous' own store to the workers, and announces its address in the first
    round only. A worker cannot mend that: the agents fail before they start the next workers.
    """
    low, _, high = (agents_flag("nnodes") or "1").partition(":")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("RANK") == "0" and high not in ("", low):
        say("warning: a machine that joins this job later will end it: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun, or use launch/torchrun.py", sys.stderr)
