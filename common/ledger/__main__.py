"""Reports where the time and the samples of a run went.

    python -m common.ledger RUN             lives, restarts, deaths, saves, rescues, goodput
    python -m common.ledger RUN --json      the same for programs: wall_s, buckets, goodput, lives, deaths
    python -m common.ledger RUN --by-host   processes, deaths, hangs and slow spells of each machine
    python -m common.ledger RUN --status    how it is now; --stale S: exit code 1 if S seconds old or older
    python -m common.ledger RUN --html      a page of curves, lives and times; --compare RUN2 adds another
    python -m common.ledger RUN --audit     missed 0 repeated 0 lost 0 redone 0 (two of samples, two of steps)
"""
import argparse
import json
import sys
import time
from pathlib import Path

from common.errors import UserError, run_command
from common.ledger.account import summarize
from common.ledger.audit import audit
from common.ledger.report import by_host, page, report
from common.ledger.status import prometheus, read_status


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m common.ledger", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+",
                        help="the folder of a run; with --audit also those of its other nodes")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="one object for programs")
    what.add_argument("--by-host", action="store_true", help="which machine fails or is slow")
    what.add_argument("--html", nargs="?", const="", metavar="FILE", help="default: RUN/report.html")
    what.add_argument("--status", action="store_true", help="RUN/status.json")
    what.add_argument("--audit", action="store_true",
                      help="compare the samples trained on with those an undisturbed run would have used")
    parser.add_argument("--prometheus", action="store_true", help="--status for node-exporter's text files")
    parser.add_argument("--stale", type=float, metavar="S", help="--status as a liveness probe")
    parser.add_argument("--compare", type=Path, metavar="RUN2", help="a page of both runs")
    given = parser.parse_args(argv)
    if (given.prometheus or given.stale is not None) and not given.status:
        parser.error("--prometheus and --stale belong to --status")
    if given.stale is not None and not given.stale >= 0:  # nan neither
        parser.error(f"--stale {given.stale}: a number of seconds from 0")
    if given.compare and (given.json or given.by_host or given.status or given.audit):
        parser.error("--compare makes a page, it goes with --html alone")
    return run_command(lambda: show(given))


def show(given):
    """Print or write what was asked for; returns the exit code."""
    run, *others = given.run
    if given.audit:
        return print_audit(given.run)
    if others:
        raise UserError(f"the report reads one folder, not {len(given.run)}\nname one, or add --audit")
    if given.status:
        status = read_status(run)
        print("\n".join(prometheus(status, run)) if given.prometheus else json.dumps(status, indent=1))
        return int(given.stale is not None and time.time() - status["t"] >= given.stale)
    if given.html is not None or given.compare:
        text, path = page(*filter(None, (run, given.compare))), Path(given.html or run / "report.html")
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        print(f"{path}: {len(text) / 1000:,.0f} kB")
        return 0
    facts, told = summarize(run), ("wall_s", "buckets", "goodput", "lives", "deaths")
    print(json.dumps({key: facts[key] for key in told}) if given.json else
          "\n".join(by_host(facts) if given.by_host else [f"{run}:", *report(facts)]))
    return 0


def print_audit(runs):
    wrong, runs = [], list(dict.fromkeys(run.resolve() for run in runs))
    for run in runs[1:]:
        if not (run / "audit").is_dir():
            raise UserError(f"{run} has no audit/\nname the folders of one run on its machines")
    found = audit(*runs, explain=wrong.append)
    unproven = found.pop("unproven", [])
    print(*(f"{name} {count}" for name, count in found.items()))
    if unproven:
        print(f"unproven {len(unproven)} steps, from {unproven[0]} to {unproven[-1]}: "
              "a rank has no notes there (lost, or in the folder of another node: name it too)")
    print("".join(f"{line}\n" for line in wrong[:5]), end="", file=sys.stderr)
    return 1 if found["missed"] or found["repeated"] or unproven else 0


if __name__ == "__main__":
    sys.exit(main())
