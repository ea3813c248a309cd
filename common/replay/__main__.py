"""Makes steps of a run once more and compares them with what the run kept.

    python -m common.replay verify RUN            # a segment between two kept checkpoints, drawn at random
    python -m common.replay verify RUN --all      # every one; or --segments K, or --from A --to B
    python -m common.replay verify RUN --nproc 2  # with two processes
    python -m common.replay step RUN N            # samples, losses and gradients of one step; --dump, --break
    python -m common.replay diff RUN RUN2         # the first step, slice and tensor in which two runs part

Start it where the training was started: relative paths count from there. Exit code 0: the same; 1: something
differs; 2: it cannot be done.
"""
import argparse
import sys
from pathlib import Path

from common.errors import run_command
from common.replay.diff import diff
from common.replay.step import step
from common.replay.verify import verify


def at_least(low, kind=int):
    """What argparse makes of a number."""
    def number(text):
        if not (value := kind(text)) >= low:  # nan neither
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        return value
    return number


def main(argv=None):
    parser = argparse.ArgumentParser("python -m common.replay", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(act, *places):
        one = commands.add_parser(act.__name__, allow_abbrev=False)
        one.set_defaults(act=act)
        for place in places:
            one.add_argument(place, type=int if place == "step" else Path)
        return one.add_argument

    flag = command(verify, "run")
    flag("--segments", type=at_least(1), default=1, help="so many, drawn at random (default: 1)")
    flag("--all", action="store_true", help="every segment")
    flag("--from", type=at_least(0), default=0, help="from this step")
    flag("--to", type=at_least(0), default=0, help="to this step")
    flag("--nproc", type=at_least(1), default=1, help="processes (default: 1)")
    flag("--tolerance", type=at_least(0, float), default=1e-3,
         help="of a tensor's largest value, without --virtual-ranks")
    flag = command(step, "run", "step")
    flag("--dump", type=Path, help="a file for torch.load: batch, outputs, gradients")
    flag("--break", action="store_true", help="a prompt with net, batch, state")
    flag = command(diff, "run", "other")
    flag("--with-a", default="", help="what made the first run: PYTHON, or PYTHON:FOLDER of the code")
    flag("--with-b", default="", help="and the second run")
    given = parser.parse_args(argv)
    if getattr(given, "all", False) and given.segments > 1:
        parser.error("--all and --segments contradict each other")
    return run_command(lambda: given.act(given))


if __name__ == "__main__":
    sys.exit(main())
