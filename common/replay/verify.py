"""verify: segments between kept checkpoints are made again, and their ends compared."""
import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path

import torch

from common.errors import UserError, say
from common.replay.run import Run, digest_of, first_difference

ROW = "{:>16}  {:>5}  {:>7}  {}"


def verify(given):
    """Prints a table, writes the certificate; exit code 0 if each segment ends as in the run, else 1."""
    run = Run(given.run)
    tolerance = 0.0 if run.exact else given.tolerance
    if not run.exact:
        say("without --virtual-ranks sums depend on the number of processes, and dropout draws per rank: "
            f"equal means up to {tolerance:g} of a tensor's largest value")
    say(ROW.format("segment", "steps", "seconds", "result"))
    rows = []
    for begin, end in _chosen(run, given):
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(_compare(run, begin, end, Path(scratch, "run"), given.nproc, tolerance))
        row = rows[-1]
        say(ROW.format(f"{begin} to {end}", end - begin, f"{row['seconds']:.1f}", row["result"]))
    wrong = sum(row["result"] != "same" for row in rows)
    out = given.out or run.folder / "certificate.json"
    facts = {"run": str(run.folder), "options": run.facts["identity"], "data": run.facts["data"],
             "torch": [run.facts["torch"], torch.__version__], "kind": run.facts.get("pinned", {}),
             "tolerance": tolerance, "processes": given.nproc, "segments": rows}
    out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    say(f"{len(rows) - wrong} of {len(rows)} segments are the same; {out}")
    return int(wrong > 0)


def _chosen(run, given):
    every = list(pairwise(run.steps))
    if given.first or given.last:
        chosen = [(a, b) for a, b in every if a >= given.first and b <= (given.last or b)]
    else:
        count = len(every) if given.all else min(given.segments, len(every))
        chosen = sorted(random.sample(every, max(0, count)))
    if not chosen:
        kept = ", ".join(map(str, run.steps))
        raise UserError(f"{run.folder} has no such segment: it keeps steps {kept}\n"
                        "train with --keep-every N, which keeps checkpoints for good")
    return chosen


def _compare(run, begin, end, scratch, nproc, tolerance):
    """One row of the table: the same, or what differs first."""
    for step in (begin, end):
        step and digest_of(step, run.kept[step])
    again, seconds = run.again(begin, end, scratch, nproc)
    was, now = (digest_of(end, each.kept[end]) for each in (run, again))
    result = "same"
    if again.facts["data"] != run.facts["data"]:
        result = "the data has changed"
    elif was != now and (name := first_difference(run.kept[end], again.kept[end], tolerance)):
        result = f"differs: {name}"
        ours, theirs = run.digests, again.digests
        odd = [step for step in sorted(theirs) if begin < step <= end and ours.get(step) != theirs[step]]
        result += f" (from step {odd[0]} at the latest)" if odd and run.exact else ""
    return {"from": begin, "to": end, "seconds": round(seconds, 2), "result": result, "digest": was,
            "again": now}
