"""Reads a ledger: the lives of a run, who died of what, and the bucket of every second. No torch here."""
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UserError

BUCKETS = ("start", "import", "rendezvous", "load", "restore", "data_wait", "steps", "evaluation",
           "save_stall", "rescue", "detection", "down", "redone")  # "other" if a clock was set
LAPS = {"import_s": "import", "join_s": "rendezvous", "load_s": "load", "restore_s": "restore"}
SPENT = {f"{name}_s": name for name in ("data_wait", "steps", "evaluation", "save_stall")}
MOST = 1e13  # seconds, or steps
ENDING, STARTING = ("detection", "rescue", "down"), ("start", "import", "rendezvous", "load", "restore")


def summarize(run_dir: Path | str) -> dict[str, Any]:
    """Return lives, deaths, counts of events, buckets, and goodput (None if no step was timed).

    The buckets add up to `wall_s`. Goodput is the share of the time in steps that the newest life builds on.
    """
    lives = lives_of(run_dir)
    accounts = list(account(lives))
    buckets = dict.fromkeys(BUCKETS, 0.0) | sum(accounts, Counter())
    wall, told = sum(buckets.values()), []
    for number, (events, spent) in enumerate(zip(lives, accounts, strict=True)):
        before = accounts[number - 1] if number else {}
        told.append({
            **events[0], "saved": saved_step(events), "buckets": spent,
            "gap": {name: parts[name] for names, parts in ((ENDING, before), (STARTING, spent))
                    for name in names if number and parts.get(name)},  # since the life before
            "again": bool(number) and events[0].get("job") == lives[number - 1][0].get("job"),
            **{kind: [event["rank"] for event in own(events, kind, "rank")]
               for kind in ("hang", "straggler")}})
    deaths = [death for events in lives for death in deaths_of(events, over=events is not lives[-1])]
    return {
        "lives": told, "deaths": deaths, "step": max(saved_step(events) for events in lives),
        "events": dict(Counter(event["event"] for events in lives for event in events)),
        "buckets": buckets, "wall_s": wall,
        "goodput": buckets["steps"] / wall if wall > 0 and buckets["steps"] else None}


def history(run_dir: Path | str, job: str, step: int, began: float) -> dict[str, Any]:
    """What the ledger tells of earlier lives; call it before the new life, which resumes at `step`, is noted.

    lives: how many. lost: steps that are made again. past: (their seconds in steps, all their seconds).
    death: see `last_death`. saved: (step, time) of the newest save, or None.
    """
    lives: list[list[dict[str, Any]]] = []
    with suppress(UserError, OSError):
        lives = lives_of(run_dir)
    this = {"event": "life", "life": "", "world": 0, "step": step, "t": began, "began": began, "job": job}
    spent = sum(account([*lives, [this]]), Counter())
    reached = [max([saved_step(events), *(event["at"] for event in own(events, "steps", "at"))])
               for events in lives]
    resumed = [*(events[0]["step"] for events in lives[1:]), step]
    saves = [(event["step"], event["t"]) for events in lives for name in ("save", "rescue")
             for event in own(events, name, "step", "t")]
    return {
        "lives": len(lives), "death": last_death(lives[-1], job) if lives else None,
        "lost": sum(max(0, was - at) for was, at in zip(reached, resumed, strict=False)),
        "past": (spent["steps"], spent.total()), "saved": saves[-1] if saves else None}


def account(lives):
    """Yield {bucket: seconds} of each life, up to the start of the next one.

    A life is cut at moments that follow each other, so no second is lost or counted twice, whatever is in
    the ledger. A moment that lies before the one before it (a clock was set) makes a piece of no length.
    """
    pieces = None
    for number, events in enumerate(lives):
        later = [other[0] for other in lives[number + 1:]]
        pieces = _Pieces(pieces.end if pieces else _began(events[0]))
        kept = min((other["step"] for other in later), default=None)
        _cut(pieces, events, kept, later[0] if later else None)
        yield pieces.seconds


def _began(life):
    return life["began"] if is_number(life.get("began")) else life["t"]


class _Pieces:
    """Seconds by bucket, cut from a time line that only goes forward."""

    def __init__(self, start):
        self.end, self.seconds = start, Counter()

    def until(self, moment, rest, claims=()):
        """The time up to `moment`: to the claims {bucket: seconds}, scaled if too many, and the `rest`."""
        length, claims = max(0.0, moment - self.end), {k: max(0.0, v) for k, v in dict(claims).items()}
        total = sum(claims.values())
        scale = min(1.0, length / total) if total else 0.0
        for name, seconds in claims.items():
            self.seconds[name] += seconds * scale
        self.seconds[rest] += max(0.0, length - total * scale)
        self.end = max(self.end, moment)


def _cut(pieces, events, kept, following):
    """Cuts one life; what follows its last process is `down`, or the start of a life of the same job."""
    life, entries, timed = events[0], own(events, "steps", "t"), own(events, "steps", "t", "at", "steps_s")
    lefts, first = own(events, "left", "t", "stepped", "noticed"), own(events, "first_step", "t", "step")
    laps = {name: life[lap] for lap, name in LAPS.items() if is_number(life.get(lap))}
    pieces.until(life["t"], "start", laps)
    stepped = max((event["stepped"] for event in lefts), default=0)
    noticed = min((event["noticed"] for event in lefts), default=0)
    reached, inside = first[0]["step"] if first else life["step"], False
    if first:
        made = max((entry["at"] for entry in timed), default=reached) - reached
        each = sum(entry["steps_s"] for entry in timed) / max(1, made)  # the first step also warmed up
        pieces.until(first[0]["t"], "start", _of_steps(each, reached - 1, reached, kept))
    elif not entries:
        pieces.until(max(stepped, noticed), "start")
    for entry in entries:
        at = entry["at"] if is_number(entry.get("at")) else reached
        spent = {name: entry[key] for key, name in SPENT.items() if is_number(entry.get(key))}
        pieces.until(entry["t"], "other", spent | _of_steps(spent.pop("steps", 0), reached, at, kept))
        reached, inside = max(reached, at), entry.get("then") == "evaluation"
    if lefts:
        pieces.until(stepped, "steps" if kept is None or kept > reached else "redone")
        pieces.until(noticed, "evaluation" if inside else "detection")
        pieces.until(max(event["t"] for event in lefts), "rescue")
    pieces.until(max((event["t"] for event in own(events, "done", "t")), default=0), "save_stall")
    if following is None:
        end = max(event["t"] for event in events if is_number(event.get("t")))
        pieces.until(end, "rescue" if lefts else "evaluation" if inside else "steps" if entries else "start")
    elif not lefts or following.get("job") != life.get("job"):
        pieces.until(_began(following), "down")


def _of_steps(seconds, first, last, kept):
    """{bucket: seconds} of the steps after `first` up to `last`, of which the next lives keep `kept`."""
    share = 1.0 if kept is None or kept >= last else max(0.0, (kept - first) / max(1, last - first))
    return {"steps": seconds * share, "redone": seconds * (1 - share)}


def read(path, name="event", torn=None):
    """Yield the objects of a file of JSON lines that have this name; for a torn line `torn`, or nothing."""
    with open(path, "rb") as file:
        for line in file:
            record = torn
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                record = found if isinstance(found, dict) and name in found else torn
            if record is not None:
                yield record


def lives_of(*run_dirs: Path | str) -> list[list[dict[str, Any]]]:
    """Return the lives in order, each a list of its events that begins with the one named "life".

    Nodes with a run folder of their own each hold a part: their events are merged by time.
    """
    paths = [path for run_dir in run_dirs if (path := Path(run_dir) / "ledger.jsonl").is_file()]
    if not paths:
        raise UserError(f"{Path(run_dirs[0]) / 'ledger.jsonl'} does not exist\n"
                        "name the folder of a run that has begun training")
    everything = [event for path in paths for event in read(path) if isinstance(event["event"], str)]
    if len(paths) > 1:
        everything.sort(key=lambda event: event["t"] if is_number(event.get("t")) else 0)
    lives: list[list[dict[str, Any]]] = []
    for event in everything:
        match event:
            case {"event": "life", "life": str(), "world": int(world), "step": int(step), "t": t} \
                    if 0 < world < 2**20 and step >= 0 and is_number(step) and is_number(t):
                event = {name: value for name, value in event.items() if is_fact(name, value)}
                lives.append([])
            case {"event": "life"}:
                raise UserError(f"{paths[0]}: the event of a life lacks life, world, step or t\n{event}")
        if lives:
            lives[-1].append(event)
    if not lives:
        raise UserError(f"{paths[0]} holds no life\nthe run was stopped before it began training")
    return lives


def is_fact(name, value):
    """Whether a life may say this; what a damaged line says besides counts as not there."""
    if name in ("n", "global_batch_size", "stages"):
        return type(value) is int and 0 < value < MOST
    kinds = {"seed": int, "epoch": int, "position": int, "order": str, "data": str, "options": dict,
             "hosts": list, "pids": list}
    return isinstance(value, kinds.get(name, object))


def is_number(value):
    """Whether it is one that a run can reach: a damaged line may hold any."""
    return isinstance(value, int | float) and abs(value) < MOST


def own(events, name, *fields):
    """The events of this name that this very life wrote and that have these fields as numbers."""
    life = events[0]["life"]
    return [event for event in events if event["event"] == name and event.get("life", life) == life
            and all(is_number(event.get(field)) for field in fields)]


def saved_step(events):
    """Return the last step that a checkpoint of this life is known to hold."""
    steps = [event.get("step") for event in events if event["event"] in ("life", "save", "rescue")]
    return max(step for step in steps if isinstance(step, int) and is_number(step))


def deaths_of(events, over):
    """Return a dict per process that died: life, t, rank, host, pid, cause, and the step its life saved.

    A process has died if its agent or another process says so, if it noted an error of its own, or if its
    life is over without a note that it has left.
    """
    life, left = events[0], {event["rank"] for event in own(events, "left", "rank")}
    told = [event for event in own(events, "death", "rank")
            if event["rank"] not in left or "killed" in str(event.get("why"))]
    told = [*own(events, "error", "rank"), *told]
    told.sort(key=lambda event: "killed" not in str(event.get("why")))  # an agent sees more than a peer
    causes = {event["rank"]: event for event in reversed(told)}
    if over and "hosts" in life and not own(events, "done"):
        gone = {"t": events[-1].get("t"), "why": "ended without a word (killed, or its machine is gone)"}
        causes = dict.fromkeys(sorted(set(range(life["world"])) - left), gone) | causes
    hosts, pids = (dict(enumerate(life.get(name, []))) for name in ("hosts", "pids"))
    return [{"life": life["life"], "t": event.get("t"), "rank": rank, "host": hosts.get(rank),
             "pid": pids.get(rank), "cause": str(event.get("why", "unknown")),
             "saved": saved_step(events)} for rank, event in causes.items()]


def last_death(events, job):
    """Return (which process died and which one saved, in words; when the last step was made).

    None if no process died, or if the next life belongs to another job.
    """
    deaths = deaths_of(events, over=True)
    if not deaths or events[0].get("job") != job:
        return None
    first, more = deaths[0], len(deaths) - 1
    words = f"rank {first['rank']} (pid {first['pid']}) {first['cause']}"
    words += f" and {more} more" if more else ""
    if saved := own(events, "rescue", "step", "rank"):
        words += f"; step {saved[-1]['step']} saved by rank {saved[-1]['rank']}"
    stepped = [event["stepped"] for event in own(events, "left", "stepped")]
    return words, max(stepped or [event["t"] for event in events if is_number(event.get("t"))])
