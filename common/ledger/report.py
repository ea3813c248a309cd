"""Where the time of a run went, added up from the lives, saves and rescues in its ledger. No torch here."""
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from common.errors import UserError

# the parts of a gap that no event records
BETWEEN = ("detect_s", "tear_down_s", "rendezvous_s", "away_s", "down_s")


# ---- reading ----
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


def saved_step(events):
    """Return the last step that a checkpoint of this life is known to hold."""
    steps = [event.get("step") for event in events if event["event"] in ("life", "save", "rescue")]
    return max(step for step in steps if isinstance(step, int))


# ---- adding up ----
def summarize(run_dir: Path | str) -> dict[str, Any]:
    """Return lives, events and seconds by name, and goodput (None where no step was timed)."""
    lives = lives_of(run_dir)
    everything = [event for events in lives for event in events]
    wall = max(event.get("t", 0) for event in everything) - everything[0]["t"]
    seconds = _seconds(everything)
    gaps = [{}, *(gap(before, after) for before, after in zip(lives, lives[1:], strict=False))]
    for parts in gaps:
        seconds |= {name: seconds.get(name, 0) + value for name, value in parts.items() if name in BETWEEN}
    return {
        "lives": [{**events[0], "saved": saved_step(events), "seconds": _seconds(events), "gap": parts}
                  for events, parts in zip(lives, gaps, strict=True)],
        "step": max(saved_step(events) for events in lives),
        "events": dict(Counter(event["event"] for event in everything)),
        "seconds": seconds,
        "wall_s": wall,
        "goodput": seconds["steps_s"] / wall if wall > 0 and "steps_s" in seconds else None,
    }


def gap(before, after):
    """Return {part: seconds} of the time between two lives; the parts add up to the whole.

    `detect` begins with the last whole step, because the moment of a death is not known, and ends when the
    first survivor notices. `tear_down` ends when the last survivor has saved and left, `rendezvous` when the
    agent has started the next process. If no process survived, these three are one part, `away`. The time
    before a start by hand is `down`: that start is no restart.
    """
    match after[0]:
        case {"job": str(job), "began": int() | float() as began}:
            pass
        case _:
            return {}
    last = max(event["t"] for event in before if _is_number(event.get("t")))
    if before[0].get("job") != job:
        return {"down_s": began - last}
    lefts = [event for event in before if event["event"] == "left" and event.get("life") == before[0]["life"]
             and all(_is_number(event.get(name)) for name in ("t", "stepped", "noticed"))]
    parts = {"away_s": began - last}
    if lefts:
        stepped, gone = (max(event[name] for event in lefts) for name in ("stepped", "t"))
        noticed = max(stepped, min(event["noticed"] for event in lefts))
        parts = {"detect_s": noticed - stepped, "tear_down_s": gone - noticed, "rendezvous_s": began - gone}
    laps = _seconds(after[:1])
    first = [event["t"] for event in after if event["event"] == "first_step" and _is_number(event.get("t"))]
    return parts | laps | ({"first_step_s": first[0] - began - sum(laps.values())} if first else {})


def _seconds(events):
    total = Counter()
    for event in events:
        total.update({name: s for name, s in event.items() if name.endswith("_s") and _is_number(s)})
    return dict(total)


def _is_number(value):
    return isinstance(value, int | float)


# ---- in words ----
def report(run_dir):
    """Yield the lines of the goodput report."""
    facts = summarize(run_dir)
    events, goodput, gaps = facts["events"], facts["goodput"], [life["gap"] for life in facts["lives"]]
    yield f"{run_dir}: lives {events['life']}, last saved step {facts['step']}"
    for life in facts["lives"]:
        yield from _gap_in_words(life["gap"])
        own = {name: value for name, value in life["seconds"].items() if name not in life["gap"]}
        yield (f"  life {life['life']}  world {life['world']}  restart {life.get('restart', '?')}  "
               f"resumed at step {life['step']}, saved up to {life['saved']}  {_spell(own)}".rstrip())
    yield f"saves {events.get('save', 0)}, rescues {events.get('rescue', 0)}, {_count_restarts(gaps)}"
    yield f"wall {facts['wall_s']:.1f} s: {_spell(facts['seconds']) or 'no times were recorded'}"
    yield f"goodput {'unknown' if goodput is None else f'{goodput:.1%}'} (time in steps / wall)"


def _gap_in_words(parts):
    if "down_s" in parts:
        return [f"  down {parts['down_s']:.2f} s, then started again"]
    if not parts:
        return []
    end = "step to step" if "first_step_s" in parts else "no step was made"
    return [f"  restart of {sum(parts.values()):.2f} s, {end}: {_spell(parts)}"]


def _count_restarts(gaps):
    whole = [sum(parts.values()) for parts in gaps if "first_step_s" in parts]
    number = sum(bool(parts) and "down_s" not in parts for parts in gaps)
    return f"restarts {number}" + (f" (median {median(whole):.2f} s from step to step)" if whole else "")


def _spell(seconds):
    return ", ".join(f"{name[:-2].replace('_', ' ')} {value:.2f} s" for name, value in seconds.items())
