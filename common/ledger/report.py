"""Where the time of a run went: what the lives, saves and rescues in its ledger add up to. No torch here."""
import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median

from common.errors import UserError


def _saved(events):
    """Return the last step that a checkpoint of this life is known to hold."""
    steps = [event.get("step") for event in events if event["event"] in ("life", "save", "rescue")]
    return max(step for step in steps if isinstance(step, int))


def summarize(run_dir):
    """Return what the ledger tells: lives, events and seconds by name, and goodput (None where no step was
    timed).
    """
    lives = lives_of(run_dir)
    everything = [event for events in lives for event in events]
    wall, seconds = max(event.get("t", 0) for event in everything) - everything[0]["t"], _seconds(everything)
    gaps = [{}, *(gap(before, after) for before, after in zip(lives, lives[1:], strict=False))]
    for parts in gaps:
        seconds |= {name: seconds.get(name, 0) + value for name, value in parts.items() if name in BETWEEN}
    return {
        "lives": [{**events[0], "saved": _saved(events), "seconds": _seconds(events), "gap": parts}
                  for events, parts in zip(lives, gaps, strict=True)],
        "step": max(_saved(events) for events in lives),
        "events": dict(Counter(event["event"] for event in everything)),
        "seconds": seconds,
        "wall_s": wall,
        "goodput": seconds["steps_s"] / wall if wall > 0 and "steps_s" in seconds else None,
    }


def _seconds(events):
    total = Counter()
    for event in events:
        total.update({k: v for k, v in event.items() if k.endswith("_s") and isinstance(v, int | float)})
    return dict(total)


def report(run_dir):
    """Yield the lines of the goodput report."""
    facts = summarize(run_dir)
    events, goodput = facts["events"], facts["goodput"]
    yield f"{run_dir}: lives {events['life']}, last saved step {facts['step']}"
    for life in facts["lives"]:
        yield from in_words(life["gap"])
        own = {name: value for name, value in life["seconds"].items() if name not in life["gap"]}
        yield (f"  life {life['life']}  world {life['world']}  restart {life.get('restart', '?')}  "
               f"resumed at step {life['step']}, saved up to {life['saved']}  {spell(own)}".rstrip())
    yield f"saves {events.get('save', 0)}, rescues {events.get('rescue', 0)}, {counted([life['gap'] for life in facts['lives']])}"
    yield f"wall {facts['wall_s']:.1f} s: {spell(facts['seconds']) or 'no times were recorded'}"
    yield f"goodput {'unknown' if goodput is None else f'{goodput:.1%}'} (time in steps / wall)"


BETWEEN = ("detect_s", "tear_down_s", "rendezvous_s", "away_s", "down_s")  # what no event has a field for


def read(path):
    """Yield the objects of a file of JSON lines; a torn line is no line."""
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and "event" in record:
                    yield record


def lives_of(*run_dirs):
    """Return the lives in order, each a list of its events; the first of them is the one named "life".

    Nodes with folders of their own each tell a part: their events are merged by time.
    """
    paths = [path for run_dir in run_dirs if (path := Path(run_dir) / "ledger.jsonl").is_file()]
    if not paths:
        raise UserError(f"{Path(run_dirs[0]) / 'ledger.jsonl'} does not exist\nname the folder of a run that has begun training")
    everything, lives = [event for path in paths for event in read(path)], []
    if len(paths) > 1:
        everything.sort(key=lambda event: event.get("t", 0))
    for event in everything:
        match event:
            case {"event": "life", "life": str(), "world": int(), "step": int(), "t": int() | float()}:
                lives.append([])
            case {"event": "life"}:
                raise UserError(f"{paths[0]}: the event of a life lacks life, world, step or t\n{event}")
        if lives:
            lives[-1].append(event)
    if not lives:
        raise UserError(f"{paths[0]} tells of no life\nthe run was stopped before it began training")
    return lives


def gap(before, after):
    """{part: seconds} between two lives, each a list of the ledger's events; they add up to the whole.

    `detect` begins with the last whole step, as nobody sees the moment of a death, and ends when the first
    survivor knows; `tear_down` ends when the last one has saved and left, `rendezvous` when the agent has
    started the next process. A life without a survivor cannot tell these apart: they are `away`. What a
    person started is no restart: `down`.
    """
    match after[0]:
        case {"job": str(job), "began": int() | float() as began}:
            pass
        case _:
            return {}
    if before[0].get("job") != job:
        return {"down_s": began - _last(before)}
    lefts = [event for event in before if event["event"] == "left" and event.get("life") == before[0]["life"]
             and all(isinstance(event.get(name), int | float) for name in ("t", "stepped", "noticed"))]
    parts = {"away_s": began - _last(before)}
    if lefts:
        stepped, gone = (max(event[name] for event in lefts) for name in ("stepped", "t"))
        noticed = max(stepped, min(event["noticed"] for event in lefts))
        parts = {"detect_s": noticed - stepped, "tear_down_s": gone - noticed, "rendezvous_s": began - gone}
    laps = {name: value for name, value in after[0].items() if name.endswith("_s") and isinstance(value, int | float)}
    first = [event["t"] for event in after if event["event"] == "first_step" and isinstance(event.get("t"), int | float)]
    return parts | laps | ({"first_step_s": first[0] - began - sum(laps.values())} if first else {})


def in_words(parts):
    """The gap in words, or nothing."""
    if "down_s" in parts:
        return [f"  down {parts['down_s']:.2f} s, then started again"]
    if not parts:
        return []
    end = "step to step" if "first_step_s" in parts else "no step was made"
    return [f"  restart of {sum(parts.values()):.2f} s, {end}: {spell(parts)}"]


def counted(gaps):
    """How many restarts there were, and their median from step to step."""
    whole = [sum(parts.values()) for parts in gaps if "first_step_s" in parts]
    number = sum(bool(parts) and "down_s" not in parts for parts in gaps)
    return f"restarts {number}" + (f" (median {median(whole):.2f} s from step to step)" if whole else "")


def spell(seconds):
    return ", ".join(f"{name[:-2].replace('_', ' ')} {value:.2f} s" for name, value in seconds.items())


def _last(events):
    return max(event["t"] for event in events if isinstance(event.get("t"), int | float))


def planned(lives, steps, explain):
    """Yield (step, epoch, positions, n) of each step that should have been made, from what each life's first
    event says.

    Where a life found another number of samples than the one before, the epoch begins again. A run that took
    its first steps over from another folder goes on where it was told to; what came before is expected as if
    made here.
    """
    first, changes = lives[0], {}
    for life in lives:
        changes = {step: n for step, n in changes.items() if step <= life["step"]}  # others: steps undone
        last = [first["n"], *changes.values()][-1]
        if life.get("n", last) != last:
            changes.pop(life["step"], None)
            changes[life["step"]] = life["n"]
    n, batch, epoch, position = first["n"], first["global_batch_size"], 0, 0
    for step in range(steps):
        if step == first["step"] > 0:
            epoch, position = first["epoch"], first["position"]
        if position >= n:
            epoch, position = epoch + 1, 0
        if step in changes:
            n, position = changes[step], 0
            explain(f"after step {step}: epoch {epoch + 1} began again, with {n:,} samples")
        yield step + 1, epoch, range(position, min(position + batch, n)), n
        position += batch
