"""What a process does first, and what it reads of the agent above it. No torch here."""
import contextlib
import os
import re
import sys
from collections.abc import Iterable, Mapping

from common.errors import UserError, fill_closed_streams, say
from common.options.process import agent_pid, die_with_the_agent
from common.place import here


def begin_life() -> None:
    """Call first in every process; UserError if it cannot meet others.

    The file `start-RANK` tells launch/agent.py that this rank still waits for others.
    """
    fill_closed_streams()
    die_with_the_agent()
    try:
        place = here()
    except ValueError as error:
        raise UserError(str(error)) from None
    # torchrun silently merges two jobs with its default id at one endpoint, unless each node has its number.
    if place.agent == "none" and place.nodes > 1 and agents_flag("rdzv_backend") not in (None, "static"):
        raise UserError("torchrun on several machines without a run id would merge two jobs at one endpoint\n"
                        "add --rdzv_id=NAME to every torchrun, a name that no other job uses")
    if place.notes:
        with contextlib.suppress(OSError):
            (place.notes / f"start-{place.rank}").touch()


def life_is_open() -> None:
    """Call when this life is ready to train."""
    place = here()
    if place.notes:
        with contextlib.suppress(OSError):
            (place.notes / f"start-{place.rank}").unlink(missing_ok=True)


def agents_flag(name: str) -> str | None:
    """--NAME or PET_NAME of the agent above this process; None if it is not set or cannot be read."""
    words: list[str] = []
    with contextlib.suppress(OSError), open(f"/proc/{agent_pid()}/cmdline", errors="replace") as file:
        words = file.read().split("\0")
    return flag_in(words, name, os.environ)


def flag_in(arguments: Iterable[str], name: str, environ: Mapping[str, str]) -> str | None:
    """torchrun's --NAME as torchrun reads it: the last of these arguments, else the variable PET_NAME."""
    values = re.findall(rf"^--{name.replace('_', '[-_]')}[=\n](.*)$", "\n".join(arguments), re.MULTILINE)
    return values[-1] if values else environ.get(f"PET_{name.upper()}")


def warn_of_late_joins() -> None:
    """Warns that a machine which joins this job later waits for an address in vain, and all agents end.

    Plain torchrun gives the rendezvous' own store to the workers, and announces its address in the first
    round only. A worker cannot mend that: the agents fail before they start the next workers.
    """
    place = here()
    low, _, high = (agents_flag("nnodes") or "1").partition(":")
    if place.agent_store and place.rank == 0 and high not in ("", low):
        say("warning: a machine that joins this job later will end it: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for every torchrun, or use launch/torchrun.py", sys.stderr)
