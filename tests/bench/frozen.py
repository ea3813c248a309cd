"""What a rescue costs of a net of which little trains: frozen weights written once, and as if all trained.

    python tests/bench/frozen.py --mb 1000 --trained 10 --rounds 5

`adapter` is torch.save of what trains and of its moments, synced: what no rescue can be faster than by much.
"""

import os
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from turns import arguments, take_turns  # isort: skip  (first: it finds the others)

import torch
from samples import state_of
from torch import nn

from common.options import Options
from common.store import CheckpointStore
from common.world import World


def trained_once(folder, mb, trained, layout):
    """A store over a net with `mb` of frozen and `trained` MB of other weights, with one checkpoint."""
    blocks = [nn.Linear(1024, 1024, bias=False) for _ in range(round(mb / 4.2))]
    net = nn.Sequential(*blocks, nn.Linear(1024, round(trained * 244), bias=False))
    for block in blocks:
        block.requires_grad_(False)
    opts = Options(run_dir=folder / layout, optimizer="adamw", save_seconds=0)
    state = state_of(net, opts, 10**6)
    for p in state.weights:
        p.grad = torch.ones_like(p)
    state.optimizer.step()
    store = CheckpointStore(opts, World(0, 1, 0, 1, (torch.device("cpu"),), uuid.uuid4().hex[:12]), "f" * 64)
    store.restore(state)
    if layout == "all in one file":
        store.writer.layout.frozen = set()
    state.progress.step = 1
    store.save()
    store.saver.wait()
    return store, state


def main():
    args = arguments(__doc__, mb=1000.0, trained=10.0, rounds=5)
    written = {}
    with tempfile.TemporaryDirectory(prefix="frozen-bench-", dir=".") as name:
        folder = Path(name)
        stores = {
            layout: trained_once(folder, args.mb, args.trained, layout)
            for layout in ("all in one file", "frozen once")
        }

        def rescue(layout):
            store, state = stores[layout]
            state.progress.step += 1
            os.sync()
            began = time.perf_counter()
            store.saver.rescue("the bench")
            cost = time.perf_counter() - began
            folder = store.writer.root / f"step-{state.progress.step:08}"
            files = [path.stat() for path in folder.iterdir()]
            written[layout] = sum(file.st_size for file in files if file.st_nlink == 1)
            store.saver.prune(state.progress.step)
            return cost

        def adapter():
            _, state = stores["frozen once"]
            os.sync()
            began = time.perf_counter()
            with open(folder / "adapter.pt", "wb") as file:
                moments = [state.optimizer.state[p] for p in state.weights]
                torch.save([state.weights, moments], file)
                os.fsync(file.fileno())
            cost = time.perf_counter() - began
            written["adapter"] = (folder / "adapter.pt").stat().st_size
            return cost

        ways = {layout: lambda layout=layout: rescue(layout) for layout in stores} | {"adapter": adapter}
        for way, costs in take_turns(ways, args.rounds).items():
            middle = statistics.median(costs)
            print(
                f"{way:16} {middle:7.3f} s ({min(costs):.3f} to {max(costs):.3f}) {written[way]:>14,} bytes"
            )
        for store, _ in stores.values():
            store.saver.pool.shutdown()
            store.fence.release()


if __name__ == "__main__":
    main()
