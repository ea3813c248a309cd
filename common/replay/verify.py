"""verify: segments between kept checkpoints are made again, and their ends compared."""
import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.errors import UserError, say
from common.replay.run import Run

ROW = "{:>16}  {:>5}  {:>7}  {}"


def verify(given):
    """Prints a table, writes the certificate; exit code 0 if each segment ends as in the run, else 1."""
    run, rows = Run(given.run), []
    tolerance = 0.0 if run.exact else given.tolerance
    if not run.exact:
        say("without --virtual-ranks sums depend on the number of processes, and dropout draws per rank: "
            f"equal means up to {tolerance:g} of a tensor's largest value")
    say(ROW.format("segment", "steps", "seconds", "result"))
    for begin, end in _chosen(run, given):
        with tempfile.TemporaryDirectory() as scratch:
            row = _compare(run, begin, end, Path(scratch, "run"), given.nproc, tolerance)
        rows.append(row)
        say(ROW.format(f"{begin} to {end}", end - begin, row["seconds"], row["result"]))
    wrong = sum(row["result"] != "same" for row in rows)
    facts = {"run": str(run.folder), "options": run.facts["identity"], "data": run.facts["data"],
             "torch": [run.facts.get("torch"), torch.__version__], "kind": run.facts.get("pinned", {}),
             "tolerance": tolerance, "processes": given.nproc, "segments": rows}
    place = run.folder / "certificate.json"
    try:
        place.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:  # the result stands
        place = f"{place} cannot be written ({error.strerror})"
    say(f"{len(rows) - wrong} of {len(rows)} segments are the same; {place}")
    return int(wrong > 0)


def _chosen(run, given):
    first, last = getattr(given, "from"), given.to
    every = [(a, b) for a, b in pairwise(run.steps) if a >= first and b <= (last or b)]
    if not every:
        raise UserError(f"{run.folder} has no such segment: it keeps steps {', '.join(map(str, run.steps))}\n"
                        "train with --keep-every N, which keeps checkpoints for good")
    count = len(every) if given.all or first or last else max(1, given.segments)
    return sorted(random.sample(every, min(count, len(every))))


def _compare(run, begin, end, scratch, nproc, tolerance):
    """One row of the table: the same, or what differs first."""
    begin and run.digest(begin)  # it is whole
    again, seconds = run.again(begin, end, scratch, nproc)
    was, now, result = run.digest(end), again.digest(end), "same"
    if again.facts["data"] != run.facts["data"]:
        result = "the data has changed"
    elif was != now and (name := first_difference(run.kept[end], again.kept[end], tolerance)):
        odd = [step for step in sorted(again.digests) if begin < step <= end
               and run.digests.get(step) != again.digests[step]]
        result = f"differs: {name}" + (f" (from step {odd[0]} at the latest)" if odd and run.exact else "")
    return {"from": begin, "to": end, "seconds": round(seconds, 1), "result": result, "digest": was,
            "again": now}


def first_difference(ours, theirs, tolerance):
    """The first tensor of two checkpoints that differs by more than this share of its largest value."""
    a, b = _tensors(ours), _tensors(theirs)
    for name in a | b:
        if name not in a or name not in b or a[name].shape != b[name].shape:
            return f"{name} has another shape"
        if not torch.equal(a[name], b[name]):
            x, y = a[name].double(), b[name].double()
            by = (x - y).abs().max().item()
            if not by <= tolerance * x.abs().max().item():  # nan neither
                return f"{name} by {by:.2g}"
    return None if tolerance else "bits that no comparison of numbers sees"


def _tensors(folder):
    """Every tensor of a checkpoint by name; rows of a sharded one are put together."""
    found = {}
    for part in ("model", "optimizer"):
        for path in sorted(folder.rglob(f"{part}.safetensors")):
            for name, rows in load_file(path).items():
                found.setdefault(name if part == "model" else f"optimizer's {name}", []).append(rows)
    return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in sorted(found.items())}
