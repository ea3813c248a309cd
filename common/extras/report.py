"""Reports how a run is, and where its time and its samples went.

python -m common.ledger RUN              how it is now; lives, deaths, saves, rescues, goodput
python -m common.ledger RUN --pid RANK   the process of that rank, if it lives on this machine
python -m common.ledger RUN --json       the same as one object, for programs
python -m common.ledger RUN --html FILE  curves and lives as a page that needs no server
python -m common.ledger RUN --audit      missed 0 repeated 0 lost 0 redone 0 (samples, then steps)
python -m common.ledger RUN RUN2 ...     of several runs a row each: how it is, its best, what differs
"""

import json
import math
import socket
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

from common.errors import CONTROL, UserError
from common.extras.audit import audit
from common.extras.command import parser_of, run_command
from common.extras.lives import deaths_of, lives_of, read
from common.ledger import named
from common.options import read_options
from common.place import start_of

MOST_ROWS = 4000  # of a kind, in a page
STEPPING = ("data_wait", "steps", "evaluation", "save_stall")  # as Clock names them
# "paused" lasts until the next command is typed: it is no price of a death
BUCKETS = ("down", "paused", "start", *STEPPING, "redone", "rescue", "other")
RECENT = 10  # entries of the clock that the rate and the slow rank are taken from
SLOW_TIMES = 1.2  # the median: from there on a rank is named
QUIET_SECONDS = 120.0  # of a run on other machines: then nobody here knows whether it trains


def main(argv=None):
    parser = parser_of("python -m common.ledger", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--pid", type=int, metavar="RANK")
    form.add_argument("--json", action="store_true")
    form.add_argument("--html", type=Path, metavar="FILE")
    form.add_argument("--audit", action="store_true")
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
    elif args.html:
        args.html.write_text(page(run, runs[run]), encoding="utf-8")
    elif args.json:
        for run, facts in runs.items():
            print(json.dumps({"run": str(run)} | facts))
    else:
        lines = rows(runs) if len(runs) > 1 else report(run, runs[run])
        print("\n".join(lines).translate(CONTROL))
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


def report(run, facts):
    """Yield lines, first how the run is now."""
    state = facts["now"]
    yield (
        f"{run}: {state['state']} at step {state['step']}, {span(state['last_step_s'])} ago; "
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
    yield ", ".join(f"{name} {len(facts[name])}" for name in ("lives", "deaths", "saves", "rescues"))
    for life in facts["lives"]:
        yield (
            f"  life {life['life']}  world {life['world']}  steps {life['step']} to {life['reached']}  "
            f"{spans(life['buckets'])}"
        )
        for death in facts["deaths"]:
            if death["life"] == life["life"]:
                yield "    rank {rank} (pid {pid} on {host}) {cause}".format(**death)
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
    rows = []
    for is_step in (True, False):
        kind = [row for row in read(run / "metrics.jsonl", "step") if ("epoch" in row) == is_step]
        rows += kind[:: len(kind) // MOST_ROWS + 1]
    data = facts | {"report": list(report(run, facts)), "run": str(run), "rows": rows}
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return template.replace("DATA", json.dumps(data).replace("<", "\\u003c"))


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
def summarize(run_dir):
    """Return how the run is now, its lives, deaths, saves, rescues, buckets, and goodput.

    The buckets add up to `wall_s`. Goodput is the share of the time in steps that the newest life builds on.
    """
    lives = lives_of(run_dir)
    facts = {"version": 1, "lives": [], "deaths": [], "saves": [], "rescues": []}
    accounted = lives[0][0]["began"]
    for i, events in enumerate(lives):
        life = events[0]
        same_job = life.get("job") == lives[max(0, i - 1)][0].get("job")
        # later lives make the steps after this one again
        kept = min((later[0]["step"] for later in lives[i + 1 :]), default=math.inf)
        seconds = account(events, accounted, kept, "down" if same_job else "paused")
        accounted += sum(seconds.values())
        reached = max(event["step"] for event in named(events, "life", "save", "rescue", "steps"))
        facts["lives"].append(life | {"reached": reached, "buckets": seconds})
        facts["deaths"] += deaths_of(events, over=events is not lives[-1])
        facts["saves"] += named(events, "save")
        facts["rescues"] += named(events, "rescue")
    buckets = {name: sum(life["buckets"][name] for life in facts["lives"]) for name in BUCKETS}
    wall = sum(buckets.values())
    goodput = buckets["steps"] / max(wall, 1e-9)
    return facts | {"now": now(lives), "buckets": buckets, "wall_s": wall, "goodput": goodput}


def account(events, accounted, kept, pause):
    """Return {bucket: seconds} of a life from `accounted`, the end of the life before.

    Rank 0 has measured what lies between its first step and its last entry. The rest is "other".
    """
    began = max(accounted, events[0]["began"])
    opened = max(began, named(events, "life", "first_step")[-1]["t"])
    end = max(opened, *(event["t"] for event in events))
    seconds = dict.fromkeys(BUCKETS, 0.0) | {pause: began - accounted, "start": opened - began}
    for entry in named(events, "steps"):
        for name in STEPPING:
            bucket = "redone" if name == "steps" and entry["step"] > kept else name
            seconds[bucket] += entry.get(f"{name}_s", 0.0)
    left = max(0.0, end - accounted - sum(seconds.values()))
    leaving = named(events, "left")
    if leaving:
        # an entry on the way out may hold a part of it
        seconds["rescue"] = min(left, end - leaving[-1]["stepped"])
    seconds["other"] = left - seconds["rescue"]
    return seconds


def now(lives):
    """Say how the run is: state, step, best, rate, ages of its last step and save, {rank: pid} if they live.

    The ledger hears of a step at most a minute late. Processes of another machine cannot be seen: what
    they have written last is then all that is known.
    """
    events = lives[-1]
    life = events[0]
    entries = named(events, "life", "steps")[-RECENT:]
    first = entries[0]
    last = entries[-1]
    told = [event for life in lives for event in named(life, "save", "rescue", "best")]
    # what a run begins with is as good as saved
    save = [lives[0][0], *named(told, "save", "rescue")][-1]
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
        "running": int(not ends),
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
