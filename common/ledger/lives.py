"""The lives of a run, as events of its ledger: which there were, and who died of what. No torch here."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import merge
from operator import itemgetter
from pathlib import Path

from common.errors import UserError
from common.ledger.ledger import Record, lines_back, parse, read

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


def lives_of(*run_dirs: Path) -> list[Life]:
    """Return the lives in order. Each machine holds a part, maybe in a folder of its own: merged by time."""
    parts = [filter(_is_whole, read(path)) for path in _ledgers(*run_dirs)]
    lives = [*_cut(merge(*parts, key=TIME))]
    if not lives:
        raise UserError(f"{run_dirs[0]} holds no life\nname the folder of a run that has begun training")
    return lives


def newest_lives(run_dir: Path) -> Iterator[Life]:
    """Yield the lives, the newest one first; read the ledger from its end, as far as lives are asked for.

    Entries of the clock are left out, but for the last one of a file.
    """
    events = []
    for event in merge(*map(_back, _ledgers(run_dir)), key=TIME, reverse=True):
        events.append(event)
        if event["event"] == "life":
            yield from _cut(reversed(events))
            events = []


def _ledgers(*run_dirs):
    """Return the files of all machines that share these folders."""
    return [path for run_dir in run_dirs for path in sorted(run_dir.glob("ledger*.jsonl"))]


def _back(path):
    """Yield the events of a file, the newest one first."""
    newest = None
    with suppress(OSError):  # what has its name is no file, or cannot be read: a log stops no start
        for _, line in lines_back(path):
            event = None if newest and CLOCK in line else parse(line)
            if event and _is_whole(event):
                newest = newest or event
                yield event


def _is_whole(event):
    return {"t", *FIELDS.get(event["event"], ())} <= event.keys()


def _cut(events):
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


def deaths_of(events: Life, over: bool) -> list[Record]:
    """Return a dict per process that died: life, rank, host, pid, cause.

    A process has died if it was killed, if it noted an error, or if its life is over and it has not noted
    that it left.
    """
    life = events[0]
    left = {event["rank"] for event in named(events, "left")}
    causes = {}
    for note in named(events, "error", "death"):
        if note["event"] == "error" or note["rank"] not in left:
            causes.setdefault(note["rank"], note["why"])
    ended = over and not named(events, "done")
    deaths = []
    for rank, (host, pid) in enumerate(zip(life.get("hosts", ()), life.get("pids", ()), strict=False)):
        cause = causes.get(rank)
        if ended and rank not in left:
            cause = cause or "ended without a word (killed, or its machine is gone)"
        if cause:
            deaths.append({"life": life["life"], "rank": rank, "host": host, "pid": pid, "cause": cause})
    return deaths
