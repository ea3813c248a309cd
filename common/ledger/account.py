"""Reads a ledger: how a run is now, its lives, who died of what, where each second went. No torch here."""
import math
import socket
import time
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.ledger.ledger import read
from common.options import end_of

LAPS = ("import", "join", "load", "restore")  # of a start, as Clock names them
STARTING = ("start", *LAPS)
STEPPING = ("data_wait", "steps", "evaluation", "save_stall")
BUCKETS = (*STARTING, *STEPPING, "rescue", "down", "redone", "other")

Event = dict[str, Any]
Life = list[Event]  # its events in order; the first is named "life"


def lives_of(*run_dirs: Path | str) -> list[Life]:
    """Return the lives in order. Nodes with a run folder of their own each hold a part: merged by time."""
    paths = [Path(run_dir) / "ledger.jsonl" for run_dir in run_dirs]
    events = [event for path in paths if path.is_file() for event in read(path)]
    if len(paths) > 1:
        events.sort(key=itemgetter("t"))
    lives: list[Life] = []
    for event in events:
        if event["event"] == "life":
            lives.append([])
        if lives:
            lives[-1].append(event)
    if not lives:
        raise UserError(f"{paths[0]} holds no life\nname the folder of a run that has begun training")
    return lives


def own(events: Life, *names: str) -> Life:
    """The events of these names, and of this very life: a process may write after the next one has begun."""
    life = events[0]["life"]
    return [event for event in events if event["event"] in names and event.get("life", life) == life]


def saved_step(events: Life) -> int:
    """Return the last step that a checkpoint of this life is known to hold."""
    return max(event["step"] for event in events if event["event"] in ("life", "save", "rescue"))


def reached_step(events: Life) -> int:
    return max([saved_step(events), *(entry["at"] for entry in own(events, "steps"))])


def newest_save(lives: list[Life]) -> Event:
    """The event of the newest save, or the first life: what it began with is as good as saved."""
    saves = [event for events in lives for event in events if event["event"] in ("save", "rescue")]
    return [lives[0][0], *saves][-1]


def deaths_of(events: Life, over: bool) -> list[Event]:
    """Return a dict per process that died, whoever was killed first: life, t, rank, host, pid, cause.

    A process has died if its agent or another process noted it, if it noted an error of its own, or if its
    life is over and it has not noted that it left.
    """
    life = events[0]
    left = {event["rank"] for event in own(events, "left")}
    causes: dict[int, Event] = {}
    if over and not own(events, "done"):
        gone = {"t": events[-1]["t"], "why": "ended without a word (killed, or its machine is gone)"}
        causes = {rank: gone for rank in range(life["world"]) if rank not in left}
    for event in own(events, "error"):
        causes[event["rank"]] = event
    for event in sorted(own(events, "death"), key=_is_of_an_agent):  # others see it, but not its signal
        if event["rank"] not in left or _is_of_an_agent(event):
            causes[event["rank"]] = event
    deaths = [{"life": life["life"], "t": event["t"], "rank": rank, "host": life["hosts"][rank],
               "pid": life["pids"][rank], "cause": event["why"]} for rank, event in causes.items()]
    return sorted(deaths, key=lambda death: ("killed" not in death["cause"], death["t"]))


def _is_of_an_agent(event):
    return "killed" in event["why"]


def account(lives: list[Life]) -> Iterator[Counter[str]]:
    """Yield {bucket: seconds} of each life, up to the start of the next one; together they are the wall time.

    A life has measured its parts itself. What nobody has measured is "other": mostly the steps since the last
    entry of a rank 0 that was killed.
    """
    accounted = lives[0][0]["began"]  # up to this moment
    for number, events in enumerate(lives):
        life = events[0]
        following = [other[0] for other in lives[number + 1:]]
        opened = max(accounted, own(events, "first_step", "life")[-1]["t"])
        seconds = _share(opened - accounted, {lap: life.get(f"{lap}_s", 0.0) for lap in LAPS}, "start")

        kept = min([other["step"] for other in following], default=math.inf)  # later steps are made again
        before = life["step"]
        spent: Counter[str] = Counter()
        for entry in own(events, "steps"):
            spent.update({bucket: entry.get(f"{bucket}_s", 0.0) for bucket in STEPPING})
            if entry["at"] > kept:
                share = 1 - max(0, kept - before) / max(1, entry["at"] - before)
                redone = share * entry.get("steps_s", 0.0)
                spent.update(steps=-redone, redone=redone)
            before = entry["at"]

        end = max(event["t"] for event in events if event.get("life", life["life"]) == life["life"])
        end = max(opened, end)
        lefts = own(events, "left")
        if lefts:  # an entry that was written on the way out has some of these seconds
            spent["rescue"] = end - max(event["stepped"] for event in lefts)
        seconds += _share(end - opened, spent, "other")
        accounted = end
        if following and (not lefts or following[0]["job"] != life["job"]):
            accounted = max(end, following[0]["began"])
            seconds["down"] = accounted - end
        yield +seconds


def _share(left, claims, rest):
    """Give each claim, in order, at most what is left of the seconds: no second is in two buckets."""
    seconds: Counter[str] = Counter()
    for bucket, claim in claims.items():
        seconds[bucket] = min(left, max(0.0, claim))
        left -= seconds[bucket]
    seconds[rest] = left
    return seconds


def summarize(run_dir: Path | str) -> dict[str, Any]:
    """Return how the run is now, its lives, deaths, counts of events, buckets, and goodput.

    The buckets add up to `wall_s`. Goodput is the share of the time in steps that the newest life builds on.
    """
    lives = lives_of(run_dir)
    buckets = Counter(dict.fromkeys(BUCKETS, 0.0))
    summaries = []
    ended = {}  # how the life before ended, in seconds
    for events, seconds in zip(lives, account(lives), strict=True):
        buckets.update(seconds)
        started = {name: seconds[name] for name in STARTING if seconds[name]}
        summaries.append(events[0] | {"reached": reached_step(events), "buckets": seconds,
                                      "gap": ended | started if summaries else {}})
        ended = {name: seconds[name] for name in ("rescue", "down") if seconds[name]}
    wall = buckets.total()
    return {
        "now": now(lives), "wall_s": wall, "goodput": buckets["steps"] / wall if wall else 0.0,
        "buckets": dict(buckets), "lives": summaries,
        "deaths": [death for events in lives for death in deaths_of(events, over=events is not lives[-1])],
        "events": Counter(event["event"] for events in lives for event in events)}


def now(lives: list[Life]) -> dict[str, Any]:
    """How the run is: state, step, rate, ages of the last step and save, pids of its ranks, and which live.

    The ledger hears of a step at most ten seconds late. Processes of another machine cannot be seen.
    """
    life = lives[-1][0]
    entries = [life | {"at": life["step"]}, *own(lives[-1], "steps")]
    last = entries[-1]
    before = next((entry for entry in reversed(entries) if entry["at"] < last["at"]), last)
    save = newest_save(lives)
    left = {event["rank"] for event in own(lives[-1], "left")}
    here = [rank for rank, host in enumerate(life["hosts"]) if host == socket.gethostname()]
    alive = [rank for rank in here if rank not in left and end_of(life["pids"][rank]) is None]
    state = "training" if alive or len(here) < life["world"] else "dead"
    for end in own(lives[-1], "stop", "done"):
        state = end["event"]
    return {
        "state": state, "step": last["at"], "last_step_s": time.time() - last["t"],
        "steps_per_s": (last["at"] - before["at"]) / max(1e-3, last["t"] - before["t"]),
        "saved": save["step"], "last_save_s": time.time() - save["t"], "world": life["world"],
        "pids": life["pids"], "alive": len(alive)}


def history(run_dir: Path | str, job: str, step: int) -> dict[str, Any]:
    """What the ledger tells of earlier lives; call it before the new life, which resumes at `step`, is noted.

    lives, deaths: how many. lost: steps that are made again. saved: (step, time) of the newest save.
    death: (who died in this job and who saved, in words; when the last step was made), or None.
    """
    try:
        lives = lives_of(run_dir)
        resumed = [*(events[0]["step"] for events in lives[1:]), step]
        lost = [max(0, reached_step(events) - at) for events, at in zip(lives, resumed, strict=True)]
        deaths = [deaths_of(events, over=True) for events in lives]
        save = newest_save(lives)
        same_job = lives[-1][0]["job"] == job
        return {"lives": len(lives), "deaths": sum(map(len, deaths)), "lost": sum(lost),
                "saved": (save["step"], save["t"]),
                "death": _in_words(lives[-1], deaths[-1]) if same_job and deaths[-1] else None}
    except Exception:  # none yet, or damaged: a log stops no training
        return {"lives": 0, "deaths": 0, "lost": 0, "saved": None, "death": None}


def _in_words(events, deaths):
    words = f"rank {deaths[0]['rank']} (pid {deaths[0]['pid']}) {deaths[0]['cause']}"
    if len(deaths) > 1:
        words += f" and {len(deaths) - 1} more"
    for rescue in own(events, "rescue")[-1:]:
        words += f"; step {rescue['step']} saved by rank {rescue['rank']}"
    moments = [event["stepped"] for event in own(events, "left")] or [event["t"] for event in events]
    return words, max(moments)


def report(facts: dict[str, Any]) -> Iterator[str]:
    """Yield lines that tell what `summarize` returned, first how the run is now."""
    state = facts["now"]
    save = f"step {state['saved']} saved {span(state['last_save_s'])} ago"
    yield (f"{state['state']} at step {state['step']}, {span(state['last_step_s'])} ago; {save}; "
           f"{state['steps_per_s']:.3g} steps/s; {state['alive']} of {state['world']} processes alive here")
    yield f"pids {' '.join(map(str, state['pids']))}"
    events = facts["events"]
    yield (f"lives {len(facts['lives'])}, deaths {len(facts['deaths'])}, saves {events['save']}, "
           f"rescues {events['rescue']}")
    for life in facts["lives"]:
        if life["gap"]:
            yield f"  restarted after {span(sum(life['gap'].values()))}: {_spell(life['gap'])}"
        yield (f"  life {life['life']}  world {life['world']}  steps {life['step']} to {life['reached']}  "
               f"{_spell(life['buckets'])}")
        for death in facts["deaths"]:
            if death["life"] == life["life"]:
                yield f"    rank {death['rank']} (pid {death['pid']} on {death['host']}) {death['cause']}"
    yield f"wall {span(facts['wall_s'])}: {_spell(facts['buckets'])}"
    yield f"goodput {facts['goodput']:.1%} (time in steps that are in the final model / wall)"


def _spell(seconds):
    return ", ".join(f"{name.replace('_', ' ')} {span(value)}" for name, value in seconds.items()
                     if value >= 0.005)


def span(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 600 else str(timedelta(seconds=round(seconds)))
