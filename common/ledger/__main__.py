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
import sys
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

from common.errors import CONTROL, UserError, run_command
from common.ledger.account import audit, summarize
from common.ledger.ledger import read
from common.options import read_options

MOST_ROWS = 4000  # in a page


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
    """The process of a rank of the newest life."""
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
    yield f"pids {' '.join(map(str, state['pids'].values()))}"
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
    """The report as a page of HTML, with curves."""
    rows = list(read(run / "metrics.jsonl", "step"))
    rows = rows[:: len(rows) // MOST_ROWS + 1]
    data = facts | {"run": str(run), "rows": rows, "report": list(report(facts))}
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
            "a rank has no notes there (lost, or in the folder of another node: name it too)"
        )
    return int(bool(wrong or unproven))


if __name__ == "__main__":
    sys.exit(main())
