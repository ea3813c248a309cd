"""Makes segments of a run once more, each between two checkpoints that it keeps, and compares their ends.

    python -m common.replay verify RUN            # one segment, drawn at random; --segments K: so many
    python -m common.replay verify RUN --all      # every one; or those from step A to B: --from A --to B
    python -m common.replay verify RUN --nproc 2  # with two processes

RUN keeps checkpoints (--keep-every).

A segment from step A to step B is a fork of the run (--fork RUN --at A --max-steps B) in a scratch folder.
More flags go to the training: code that RUN names runs only if you have begun RUN yourself, and it does not
lie in RUN or belong to another user; else name each file too (--model RUN/net.py:f). Exit code 0: the same;
1: something differs; 2: it cannot be done.
"""

import random
import subprocess
import sys
import tempfile
from itertools import chain, pairwise
from pathlib import Path

from common.checkpoint import checkpoints, read_facts
from common.errors import UserError, say
from common.extras.chosen import describe
from common.extras.command import parser_of, run_command
from common.extras.lives import lives_of, read
from common.ledger import named
from common.options import read_options
from common.world import fingerprint_of

HOUSE = Path(__file__).resolve().parents[2]


def _make_again(run, begin, end, folder, nproc, flags):
    """Train steps `begin` + 1 to `end` once more, in another run folder."""
    script = "train_dp.py" if read_options(run)["script"] == "dp" else "train_ddp.py"  # also for train_mp.py
    lives = [life for life, *_ in lives_of(run)]
    life = [life for life in lives if life["step"] <= max(begin, lives[0]["step"])][-1]
    command = [sys.executable]
    if nproc > 1:
        command += [str(HOUSE / "launch/torchrun.py"), "--max_restarts=0", f"--nproc_per_node={nproc}"]
    command += [
        str(HOUSE / script),
        *flags,
        f"--fork={run}",
        f"--at={begin}",
        f"--epochs={life['epochs']}",  # a later life may have more
        f"--max-steps={end}",
        f"--run-dir={folder}",
        "--save-every=0",
        "--save-seconds=0",
        "--keep-every=0",
        "--eval-every=1",
        "--patience=0",
        "--no-tensorboard",
    ]
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    if code:
        raise UserError(
            f"steps {begin + 1} to {end} of {run} cannot be made again (see above)\n"
            f"{script} ended with exit code {code}"
        )


def end_of(run, step):
    """Return (digest, samples trained on, best evaluation) of a checkpoint, of which each byte is read.

    UserError if it is damaged.
    """
    folder = _kept_by(run)[step]
    whole, line = describe(step, folder)
    if not whole:
        raise UserError(f"{run}/checkpoints/{line}\nmove it away to compare the others")
    _, facts = read_facts(step, folder)
    samples, _ = facts["order"]
    # not epoch and position: at the end of an epoch it may be counted, or not yet
    return line.split()[-1], facts["epoch"] * samples + facts["position"], facts["best"]


def _first_difference(run, again):
    """Find the first step of both that --digest-every has noted with another digest."""

    def digests(folder):
        events = named(chain(*lives_of(folder)), "digest")
        return {(event["step"], event["model"], event["optimizer"]) for event in events}

    return min((step for step, *_ in digests(again) - digests(run)), default=None)


def _kept_by(run):
    """Return {step: checkpoint}, of one step that with the latest facts."""
    return dict(reversed(checkpoints(run)))


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("python -m common.replay", __doc__)
    parser.add_argument("verify", choices=["verify"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--segments", type=int, default=1, metavar="K")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="A")
    parser.add_argument("--to", type=int, default=sys.maxsize, dest="last", metavar="B")
    parser.add_argument("--nproc", type=int, default=1, metavar="N")
    args, flags = parser.parse_known_args(argv)
    return run_command(lambda: _verify(args, flags), f"{args.run} cannot be verified")


def _verify(args, flags):
    """Print a line a segment; return exit code 1 if one ends differently."""
    run = args.run
    if not read_options(run)["virtual_ranks"]:
        say("without --virtual-ranks other bits prove nothing: processes and starts decide them, too")
    segments = _chosen(args)
    same = 0
    for begin, end in segments:
        with tempfile.TemporaryDirectory() as scratch:
            again = Path(scratch, "run")
            result = _compare(run, begin, end, again, args.nproc, flags)
        same += result.startswith("same")
        say(f"steps {begin} to {end}: {result}")
    say(f"{same} of {len(segments)} segments are the same")
    return int(same < len(segments))


def _compare(run, begin, end, again, nproc, flags):
    """Make a segment again, and say in words how its end compares."""
    digest, position, best = end_of(run, end)
    *_, best_before = end_of(run, begin) if begin else [{"step": 0}]
    _make_again(run, begin, end, again, nproc, flags)
    new_digest, new_position, _ = end_of(again, end)
    if new_digest != digest:
        first = _first_difference(run, again)
        return "differs" + (f", from step {first} at the latest" if first else "")
    if new_position != position:
        return "differs in its position"
    if best == best_before:
        return "same"
    for row in read(again / "metrics.jsonl", "step"):
        is_evaluation = {*best} & {*row} - {"loss", "step"}
        if is_evaluation and row["step"] == best["step"]:
            return "same" if {*best.values()} <= {*row.values()} else "differs in its best evaluation"
    # a start has ended there, in mid-epoch
    return f"same, but nothing proves its best evaluation, of step {best['step']}"


def _chosen(args):
    """Return the segments that were asked for, as (begin, end)."""
    steps = sorted({0, *_kept_by(args.run)})  # step 0 follows from the seed
    began = [read_facts(*choice)[1]["origin"]["began"] for choice in checkpoints(args.run)[:1]]
    if read_options(args.run)["fork"] or began not in ([], ["auto"]):
        del steps[0]
        say(f"nothing proves step {min(steps, default=0)}, where it begins")
    segments = [(a, b) for a, b in pairwise(steps) if args.first <= a and b <= args.last]
    if not segments:
        raise UserError(
            f"{args.run} has no such segment: it keeps steps {', '.join(map(str, steps))}\n"
            "train with --keep-every N, which keeps checkpoints for good"
        )
    if args.all or args.first or args.last < sys.maxsize:
        return segments
    return sorted(random.sample(segments, min(args.segments, len(segments))))


def note_digest(state, ledger):
    """Note that of this step, if one is due.

    Tensors go by name: what is remembered comes in the order of its first step, or of a file.
    """
    step = state.progress.step
    if step % state.opts.digest_every == 0:
        sums = {}
        for kind, tensors in state.tensors().items():
            sums[kind] = fingerprint_of(tensors[name] for name in sorted(tensors))
        ledger.event("digest", step=step, **sums)
