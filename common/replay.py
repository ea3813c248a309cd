"""Makes segments of a run once more, each between two checkpoints that it keeps, and compares their ends.

    python -m common.replay verify RUN            # one segment, drawn at random
    python -m common.replay verify RUN --all      # every one; or --segments K, or --from A --to B
    python -m common.replay verify RUN --nproc 2  # with two processes

A segment from step A to step B is a fork of the run (--fork RUN --at A --max-steps B) in a scratch folder.
Start it where the training was started: relative paths count from there. Exit code 0: the same; 1: something
differs; 2: it cannot be done.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from common.checkpoint import checkpoints, describe
from common.errors import UserError, run_command, say
from common.ledger import lives_of
from common.options import read_options

HOUSE = Path(__file__).resolve().parents[1]
QUIET = [
    "--save-every=0",
    "--save-seconds=0",
    "--keep-every=0",
    "--eval-every=0",
    "--no-tensorboard",
]


def _make_again(run, begin, end, folder, nproc):
    """Trains steps `begin` + 1 to `end` once more, in another run folder."""
    is_dp = read_options(run)["script"] == "dp"
    script = "train_dp.py" if is_dp else "train_ddp.py"  # for train_mp.py too
    life = [life for life, *_ in lives_of(run) if life["step"] <= begin][-1]
    command = [sys.executable]
    if nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    command += [
        str(HOUSE / script),
        f"--fork={run}",
        f"--at={begin}",
        f"--epochs={life['epochs']}",  # a later life may have more
        f"--max-steps={end}",
        f"--run-dir={folder}",
        *QUIET,
    ]
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    if code:
        raise UserError(
            f"steps {begin + 1} to {end} of {run} cannot be made again (see above)\n"
            f"{script} ended with exit code {code}"
        )


def digest(run: Path, step: int) -> str:
    """That of a checkpoint whose every byte was read; UserError if it is damaged."""
    whole, line = describe(step, _kept_by(run)[step])
    if not whole:
        raise UserError(f"{run}/checkpoints/{line}\nmove it away to compare the others")
    return line.split()[-1]


def _first_difference(run, again):
    """The first step of both that --digest-every has noted with another digest."""

    def digests(folder):
        return {
            (event["step"], event["model"], event["optimizer"])
            for life in lives_of(folder)
            for event in life
            if event["event"] == "digest"
        }

    return min((step for step, *_ in digests(again) - digests(run)), default=None)


def _kept_by(run):
    """{step: checkpoint}, of one step that with the latest facts."""
    return dict(reversed(checkpoints(run / "checkpoints")))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m common.replay",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verify", choices=["verify"], help="make segments again and compare")
    parser.add_argument("run", type=Path, help="the folder of a run that keeps checkpoints (--keep-every)")
    parser.add_argument("--segments", type=int, default=1, help="so many, drawn at random (default: 1)")
    parser.add_argument("--all", action="store_true", help="every segment")
    parser.add_argument("--from", type=int, default=0, dest="first", help="every one from this step on")
    parser.add_argument("--to", type=int, default=sys.maxsize, dest="last", help="every one up to this step")
    parser.add_argument("--nproc", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args(argv)
    return run_command(lambda: _verify(args), f"{args.run} cannot be verified")


def _verify(args):
    """Prints a line a segment; the exit code is 1 if one ends differently."""
    run = args.run
    if not read_options(run)["virtual_ranks"]:
        say("without --virtual-ranks other bits prove nothing: processes and starts decide them, too")
    segments = _chosen(args)
    wrong = 0
    for begin, end in segments:
        before = digest(run, end)
        with tempfile.TemporaryDirectory() as scratch:
            again = Path(scratch, "run")
            _make_again(run, begin, end, again, args.nproc)
            same = digest(again, end) == before
            first = _first_difference(run, again)
        wrong += not same
        hint = f", from step {first} at the latest" if first and not same else ""
        say(f"steps {begin} to {end}: {'same' if same else 'differs'}{hint}")
    say(f"{len(segments) - wrong} of {len(segments)} segments are the same")
    return int(wrong > 0)


def _chosen(args):
    """The segments that were asked for, as (begin, end)."""
    steps = sorted(_kept_by(args.run))
    if lives_of(args.run)[0][0]["step"] == 0:  # else it is a fork
        steps.insert(0, 0)  # which follows from the seed
    segments = [(a, b) for a, b in pairwise(steps) if args.first <= a and b <= args.last]
    if not segments:
        raise UserError(
            f"{args.run} has no such segment: it keeps steps {', '.join(map(str, steps))}\n"
            "train with --keep-every N, which keeps checkpoints for good"
        )
    if args.all or args.first or args.last < sys.maxsize:
        return segments
    return sorted(random.sample(segments, min(args.segments, len(segments))))


if __name__ == "__main__":
    sys.exit(main())
