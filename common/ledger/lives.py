"""Reads a ledger: the lives of a run, what each saved, and who died of what. No torch here."""
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError


def read(path):
    """Yield the objects of a file of JSON lines; a torn line is skipped."""
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and "event" in record:
                    yield record


def lives_of(*run_dirs: Path | str) -> list[list[dict[str, Any]]]:
    """Return the lives in order, each a list of its events that begins with the one named "life".

    Nodes with a run folder of their own each hold a part: their events are merged by time.
    """
    paths = [path for run_dir in run_dirs if (path := Path(run_dir) / "ledger.jsonl").is_file()]
    if not paths:
        raise UserError(f"{Path(run_dirs[0]) / 'ledger.jsonl'} does not exist\n"
                        "name the folder of a run that has begun training")
    everything = [event for path in paths for event in read(path)]
    if len(paths) > 1:
        everything.sort(key=lambda event: event.get("t", 0))
    lives: list[list[dict[str, Any]]] = []
    for event in everything:
        match event:
            case {"event": "life", "life": str(), "world": int(), "step": int(), "t": int() | float()}:
                lives.append([])
            case {"event": "life"}:
                raise UserError(f"{paths[0]}: the event of a life lacks life, world, step or t\n{event}")
        if lives:
            lives[-1].append(event)
    if not lives:
        raise UserError(f"{paths[0]} holds no life\nthe run was stopped before it began training")
    return lives


def is_number(value):
    return isinstance(value, int | float) and math.isfinite(value)


def own(events, name, *fields):
    """The events of this name that this very life wrote and that have these fields as numbers."""
    life = events[0]["life"]
    return [event for event in events if event["event"] == name and event.get("life", life) == life
            and all(is_number(event.get(field)) for field in fields)]


def saved_step(events):
    """Return the last step that a checkpoint of this life is known to hold."""
    steps = [event.get("step") for event in events if event["event"] in ("life", "save", "rescue")]
    return max(step for step in steps if isinstance(step, int))


def deaths_of(lives):
    """Return a dict per process that died: life, t, rank, host, pid, cause, and the step its life saved."""
    return [death for events, following in zip(lives, [*lives[1:], None], strict=True)
            for death in _deaths(events, over=bool(following))]


def _deaths(events, over):
    """A process is dead if its agent or another process says so, or if it told of an error of its own.

    So is one that neither left nor was done although its life is over.
    """
    life, left = events[0], {event["rank"] for event in own(events, "left", "rank")}
    told = [event for event in own(events, "death", "rank")
            if event["rank"] not in left or "killed" in str(event.get("why"))]
    told = [*own(events, "error", "rank"), *told]
    told.sort(key=lambda event: "killed" not in str(event.get("why")))  # an agent knows better than a peer
    causes = {event["rank"]: event for event in reversed(told)}
    if over and "hosts" in life and not own(events, "done"):
        gone = {"t": events[-1].get("t"), "why": "ended without a word (killed, or its machine is gone)"}
        causes = dict.fromkeys(sorted(set(range(life["world"])) - left), gone) | causes
    return [{"life": life["life"], "t": event.get("t"), "rank": rank, "host": _at(life.get("hosts"), rank),
             "pid": _at(life.get("pids"), rank), "cause": str(event.get("why", "unknown")),
             "saved": saved_step(events)} for rank, event in causes.items()]


def _at(values, index):
    return values[index] if isinstance(values, list) and 0 <= index < len(values) else None


def last_death(events, job):
    """Return who ended this life and who saved it, in words, and when its last step was made.

    None if nobody died, or if the next life belongs to another job.
    """
    deaths = _deaths(events, over=True)
    if not deaths or events[0].get("job") != job:
        return None
    first, more = deaths[0], len(deaths) - 1
    words = f"rank {first['rank']} (pid {first['pid']}) {first['cause']}"
    words += f" and {more} more" if more else ""
    if saved := own(events, "rescue", "step", "rank"):
        words += f"; step {saved[-1]['step']} saved by rank {saved[-1]['rank']}"
    stepped = [event["stepped"] for event in own(events, "left", "stepped")]
    return words, max(stepped or [event["t"] for event in events if is_number(event.get("t"))])
