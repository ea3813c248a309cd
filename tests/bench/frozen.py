"""What a rescue costs of a net of which little trains: frozen weights written once, and as if all trained.

    python tests/bench/frozen.py --mb 1000 --trained 10 --rounds 5

`adapter` is torch.save of what trains and of its moments, synced: what no rescue can be faster than by much.
"""

import os
import tempfile
import time
from functools import partial
from pathlib import Path

from turns import arguments, compare  # isort: skip  (first: it finds the others)

import torch
from checkpoint import store_of
from torch import nn

from common.checkpoint import Layout


def trained_once(folder, mb, trained):
    """A store over a net with `mb` of frozen and `trained` MB of other weights."""
    blocks = [nn.Linear(1024, 1024, bias=False) for _ in range(round(mb / 4.2))]
    net = nn.Sequential(*blocks, nn.Linear(1024, round(trained * 244), bias=False))
    for block in blocks:
        block.requires_grad_(False)
    return store_of(folder, net)


def main():
    args = arguments(__doc__, mb=1000.0, trained=10.0, rounds=5)
    written = {}
    with tempfile.TemporaryDirectory(prefix="frozen-bench-", dir=".") as name:
        folder = Path(name)
        stores = {
            way: trained_once(folder / way, args.mb, args.trained) for way in ("in one file", "frozen once")
        }
        in_one = stores["in one file"]
        in_one.writer.layout = Layout(in_one.saver.state.tensors())
        for store in stores.values():
            store.saver.state.progress.step = 1
            store.save()
            store.saver.wait()

        def rescue(way):
            saver = stores[way].saver
            step = saver.state.progress.step = saver.state.progress.step + 1
            os.sync()
            began = time.perf_counter()
            saver.rescue("the bench")
            seconds = time.perf_counter() - began
            files = [path.stat() for path in (stores[way].writer.root / f"step-{step:08}").iterdir()]
            written[way] = sum(file.st_size for file in files if file.st_nlink == 1)
            saver.prune(step)
            return seconds

        def adapter():
            state = stores["frozen once"].saver.state
            os.sync()
            began = time.perf_counter()
            with open(folder / "adapter.pt", "wb") as file:
                torch.save([state.weights, [state.optimizer.state[p] for p in state.weights]], file)
                os.fsync(file.fileno())
            seconds = time.perf_counter() - began
            written["adapter"] = (folder / "adapter.pt").stat().st_size
            return seconds

        ways = {way: partial(rescue, way) for way in stores} | {"adapter": adapter}
        compare("rescue", ways, args.rounds, "adapter")
        print("bytes:", written)
        for store in stores.values():
            store.saver.pool.shutdown()
            store.fence.release()


if __name__ == "__main__":
    main()
