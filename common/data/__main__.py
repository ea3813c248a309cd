"""Reads every image of a folder and names those that cannot be read.

    python -m common.data DIR --check
"""
import multiprocessing
import os
import sys
from types import SimpleNamespace

from common.data.pictures import complaint, imagefolder
from common.errors import UserError


def main(arguments):
    """Read every image with all cores; exit code 0 if all can be read, 1 if not, 2 without such a folder."""
    folders = [argument for argument in arguments if argument != "--check"]
    if len(folders) != 1 or len(arguments) != 2:
        print("usage: python -m common.data DIR --check", file=sys.stderr)
        return 2
    try:
        source = imagefolder(SimpleNamespace(data_dir=folders[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    paths = [path for part in (source.train, source.test) for path, _ in part.samples]
    bad = 0
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        for text in filter(None, pool.imap(complaint, paths, chunksize=16)):
            bad += 1
            print(text, flush=True)
    print(f"{len(paths) - bad:,} of {len(paths):,} images can be read")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
