"""Reads every image of a folder and names those that cannot be read.

    python -m common.data DIR --check
"""
import multiprocessing
import os
import sys
from pathlib import Path

from common.data.pictures import decode
from common.errors import UserError, one_line, run_command


def complaint(path):
    """The first line of what is wrong with an image, or None."""
    try:
        decode(path, "")
    except (UserError, OSError) as error:
        return one_line(error)


def main(arguments):
    """Read every image with all cores; exit code 0 if all can be read, 1 if not, 2 without such a folder."""
    folders = [argument for argument in arguments if argument != "--check"]
    if len(folders) != 1 or len(arguments) != 2:
        print("usage: python -m common.data DIR --check", file=sys.stderr)
        return 2
    return run_command(lambda: check(Path(folders[0])))


def check(root):
    from torchvision.datasets.folder import IMG_EXTENSIONS
    bad, paths = 0, sorted(path for path in root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
    if not paths:
        raise UserError(f"no image is below {root}, as {root}/train/CLASS/IMAGE.jpg")
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for text in filter(None, pool.imap(complaint, paths, chunksize=16)):
            bad += 1
            print(text, flush=True)
    print(f"{len(paths) - bad:,} of {len(paths):,} images can be read")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
