"""All that a ledger tells of a run: its lives from the first one on, and who died of what."""

from contextlib import suppress
from heapq import merge

from common.errors import UserError
from common.ledger import TIME, at_once, cut, is_whole, ledgers, named, parse


def read(path, name="event"):
    """Yield the objects of a file of JSON lines, if it is there, that have this name; no torn lines."""
    with suppress(FileNotFoundError), open(path, "rb", opener=at_once) as file:
        yield from filter(None, (parse(line, name) for line in file))


def lives_of(*run_dirs):
    """Return the lives in order. Each machine holds a part, maybe in a folder of its own: merged by time."""
    parts = [filter(is_whole, read(path)) for path in ledgers(*run_dirs)]
    lives = [*cut(merge(*parts, key=TIME))]
    if not lives:
        raise UserError(f"{run_dirs[0]} holds no life\nname the folder of a run that has begun training")
    return lives


def deaths_of(events, over):
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
