"""Accounts for a run from what its lives have left: how it is now, who died of what, where each second went,
and whether each sample was used once. No torch here, but for the audit.
"""

import math
import socket
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import heappop, heappush
from itertools import chain
from operator import itemgetter
from pathlib import Path

from common.errors import UserError
from common.ledger.ledger import Record, lines_back, parse, read
from common.place import began

STEPPING = ("data_wait", "steps", "evaluation", "save_stall")  # as Clock names them
BUCKETS = ("down", "start", *STEPPING, "redone", "rescue", "other")
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
CLOCK = b'"event": "steps"'  # in the line of an entry of the clock, and in no other
RECENT = 10  # entries of the clock that the rate is taken from
QUIET_SECONDS = 120.0  # of a run on other machines: then nobody here knows whether it trains
WALL_CLOCK_SECONDS = 60.0  # it may be set back so far while a run trains

Life = list[Record]  # its events in order; the first is named "life"


def lives_of(*run_dirs: Path) -> list[Life]:
    """Return the lives in order. Nodes with a run folder of their own each hold a part: merged by time."""
    return [*each_life(*run_dirs)]


def each_life(*run_dirs: Path) -> Iterator[Life]:
    """Yield what `lives_of` returns, one life at a time."""
    paths = [run_dir / "ledger.jsonl" for run_dir in run_dirs]
    events: Iterable[Record] = filter(_is_whole, chain.from_iterable(map(read, paths)))
    if len(paths) > 1:
        events = sorted(events, key=itemgetter("t"))
    life = None
    for life in _cut(events):
        yield life
    if not life:
        raise UserError(f"{paths[0]} holds no life\nname the folder of a run that has begun training")


def newest_lives(run_dir: Path) -> Iterator[Life]:
    """Yield the lives, the newest one first; reads the ledger from its end, as far as lives are asked for.

    Of the entries of its clock a life has the last one alone, if that is its last event.
    """
    events = []
    with suppress(OSError):  # what has its name is no file, or cannot be read: a log stops no start
        for _, line in lines_back(run_dir / "ledger.jsonl"):
            event = parse(line) if not events or CLOCK not in line else None
            if event and _is_whole(event):
                events.append(event)
                if event["event"] == "life":
                    yield from _cut(reversed(events))
                    events = []


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


# ---- deaths ---------------------------------------------------------------------------------------
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


# ---- seconds --------------------------------------------------------------------------------------
def summarize(run_dir: Path) -> Record:
    """Return how the run is now, its lives, deaths, saves, rescues, buckets, and goodput.

    The buckets add up to `wall_s`. Goodput is the share of the time in steps that the newest life builds on.
    """
    lives = []
    deaths = []
    told = []
    accounted = None
    for events in each_life(run_dir):
        if accounted is None:
            accounted = events[0]["began"]
        seconds = account(events, accounted)
        accounted += sum(seconds.values())
        reached = max(event["step"] for event in named(events, "life", "save", "rescue", "steps"))
        entries = [(entry["step"], entry.get("steps_s", 0.0)) for entry in named(events, "steps")]
        lives.append(events[0] | {"reached": reached, "buckets": seconds, "entries": entries})
        deaths.append(deaths_of(events, over=True))
        told += named(events, "save", "rescue", "best")
    deaths[-1] = deaths_of(events, over=False)
    kept = math.inf  # later lives make the steps after this one again
    for life in reversed(lives):
        seconds = life["buckets"]
        entries = life.pop("entries")
        seconds["steps"] = sum((s for step, s in entries if step <= kept), 0.0)
        seconds["redone"] = sum((s for step, s in entries if step > kept), 0.0)
        kept = min(kept, life["step"])
    buckets = {name: sum(life["buckets"][name] for life in lives) for name in BUCKETS}
    wall = sum(buckets.values())
    return {
        "version": 1,
        "now": now(lives, events, told),
        "lives": lives,
        "deaths": [*chain(*deaths)],
        "saves": named(told, "save"),
        "rescues": named(told, "rescue"),
        "buckets": buckets,
        "wall_s": wall,
        "goodput": buckets["steps"] / max(wall, 1e-9),
    }


def account(events, accounted):
    """Return {bucket: seconds} of a life from `accounted`, the end of the life before.

    Rank 0 has measured what lies between its first step and its last entry. The rest is "other".
    """
    began = max(accounted, events[0]["began"])
    opened = max(began, named(events, "life", "first_step")[-1]["t"])
    end = max(opened, *(event["t"] for event in events))
    seconds = dict.fromkeys(BUCKETS, 0.0) | {"down": began - accounted, "start": opened - began}
    for entry in named(events, "steps"):
        for bucket in STEPPING:
            seconds[bucket] += entry.get(f"{bucket}_s", 0.0)
    left = max(0.0, end - accounted - sum(seconds.values()))
    leaving = named(events, "left")
    if leaving:
        # an entry on the way out may hold a part of it
        seconds["rescue"] = min(left, end - leaving[-1]["stepped"])
    seconds["other"] = left - seconds["rescue"]
    return seconds


def now(lives, events, told):
    """How the run is: state, step, best, rate, ages of its last step and save, {rank: pid} if they live.

    `events` are those of the newest life, `told` the saves and best evaluations of all.

    The ledger hears of a step at most a minute late. Processes of another machine cannot be seen: what
    they have written last is then all that is known.
    """
    life = events[0]
    entries = named(events, "life", "steps")[-RECENT:]
    first = entries[0]
    last = entries[-1]
    # what a run begins with is as good as saved
    save = [lives[0], *named(told, "save", "rescue")][-1]
    heard_s = time.time() - max(event["t"] for event in events)
    ends = named(events, "stop", "done")
    pids = {} if ends else _running(life)
    if ends:
        last = last | {"step": ends[-1].get("step", last["step"])}
        state = ends[-1]["event"] if ends[-1].get("finished", True) else "stop"
    elif pids:
        state = "training"
    elif {*life["hosts"]} == {socket.gethostname()}:
        state = "dead"
    else:
        state = "training" if heard_s < QUIET_SECONDS else "silent"
    return {
        "state": state,
        "step": last["step"],
        "last_step_s": time.time() - last["t"],
        "steps_per_s": (last["step"] - first["step"]) / max(1e-3, last["t"] - first["t"]),
        "saved": save["step"],
        "last_save_s": time.time() - save["t"],
        "heard_s": heard_s,
        "starts": len(lives),
        "world": life["world"],
        "hosts": sorted({*life["hosts"]}),
        "pids": pids,
        "best": [{"best": {}}, *named(told, "best")][-1]["best"],
    }


def _running(life):
    """{rank: pid} of this machine's processes that live. One that began later has only the same number."""
    places = zip(life["pids"], life["hosts"], strict=True)
    local = {rank: pid for rank, (pid, host) in enumerate(places) if host == socket.gethostname()}
    latest = life["t"] + WALL_CLOCK_SECONDS
    return {rank: pid for rank, pid in local.items() if (began(pid) or math.inf) < latest}


# ---- samples --------------------------------------------------------------------------------------
def audit(*run_dirs: Path) -> Record:
    """Return missed and repeated samples, lost and redone steps, of the lives that lead to the last step.

    Lost: a rank had done the step, but the next life resumed before it. Redone: each time a step was made
    again. Missed: all ranks have notes of the step, and they lack the sample. A step that lacks samples where
    a rank has no note (a torn line, a life without --audit, another node's folder) is listed in "unproven",
    if there is one; steps with wrong samples are in "wrong". What is expected follows from (n, seed, global
    batch size) and the step's number, never from the notes.
    """
    from common.sampler import permute  # imports torch: other reports do without it

    lives = lives_of(*run_dirs)
    ids, whole, reached, counts = _follow(lives, [run_dir / "audit" for run_dir in run_dirs])
    if not reached or not ids:
        raise UserError(
            f"{run_dirs[0]} holds no audit of a finished step\ntrain with --audit, or Elastic(audit=True)"
        )
    for step, epoch, positions, samples in planned([life for life, *_ in lives], reached):
        trained = Counter(ids.get(step, ()))
        expected = Counter(permute(positions, samples, lives[0][0]["seed"], epoch).tolist())
        missed = (expected - trained).total()
        repeated = (trained - expected).total()
        if missed and step not in whole:
            counts.setdefault("unproven", []).append(step)
            missed = 0
        if missed or repeated:
            counts.setdefault("wrong", []).append(step)
        counts["missed"] += missed
        counts["repeated"] += repeated
    return counts


def _follow(lives, folders):
    """Return {step: the samples it was trained on}, the steps that all ranks noted, the last step, counts.

    A step that a later life has made again counts as that life made it.
    """
    ids = {}
    newest = []  # a heap of those steps, each as -step
    whole = set()
    made = Counter()  # how often each step was made
    reached = 0
    lost = 0
    for number, events in enumerate(lives):
        life = events[0]
        resumed = life["step"]
        lost += max(0, reached - resumed)
        while newest and -newest[0] > resumed:
            step = -heappop(newest)
            del ids[step]
            whole.discard(step)
        ranks = Counter()  # that noted each step
        ends = [event["step"] for event in named(events, "life", "save", "rescue")]
        for note in _notes_of(life, folders):
            step = note["step"]
            if note["event"] == "done":
                ends.append(step)
            else:
                ranks[step] += 1
                if step not in ids:
                    ids[step] = array("q")  # 8 bytes a sample
                    heappush(newest, -step)
                ids[step].extend(note["ids"])
        whole.update(step for step in ranks if ranks[step] >= life["world"])
        if events is not lives[-1]:
            # A process can die after its update and before its done-line, and a survivor can save that
            # update: a step that the next life resumes past was made too. Any other changed no model.
            ends += [step for step in ranks if step <= lives[number + 1][0]["step"]]
        reached = max(ends)
        made.update(range(resumed + 1, reached + 1))
    counts = {"missed": 0, "repeated": 0, "lost": lost, "redone": made.total() - len(made)}
    return ids, whole, reached, counts


def _notes_of(life, folders):
    for rank in range(life["world"]):
        for folder in folders:
            for note in read(folder / life["life"] / f"rank{rank}.jsonl", "step"):
                if note.get("event") == "done" or {"event", "ids"} <= note.keys():
                    yield note


def planned(lives, last):
    """Yield (step, epoch, positions, samples) of each step of an undisturbed run; `lives` are first events.

    If a life found another number of samples than the life before, the epoch begins again.
    """
    first = lives[0]
    samples = first["n"]
    epoch = first["epoch"]
    position = first["position"]
    sizes = {}  # {step: the number of samples after it}
    for life in lives:
        while sizes and next(reversed(sizes)) >= life["step"]:  # it was undone
            sizes.popitem()
        sizes[life["step"]] = life["n"]
    for step in range(first["step"], last):
        if position >= samples:
            epoch += 1
            position = 0
        if sizes.get(step, samples) != samples:
            samples = sizes[step]
            position = 0
        batch = range(position, min(position + first["global_batch_size"], samples))
        yield step + 1, epoch, batch, samples
        position = batch.stop
