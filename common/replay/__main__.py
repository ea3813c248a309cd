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

from common.errors import UserError
from common.replay.diff import diff
from common.replay.step import step
from common.replay.verify import verify

COMMANDS = {"verify": (verify, "run"), "step": (step, "run", "step"), "diff": (diff, "run", "other")}
FLAGS = (  # command, flag, type, default, what it says
    ("verify", "segments", int, 1, "so many, drawn at random (default: 1)"),
    ("verify", "all", None, None, "every segment"),
    ("verify", "from", int, 0, "from this step"), ("verify", "to", int, 0, "to this step"),
    ("verify", "nproc", int, 1, "processes (default: 1)"),
    ("verify", "tolerance", float, 1e-3, "without --virtual-ranks: of a tensor's largest value (0.001)"),
    ("step", "dump", Path, None, "a file for torch.load: batch, outputs, gradients"),
    ("step", "break", None, None, "a prompt with net, batch, state"),
    ("diff", "with-a", str, "", "what made the first run: PYTHON, or PYTHON:FOLDER of the code"),
    ("diff", "with-b", str, "", "and the second run"))


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m common.replay", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command, (act, *places) in COMMANDS.items():
        one = commands.add_parser(command, allow_abbrev=False)
        one.set_defaults(act=act)
        for place in places:
            one.add_argument(place, type=int if place == "step" else Path)
        for owner, flag, kind, default, text in FLAGS:
            if command == owner:
                how = {"type": kind, "default": default} if kind else {"action": "store_true"}
                one.add_argument(f"--{flag}", help=text, **how)
    given = parser.parse_args(argv)
    try:
        return given.act(given)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
