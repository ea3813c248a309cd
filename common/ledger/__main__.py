"""Reports where the time and the samples of a run went.

    python -m common.ledger RUN             lives, restarts, saves, rescues, goodput python -m common.ledger
    RUN --audit     missed 0 repeated 0 lost 0 redone 0  (two of samples, two of steps)
"""
import argparse
import sys
from pathlib import Path

from common.errors import UserError
from common.ledger.audit import audit
from common.ledger.report import report


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m common.ledger", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="+",
                        help="the folder of a run; with --audit also those of its other nodes")
    parser.add_argument("--audit", action="store_true",
                        help="compare the samples trained on with those an undisturbed run would have used")
    args = parser.parse_args(argv)
    try:
        if not args.audit:
            if len(args.run) > 1:
                raise UserError(f"the report reads one folder, not {len(args.run)}\nname one, or add --audit")
            print("\n".join(report(*args.run)))
            return 0
        wrong = []
        found = audit(*args.run, explain=wrong.append)
        unproven = found.pop("unproven", [])
        print(*(f"{name} {count}" for name, count in found.items()))
        if unproven:
            print(f"unproven {len(unproven)} steps, from {unproven[0]} to {unproven[-1]}: "
                  "a rank has no notes there (lost, or in the folder of another node: name it too)")
        print("".join(f"{line}\n" for line in wrong[:5]), end="", file=sys.stderr)
        return 1 if found["missed"] or found["repeated"] or unproven else 0
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
