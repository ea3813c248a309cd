"""Makes segments of a run once more, each between two checkpoints that it keeps, and compares their ends.

    python -m common.replay verify RUN            # one segment, drawn at random
    python -m common.replay verify RUN --all      # every one; or --segments K, or --from A --to B
    python -m common.replay verify RUN --nproc 2  # with two processes

A segment from step A to step B is a fork of the run (--fork RUN --at A --max-steps B) in a scratch folder.
Start it where the training was started: relative paths count from there. Exit code 0: the same; 1: something
differs; 2: it cannot be done.
"""
import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from common.checkpoint import checkpoints, describe
from common.errors import UserError, run_command, say
from common.ledger import lives_of
from common.options import Options, read_options

HOUSE = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-3  # without --virtual-ranks: of a tensor's largest value
ROW = "{:>16}  {:>5}  {:>7}  {}"
QUIET = ("--save-every=0", "--save-seconds=0", "--keep-every=0", "--eval-every=0", "--no-tensorboard",
         "--progress=off")


class Run:
    """A run as its folder tells it; `steps` are those that it keeps, and 0, which follows from the seed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.facts = read_options(folder)
        except (OSError, ValueError):
            raise UserError(f"{folder} holds no whole options.json\nname the folder of a run") from None
        options = self.facts["options"]
        if options["task"] == "the script":
            raise UserError(f"{folder} was trained by a script with a loop of its own\n"
                            "start that script once more, with --resume and another run folder")
        self.script = "train_dp.py" if options["script"] == "dp" else "train_ddp.py"  # for train_mp.py too
        self.exact = bool(options["virtual_ranks"])  # no number of processes changes a bit
        self.kept = dict(reversed(checkpoints(folder / "checkpoints")))  # of one step the latest facts
        self.lives = lives_of(folder)
        self.steps = sorted(self.kept)
        if self.lives[0][0]["step"] == 0:  # else it is a fork
            self.steps.insert(0, 0)
        self.digests = {event["step"]: (event["model"], event["optimizer"])  # of a step made again, the last
                        for events in self.lives for event in events if event["event"] == "digest"}

    def digest(self, step: int) -> str:
        """That of a checkpoint whose every byte was read; UserError if it is damaged."""
        whole, line = describe(step, self.kept[step])
        if not whole:
            raise UserError(f"{self.kept[step].parent}/{line}\nmove it away to compare the others")
        return line.split()[-1]

    def again(self, begin: int, end: int, folder: Path, nproc: int) -> "Run":
        """Makes steps `begin` + 1 to `end` once more, in another run folder; returns that run."""
        life = [life for life, *_ in self.lives if life["step"] <= begin][-1]
        epochs = life["options"].get("epochs", Options().epochs)  # a later life may have more
        command = [sys.executable]
        if nproc > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command += [str(HOUSE / self.script), f"--fork={self.folder}", f"--at={begin}", f"--epochs={epochs}",
                    f"--max-steps={end}", f"--run-dir={folder}", *QUIET]
        code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if code:
            raise UserError(f"steps {begin + 1} to {end} of {self.folder} cannot be made again (see above)\n"
                            f"{self.script} ended with exit code {code}")
        return Run(folder)


def verify(run: Run, segments: list[tuple[int, int]], nproc: int) -> int:
    """Prints a table and writes the certificate; returns the number of segments that end differently."""
    if not run.exact:
        say("without --virtual-ranks sums depend on the number of processes, and dropout draws per rank: "
            f"equal means up to {TOLERANCE} of a tensor's largest value")
    say(ROW.format("segment", "steps", "seconds", "result"))
    rows = []
    for begin, end in segments:
        with tempfile.TemporaryDirectory() as scratch:
            row = compare(run, begin, end, Path(scratch, "run"), nproc)
        rows.append(row)
        say(ROW.format(f"{begin} to {end}", end - begin, row["seconds"], row["result"]))
    wrong = sum(row["result"] != "same" for row in rows)
    certificate = run.folder / "certificate.json"
    facts = {"run": str(run.folder), "options": run.facts["identity"], "data": run.facts["data"],
             "torch": [run.facts.get("torch"), torch.__version__], "processes": nproc,
             "tolerance": 0.0 if run.exact else TOLERANCE, "segments": rows}
    certificate.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    say(f"{len(rows) - wrong} of {len(rows)} segments are the same; {certificate}")
    return wrong


def compare(run: Run, begin: int, end: int, scratch: Path, nproc: int) -> dict[str, object]:
    """One row of the table: the same, or what differs first."""
    if begin:
        run.digest(begin)  # it is whole
    before = run.digest(end)
    began = time.monotonic()
    again = run.again(begin, end, scratch, nproc)
    seconds = round(time.monotonic() - began, 1)
    now = again.digest(end)
    name = "" if before == now else first_difference(run.kept[end], again.kept[end], run.exact)
    result = f"differs: {name}" if name else "same"
    steps = [step for step in sorted(again.digests) if run.digests.get(step) != again.digests[step]]
    if name and steps and run.exact:
        result += f" (from step {steps[0]} at the latest)"
    return {"from": begin, "to": end, "seconds": seconds, "result": result, "digest": before, "again": now}


def first_difference(before: Path, now: Path, exact: bool) -> str:
    """The first tensor of two checkpoints that differs, by more than the tolerance unless `exact`."""
    olds = tensors(before)
    news = tensors(now)
    for name in olds | news:
        if name not in olds or name not in news or olds[name].shape != news[name].shape:
            return f"{name} has another shape"
        apart = largest(olds[name].double() - news[name].double())
        if not apart <= (0.0 if exact else TOLERANCE * largest(olds[name])):  # nan neither
            return f"{name} by {apart:.2g}"
    return "bits that no comparison of numbers sees" if exact else ""


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name; rows of a sharded one are put together."""
    rows_of: dict[str, list[torch.Tensor]] = {}
    for kind in ("model", "optimizer"):
        for path in sorted(folder.rglob(f"{kind}.safetensors")):
            for name, rows in load_file(path).items():
                rows_of.setdefault(name if kind == "model" else f"optimizer's {name}", []).append(rows)
    return {name: torch.cat(rows) if len(rows) > 1 else rows[0] for name, rows in sorted(rows_of.items())}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m common.replay", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verify", choices=["verify"], help="make segments again and compare")
    parser.add_argument("run", type=Path, help="the folder of a run that keeps checkpoints (--keep-every)")
    parser.add_argument("--segments", type=int, default=1, help="so many, drawn at random (default: 1)")
    parser.add_argument("--all", action="store_true", help="every segment")
    parser.add_argument("--from", type=int, default=0, dest="first", help="every one from this step on")
    parser.add_argument("--to", type=int, default=sys.maxsize, dest="last", help="every one up to this step")
    parser.add_argument("--nproc", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args(argv)
    return run_command(lambda: act(args))


def act(args: argparse.Namespace) -> int:
    run = Run(args.run)
    segments = [(a, b) for a, b in pairwise(run.steps) if args.first <= a and b <= args.last]
    if not segments:
        raise UserError(f"{run.folder} has no such segment: it keeps steps {', '.join(map(str, run.steps))}\n"
                        "train with --keep-every N, which keeps checkpoints for good")
    if not (args.all or args.first or args.last < sys.maxsize):
        segments = sorted(random.sample(segments, min(args.segments, len(segments))))
    return int(verify(run, segments, args.nproc) > 0)


if __name__ == "__main__":
    sys.exit(main())
