"""What --copy-to costs a training: seconds of a save and 20 steps, and until the copy is whole.

    python tests/bench/bucket.py --mb 100 --rounds 7

The bucket is a server on this machine (moto), which takes its share of the same cores.
"""

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from turns import arguments, compare  # isort: skip  (first: it finds the others)

import torch
from checkpoint import net_of, store_of
from s3 import server


def main():
    args = arguments(__doc__, mb=100, rounds=7)
    torch.set_num_threads(1)
    whole = {"disk": [], "bucket": []}
    x = torch.rand(64, 1024)
    with tempfile.TemporaryDirectory(prefix="bucket-bench-") as name, server() as s3:
        os.environ.update(s3.env)
        urls = {"disk": "", "bucket": s3.url("s3")}
        stores = {way: store_of(Path(name, way), net_of(args.mb), copy_to=urls[way]) for way in urls}

        def copied(saver):
            if saver.bucket:
                saver.bucket.jobs.join()
            return time.monotonic() - saver.saved_at

        def turn(way):
            saver = stores[way].saver
            began = time.perf_counter()
            saver.save()
            job = saver.pool.submit(copied, saver)  # it comes after the save
            for _ in range(20):
                saver.state.net(x).mean().backward()
                saver.state.optimizer.step()
                saver.state.progress.step += 1
            cost = time.perf_counter() - began
            whole[way].append(job.result())
            return cost

        compare("a save and 20 steps", {way: partial(turn, way) for way in urls}, args.rounds, "disk")
        print(len(s3.names("s3")), "checkpoints in the bucket")
    for way, seconds in whole.items():
        print(f"{way}: whole after {median(seconds):.2f} s")


if __name__ == "__main__":
    main()
