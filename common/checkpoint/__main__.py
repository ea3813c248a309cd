"""Lists and verifies the checkpoints of a run.

    python -m common.checkpoint RUN             # every checkpoint, verified
    python -m common.checkpoint RUN --digest    # one SHA-256 over all tensors of the newest whole one
"""
import sys
from pathlib import Path

from common.checkpoint.manifest import checkpoints, describe


def main(arguments):
    """Lists and verifies; exit code 0 if a checkpoint is whole, 3 if none is, 2 if there is no such run."""
    paths = [a for a in arguments if not a.startswith("-")]
    if len(paths) != 1 or set(arguments) - set(paths) - {"--digest"}:
        print("usage: python -m common.checkpoint RUN [--digest]", file=sys.stderr)
        return 2
    root = Path(paths[0]) / "checkpoints"
    if not root.is_dir():
        print(f"error: {paths[0]} is no run folder: it has no checkpoints/", file=sys.stderr)
        return 2
    found = 0
    for step, folder in checkpoints(root):
        whole, line = describe(step, folder)
        found += whole
        if whole or "--digest" not in arguments:
            print(line)
        if whole and "--digest" in arguments:
            break
    if not found:
        print(f"error: no whole checkpoint in {root}", file=sys.stderr)
    return 0 if found else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
