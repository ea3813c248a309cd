"""Reports how a run is, and where its time and its samples went.

python -m common.ledger RUN              how it is now; lives, deaths, saves, rescues, goodput
python -m common.ledger RUN --pid RANK   the process of that rank, if it lives on this machine
python -m common.ledger RUN --json       the same as one object, for programs
python -m common.ledger RUN --html FILE  curves and lives as a page that needs no server
python -m common.ledger RUN --audit      missed 0 repeated 0 lost 0 redone 0 (samples, then steps)
python -m common.ledger RUN RUN2 ...     of several runs a row each: how it is, its best, what differs
"""

import argparse
import json
import math
import socket
import time
from collections import defaultdict
from datetime import timedelta
from itertools import chain, pairwise
from pathlib import Path
from statistics import median

from common.errors import CONTROL, UserError
from common.extras.audit import audit
from common.extras.command import run_command
from common.extras.lives import deaths_of, each_life, read
from common.ledger import Record, named
from common.options import read_options
from common.place import start_of

MOST_ROWS = 4000  # in a page
STEPPING = ("data_wait", "steps", "evaluation", "save_stall")  # as Clock names them
BUCKETS = ("down", "start", *STEPPING, "redone", "rescue", "other")
RECENT = 10  # entries of the clock that the rate and the slow rank are taken from
SLOW_TIMES = 1.2  # the median: from there on a rank is named
RUNNING = {"training", "silent", "dead"}  # states of a run that has not ended well
QUIET_SECONDS = 120.0  # of a run on other machines: then nobody here knows whether it trains


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m common.ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="a run; with --audit also its other nodes' folders"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--pid", type=int, metavar="RANK", help="print the process of this rank, if it lives")
    form.add_argument("--json", action="store_true", help="print one object for programs")
    form.add_argument("--html", type=Path, metavar="FILE", help="write a page with curves, deaths and lives")
    form.add_argument(
        "--audit",
        action="store_true",
        help="compare the samples trained on with those that "
        "an undisturbed run would have used; exit code 1 if one is missed or repeated",
    )
    args = parser.parse_args(argv)
    return run_command(lambda: show(args), f"{args.runs[0]} cannot be read")


def show(args):
    """Print or write what was asked for; returns the exit code."""
    run = args.runs[0]
    if args.audit:
        return print_audit(args.runs)
    if args.html and len(args.runs) > 1:
        raise UserError(f"--html {args.html}: {len(args.runs)} runs\na page shows one run")
    runs = {run: summarize(run) for run in args.runs}
    if args.pid is not None:
        print(pid_of(args.pid, runs[run]["now"]))
        return 0
    if args.html:
        args.html.write_text(page(run, runs[run]), encoding="utf-8")
    elif args.json:
        for run, facts in runs.items():
            print(json.dumps({"run": str(run)} | facts))
    elif len(runs) > 1:
        print("\n".join(rows(runs)).translate(CONTROL))
    else:
        print(f"{run}: {chr(10).join(report(runs[run]))}".translate(CONTROL))
    return 0


def pid_of(rank, state):
    """Return the process of a rank of the newest life."""
    if rank not in state["pids"]:
        alive = ", ".join(map(str, state["pids"])) or "none"
        raise UserError(f"rank {rank} does not run on this machine ({state['state']})\nranks here: {alive}")
    return state["pids"][rank]


def rows(runs):
    """Yield a line a run: how it is now, its best evaluation, and the options in which the runs differ."""
    options = {run: read_options(run) for run in runs}
    for run, facts in runs.items():
        state = facts["now"]
        best = state["best"]
        words = [f"{run}: {state['state']} at step {state['step']}"]
        for name in best.keys() - {"loss", "step"}:
            words.append(f"best {name} {best[name]:.4f} at step {best['step']}")
        for name, value in options[run].items():
            differs = any(other.get(name) != value for other in options.values())
            if differs and name != "run_dir":
                words.append(f"{name} {value}")
        yield "  ".join(words)


def report(facts):
    """Yield lines, first how the run is now."""
    state = facts["now"]
    yield (
        f"{state['state']} at step {state['step']}, {span(state['last_step_s'])} ago; "
        f"step {state['saved']} saved {span(state['last_save_s'])} ago; "
        f"{state['steps_per_s']:.3g} steps/s; "
        f"{len(state['pids'])} of {state['world']} processes alive here"
    )
    if state["state"] == "silent":
        yield f"last heard of {span(state['heard_s'])} ago, from {', '.join(state['hosts'])}: look there"
    if state["pids"]:
        yield f"pids {' '.join(map(str, state['pids'].values()))}"
    if state["slow"]:
        yield "rank {rank} on {host}: {times:.1f} x the median".format(**state["slow"])
    yield (
        f"lives {len(facts['lives'])}, deaths {len(facts['deaths'])}, saves {len(facts['saves'])}, "
        f"rescues {len(facts['rescues'])}"
    )
    deaths = defaultdict(list)
    for death in facts["deaths"]:
        deaths[death["life"]].append("    rank {rank} (pid {pid} on {host}) {cause}".format(**death))
    for life in facts["lives"]:
        yield (
            f"  life {life['life']}  world {life['world']}  steps {life['step']} to {life['reached']}  "
            f"{spans(life['buckets'])}"
        )
        yield from deaths[life["life"]]
    yield f"wall {span(facts['wall_s'])}: {spans(facts['buckets'])}"
    yield f"goodput {facts['goodput']:.1%} (time in steps that are in the final model / wall)"


def spans(buckets):
    return ", ".join(
        f"{name.replace('_', ' ')} {span(seconds)}" for name, seconds in buckets.items() if seconds >= 0.005
    )


def span(seconds):
    return f"{seconds:.2f} s" if seconds < 600 else str(timedelta(seconds=round(seconds)))


def page(run, facts):
    """Write the report as a page of HTML, with curves."""
    rows = list(read(run / "metrics.jsonl", "step"))
    rows = rows[:: len(rows) // MOST_ROWS + 1]
    data = {"report": list(report(facts))} | without_pauses(facts) | {"run": str(run), "rows": rows}
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("DATA", json.dumps(data).replace("<", "\\u003c"))


def without_pauses(facts):
    """Take out the seconds until the next command was typed: they are no price of a death."""
    lives = facts["lives"][:1]
    paused = 0.0
    for before, life in pairwise(facts["lives"]):
        down = life["buckets"]["down"]
        if life["job"] != before["job"]:
            paused += down
            down = 0.0
        lives.append(life | {"buckets": life["buckets"] | {"down": down}})
    buckets = facts["buckets"] | {"down": sum(life["buckets"]["down"] for life in lives)}
    wall = facts["wall_s"] - paused
    return facts | {"lives": lives, "buckets": buckets, "wall_s": wall, "paused_s": paused}


def print_audit(runs):
    counts = audit(*dict.fromkeys(run.resolve() for run in runs))
    wrong = counts.pop("wrong", [])
    unproven = counts.pop("unproven", [])
    print(*(f"{name} {count}" for name, count in counts.items()))
    if wrong:
        print(f"wrong samples in {len(wrong)} steps, from {wrong[0]} to {wrong[-1]}")
    if unproven:
        print(
            f"unproven {len(unproven)} steps, from {unproven[0]} to {unproven[-1]}: "
            "a rank has no notes there (no --audit then, lost, or in another node's folder: name it too)"
        )
    return int(bool(wrong or unproven))


# ---- the numbers ----
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
    """Say how the run is: state, step, best, rate, ages of its last step and save, {rank: pid} if they live.

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
        "running": int(state in RUNNING),
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
        "slow": slow(life, entries),
        "best": [{"best": {}}, *named(told, "best")][-1]["best"],
    }


def slow(life, entries):
    """Return the rank that was the slowest in most of these entries, its host and the median; or None."""
    seen = [(entry["slow_rank"], entry["slow_times"]) for entry in entries if "slow_rank" in entry]
    for rank in {*dict(seen)}:
        times = [x for slowest, x in seen if slowest == rank]
        if 2 * len(times) > len(seen) and median(times) >= SLOW_TIMES:
            return {"rank": rank, "host": life["hosts"][rank], "times": median(times)}
    return None


def _running(life):
    """Return {rank: pid} of this machine's processes that live, not of others with their numbers."""
    host = socket.gethostname()
    processes = zip(life["pids"], life["hosts"], life.get("starts", ()), strict=False)
    return {
        rank: pid
        for rank, (pid, its_host, start) in enumerate(processes)
        if its_host == host and start_of(pid) == start
    }
