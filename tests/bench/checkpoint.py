"""What a save costs the training loop: time blocked, against one memcpy of the same bytes and `torch.save`.

    python tests/bench/checkpoint.py --mb 100
    python tests/bench/checkpoint.py --mb 1000 --rounds 5 --device cuda:0

`blocked` is how long the call takes, `durable` how long until the bytes are on the disk.
"""

import ctypes
import os
import statistics
import tempfile
import time
import uuid
from pathlib import Path

from turns import arguments, ratio, take_turns  # isort: skip  (first: it finds the others)

import torch
from samples import state_of
from torch import nn

from common.options import Options
from common.store import CheckpointStore
from common.world import World


def store_of(folder, mb, device, copy_to=""):
    """A store of a net and its optimizer, of `mb` together."""
    layers = max(1, round(mb / 12.6))  # weights and two moments of Adam: 12 bytes a weight
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)]).to(device)
    opts = Options(run_dir=folder, optimizer="adamw", save_every=1, save_seconds=0, copy_to=copy_to)
    world = World(0, 1, 0, 1, (device,), uuid.uuid4().hex[:12])
    store = CheckpointStore(opts, world, "f" * 64)
    store.restore(state_of(net, opts, 10**6))
    return store


def ways_to_save(folder, mb, device, durable):
    """{name: a function that trains, saves, and returns the seconds it held the loop}; fills `durable`."""
    store = store_of(folder / "run", mb, device)
    state = store.saver.state
    net = state.net
    tensors = [t for part in state.tensors().values() for t in part.values() if t.is_floating_point()]
    size = sum(t.nbytes for t in tensors)
    buffers = [torch.full((size,), value, dtype=torch.uint8) for value in (1, 2)]

    def memcpy():
        ctypes.memmove(buffers[1].data_ptr(), buffers[0].data_ptr(), size)

    def torch_save():
        with open(folder / "whole.pt", "wb") as file:
            torch.save({"model": net.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    def timed(name, save):
        def turn():
            state.progress.step += 1
            with torch.no_grad():
                torch._foreach_mul_(tensors, 0.999)  # a step: every byte changes, caches are cold
            os.sync()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            save()
            blocked = time.perf_counter() - began
            store.saver.wait()
            store.check()
            durable[name].append(time.perf_counter() - began)
            return blocked

        return turn

    ways = {"memcpy": memcpy, "ours": store.save, "torch.save, fsync": torch_save}
    return {name: timed(name, save) for name, save in ways.items()}


def main():
    args = arguments(__doc__, mb=100, rounds=7, device=torch.device("cpu"))  # mb: of net and optimizer
    torch.set_num_threads(1)
    durable = {"memcpy": [], "ours": [], "torch.save, fsync": []}
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-") as folder:
        blocked = take_turns(ways_to_save(Path(folder), args.mb, args.device, durable), args.rounds)
    for name, values in blocked.items():
        times = ratio(values, blocked["memcpy"])
        print(
            f"{name:18} blocked {1e3 * statistics.median(values):8.1f} ms, {times} one memcpy, "
            f"durable {1e3 * statistics.median(durable[name][1:]):8.1f} ms"
        )


if __name__ == "__main__":
    main()
