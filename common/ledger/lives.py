"""The lives of a run, as events of its ledger. No torch here."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import merge
from operator import itemgetter
from pathlib import Path

from common.ledger.ledger import Record, lines_back, parse

FIELDS = {  # without which an event is damaged, and left out like a torn line: a log stops no start
    "life": ("life", "world", "step"),
    "save": ("step",),
    "rescue": ("step", "rank"),
    "best": ("best",),
    "steps": ("step",),
    "left": ("rank", "stepped"),
    "error": ("rank", "why"),
    "death": ("rank", "why"),
}
TIME = itemgetter("t")
CLOCK = b'"event": "steps"'  # in the line of an entry of the clock, and in no other

Life = list[Record]  # its events in order; the first is named "life"


def newest_lives(run_dir: Path) -> Iterator[Life]:
    """Yield the lives, the newest one first; read the ledger from its end, as far as lives are asked for.

    Entries of the clock are left out, unless a file ends with one.
    """
    events = []
    for event in merge(*map(_back, ledgers(run_dir)), key=TIME, reverse=True):
        events.append(event)
        if event["event"] == "life":
            yield from cut(reversed(events))
            events = []


def ledgers(*run_dirs: Path) -> list[Path]:
    """Return the files of all machines that share these folders."""
    return [path for run_dir in run_dirs for path in sorted(run_dir.glob("ledger*.jsonl"))]


def _back(path):
    """Yield the events of a file, the newest one first."""
    at_end = True
    with suppress(OSError):  # what has its name is no file, or cannot be read: a log stops no start
        for _, line in lines_back(path):
            event = parse(line) if at_end or CLOCK not in line else None
            if event and is_whole(event):
                at_end = False
                yield event


def is_whole(event: Record) -> bool:
    """Return whether an event has what it needs."""
    return {"t", *FIELDS.get(str(event["event"]), ())} <= event.keys()


def cut(events: Iterable[Record]) -> Iterator[Life]:
    """Yield the lives of events.

    What a process writes after the next life has begun is left out, but for the refusal of a start: that is
    no life of its own, and ends the row of lives before it.
    """
    life = []
    for event in events:
        if event["event"] == "life":
            if life:
                yield life
            life = [event]
        elif life and (event.get("life", life[0]["life"]) == life[0]["life"] or event["event"] == "refused"):
            life.append(event)
    if life:
        yield life


def named(events: Iterable[Record], *names: str) -> list[Record]:
    return [event for event in events if event["event"] in names]
