"""Seeded faults against real trainings; about 1.5 s an event.

python -m tests.chaos --events 200 --seed 1            # all kinds
python -m tests.chaos --events 20 --seed 1 --short     # one of each kind that matters most
python -m tests.chaos --plain 20                       # plain torchrun, no variable set, so many kills
python -m tests.chaos --bunches 20 --seed 1            # machines die in bunches, under launch/torchrun.py
python -m tests.chaos --events 40 --state 400          # MB of state
python -m tests.chaos --events 40 --disk slow          # a slow file system; two: two mounts as two machines
python -m tests.chaos --events 40 --only loader        # loading processes are killed, nothing else
python -m tests.chaos --events 40 --script mp          # train_mp.py, two stages, one or more pipelines
"""
import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import points_names
from tests.chaos.bunches import bunches
from tests.chaos.director import Campaign
from tests.chaos.events import TARGETS
from tests.chaos.plain import plain_kills

from jobs import Jobs  # isort: skip  (found once tests.chaos is)
from netfs import served  # isort: skip

DISKS = {"slow": {"latency": 0.002, "bandwidth": 50e6},
         "two": {"machines": 2, "late": 3.0, "latency": 0.0005}}


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--events", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--cold", type=float, default=0.1,
                        help="share of submissions whose processes are executed, not forked")
    parser.add_argument("--plain", type=int, default=0, metavar="KILLS",
                        help="only this: kills in a row under plain torchrun")
    parser.add_argument("--bunches", type=int, default=0, metavar="COUNT",
                        help="only this: machines die in bunches, and others come")
    parser.add_argument("--folder", "--root", type=Path, help="where to train (default: a temporary folder)")
    parser.add_argument("--disk", choices=sorted(DISKS), help="a file system of tests/tools/netfs.py")
    parser.add_argument("--state", type=int, default=0, metavar="MB", help="weights beside those that train")
    parser.add_argument("--script", choices=("ddp", "mp"), default="ddp")
    parser.add_argument("--only", nargs="*", default=(), choices=sorted(TARGETS), metavar="TARGET",
                        help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = (given.folder or Path(temporary)).resolve()
        os.environ["TMPDIR"] = str(folder)  # killed agents leave their log folders behind
        disk = served(folder / "disk", **DISKS[given.disk]) if given.disk else contextlib.nullcontext()
        with disk as mounted, Jobs(folder) as jobs:
            if given.plain:
                print(json.dumps(plain_kills(jobs, folder / "run", given.plain)))
                return 0
            if given.bunches:
                print(json.dumps(bunches(jobs, folder / "run", random.Random(given.seed), given.bunches)))
                return 0
            began = time.monotonic()
            campaign = Campaign(jobs, random.Random(given.seed), given.events, given.short,
                                0.0 if given.short else given.cold,
                                say=(lambda text: None) if given.quiet
                                else lambda text: print(text, flush=True), script=given.script,
                                disk=mounted, state=given.state, only=given.only)
            try:
                campaign.go()
            finally:
                print(json.dumps(summary(campaign, time.monotonic() - began), indent=1), flush=True)
            assert_that_it_struck(campaign)
    return 0


def summary(campaign, seconds):
    alone = [change for change in campaign.changes if not change.survived]
    recovered = [s for _, s in campaign.recovered]
    tally = dict(sorted(campaign.tally.items()))
    save = points_names()["save"]
    return {
        "events": len(campaign.log), "landed": sum(bool(e["landed"]) for e in campaign.log),
        "seconds": round(seconds),
        "runs": campaign.notes, "lives": sum(n["lives"] for n in campaign.notes),
        "changes of life with a survivor": len(campaign.changes) - len(alone),
        "steps of survivors lost": sum(change.of_survivors for change in campaign.changes),
        "steps only the dead had": sum(change.of_the_dead for change in campaign.changes),
        "changes of life without a survivor": len(alone),
        # an interval, and what was made during a save under way
        "steps lost there": [change.lost for change in alone],
        "struck inside a save": sum(n for name, n in tally.items() if name.removeprefix("at ") in save),
        "recovery_s": {"median": round(statistics.median(recovered), 2), "max": round(max(recovered), 2)}
        if recovered else None,
        "loading processes missed": len(campaign.missed),
        "missed_s": {"median": round(statistics.median(campaign.missed), 2),
                     "max": round(max(campaign.missed), 2)}
        if campaign.missed else None,
        "orphans_gone_s": round(max(campaign.orphaned), 2) if campaign.orphaned else None,
        "tally": tally}


def assert_that_it_struck(campaign):
    """A campaign whose kills went astray has proven nothing."""
    landed = sum(bool(event["landed"]) for event in campaign.log)
    assert landed >= 0.6 * len(campaign.log), f"only {landed} of {len(campaign.log)} events landed"
    saves = [name for name in campaign.tally if name.removeprefix("at ") in points_names()["save"]]
    assert saves or campaign.only, "nothing was struck inside a save"
    dead = sum(campaign.tally[f"loader {name}"] for name in ("KILL", "SEGV"))
    assert campaign.missed or dead < 8, f"{dead} loading processes died, and no rank has missed one"


if __name__ == "__main__":
    sys.exit(main())
