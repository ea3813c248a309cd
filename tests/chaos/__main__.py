"""Seeded faults against real trainings; about 1.5 s an event.

python -m tests.chaos --events 200 --seed 1            # all kinds
python -m tests.chaos --events 200 --seed 1 --table tests/chaos/last.md   # and what came of it, as a file
python -m tests.chaos --events 20 --only bunch         # machines die in bunches, under launch/torchrun.py
python -m tests.chaos --machines 3                     # machines fall silent; as root
python -m tests.chaos --machines 3 --only "cable cut"  # one fault of the table in machines.py
python -m tests.chaos --events 40 --only loader        # loading processes are killed, nothing else
python -m tests.chaos --store                          # killed or failed at each change of a file
python -m tests.chaos --events 40 --script mp          # train_mp.py: a net over two devices a process
"""

import json
import os
import random
import shlex
import statistics
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from tests.bench.turns import arguments
from tests.chaos import machines, points_names, store
from tests.chaos.director import INTERVAL, Campaign
from tests.chaos.events import TARGETS

from jobs import Jobs, ran  # isort: skip  (found once tests.chaos is)


def main():
    args = arguments(__doc__, events=200, seed=0, machines=0, script="ddp", only="", store=False, table="")
    only = [args.only] if args.only else []
    assert {*only} <= {*TARGETS, *machines.FAULTS}, f"--only is one of {[*TARGETS, *machines.FAULTS]}"
    assert not (args.table and args.machines), "--table is of a campaign without --machines"
    rng = random.Random(args.seed)
    commit = ran("git", "describe", "--always", "--dirty").stdout.strip()  # of what is struck
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = Path(temporary)
        os.environ["TMPDIR"] = temporary  # killed agents leave their log folders behind
        with Jobs(folder) as jobs:
            if args.store:
                sys.exit(store.campaign(jobs, folder, args.seed))
            if args.machines:
                sys.exit(machines.why_not() or machines.campaign(jobs, folder, args.machines, only))
            campaign = Campaign(jobs, rng, args.events, script=args.script, only=only)
            try:
                campaign.go()
            finally:
                print(json.dumps(facts(campaign) | {"tally": campaign.tally}, indent=1))
            assert_that_it_struck(campaign)
    if args.table:
        command = shlex.join(["python", "-m", "tests.chaos", *sys.argv[1:]])
        Path(args.table).write_text(table(campaign, commit, command))


def facts(campaign):
    """What has struck, and what it cost."""
    struck = [event["event"] for event in campaign.log if event["landed"]]
    digests = [note["digest"] for note in campaign.notes if "digest" in note]
    others = [note["difference"] for note in campaign.notes if "digest" not in note]
    totals = {name: sum(note[name] for note in campaign.notes) for name in ("lives", "missed", "repeated")}
    seconds = [round(f(campaign.recovered), 2) for f in (statistics.median, max) if campaign.recovered]
    return {
        "struck": f"{len(struck)} faults of {len({*struck})} kinds",
        "trainings": f"{len(campaign.notes)}, in {totals['lives']} lives",
        "samples missed": totals["missed"],
        "samples repeated": totals["repeated"],
        "steps lost that a survivor had finished": sum(change.of_survivors for change in campaign.changes),
        f"steps lost without a survivor (a save every {INTERVAL})": sum(
            change.lost for change in campaign.changes if not change.survived
        ),
        "seconds from a fault to the next step, median and most": ", ".join(map(str, seconds)),
        "trainings with `--virtual-ranks`": f"{len(digests)}, of digest {', '.join({*digests})}",
        "others": f"{len(others)}, at most {max(others, default=0):.1g} from the undisturbed run's weights",
    }


def table(campaign, commit, command):
    """What a campaign that has passed was, and what it cost; README.md shows the first line."""
    date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    rows = {"date": date, "commit": commit, "command": f"`{command}`", **facts(campaign)}
    digests = {note["digest"] for note in campaign.notes if "digest" in note}
    line = (
        f"Campaign of {date} at {commit}: {rows['struck']}, "
        f"lost {rows['steps lost that a survivor had finished']}, missed {rows['samples missed']}, "
        f"repeated {rows['samples repeated']}, {len(digests)} digest."
    )
    body = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    return f"{line}\n\n| | |\n|---|---|\n{body}"


def assert_that_it_struck(campaign):
    """A campaign whose kills went astray has proven nothing."""
    landed = sum(bool(event["landed"]) for event in campaign.log)
    assert landed >= 0.6 * len(campaign.log), f"only {landed} of {len(campaign.log)} events landed"
    in_saves = {f"at {name}" for name in points_names()["save"]}
    assert in_saves & {*campaign.tally} or campaign.only, "nothing was struck inside a save"
    dead = campaign.tally["loader KILL"] + campaign.tally["loader SEGV"]
    assert campaign.tally["loaders missed"] or dead < 8, f"no rank has missed one of {dead} loading processes"


if __name__ == "__main__":
    sys.exit(main())
