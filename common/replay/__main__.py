"""Makes steps of a run once more and compares them with what the run kept.

    python -m common.replay verify RUN            # a segment between two kept checkpoints, drawn at random
    python -m common.replay verify RUN --all      # every one; or --segments K, or --from A --to B
    python -m common.replay verify RUN --nproc 2  # with two processes

Start it where the training was started: relative paths count from there. Exit code 0: the same; 1: something
differs; 2: it cannot be done.
"""
import argparse
import sys
from pathlib import Path

from common.errors import UserError
from common.replay.verify import verify


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m common.replay", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("verify", help="make segments again, and compare digests", allow_abbrev=False)
    one.add_argument("run", type=Path)
    one.add_argument("--segments", type=int, default=1, metavar="K", help="so many, at random (default: 1)")
    one.add_argument("--all", action="store_true", help="every segment")
    one.add_argument("--from", type=int, dest="first", default=0, metavar="A", help="all from step A")
    one.add_argument("--to", type=int, dest="last", default=0, metavar="B", help="up to step B")
    one.add_argument("--nproc", type=int, default=1, metavar="N", help="processes (default: 1)")
    one.add_argument("--tolerance", type=float, default=1e-3, metavar="X",
                     help="without --virtual-ranks: of the largest value of a tensor (default: 0.001)")
    one.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/certificate.json")
    one.set_defaults(act=verify)
    given = parser.parse_args(argv)
    try:
        return given.act(given)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
