"""What --copy-to costs a training: seconds of a save and 20 steps, and until the copy is whole.

    python tests/bench/bucket.py --mb 100 --rounds 7

The bucket is a server on this machine (moto), which takes its share of the same cores.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

from turns import arguments, ratio, take_turns  # isort: skip  (first: it finds the others)

import torch
from checkpoint import store_of
from s3 import server
from samples import CPU


def main():
    args = arguments(__doc__, mb=100, rounds=7)
    torch.set_num_threads(1)
    whole = {"": [], "s3": []}
    x = torch.rand(64, 1024)
    with tempfile.TemporaryDirectory(prefix="bucket-bench-") as name, server(Path(name, "server")) as s3:
        os.environ.update(s3.env)
        stores = {url: store_of(Path(name, "run" + url), args.mb, CPU, url and s3.url(url)) for url in whole}

        def copied(saver):
            if saver.bucket:
                saver.bucket.jobs.join()
            return time.monotonic() - saver.saved_at

        def turn(url):
            saver = stores[url].saver
            began = time.perf_counter()
            saver.save()
            job = saver.pool.submit(copied, saver)  # it comes after the save
            for _ in range(20):
                saver.state.net(x).mean().backward()
                saver.state.optimizer.step()
                saver.state.progress.step += 1
            cost = time.perf_counter() - began
            whole[url].append(job.result())
            return cost

        costs = take_turns({url: lambda url=url: turn(url) for url in whole}, args.rounds)
        print(len(s3.names("s3")), "checkpoints in the bucket")
    for url, seconds in costs.items():
        times = ratio(seconds, costs[""])
        print(f"{url or 'disk'}: {median(seconds):.2f} s, {times}, whole after {median(whole[url]):.2f} s")


if __name__ == "__main__":
    main()
