"""What a save costs the training loop: time blocked, against one memcpy of the same bytes and `torch.save`.

python tests/bench/checkpoint.py --mb 100
python tests/bench/checkpoint.py --mb 1000 --rounds 5 --device cuda:0
"""

import ctypes
import os
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from turns import arguments, compare  # isort: skip  (first: it finds the others)

import torch
from samples import ALONE, state_of
from torch import nn

from common.options import Options
from common.store import CheckpointStore


def net_of(mb):
    """Of `mb` together with its optimizer: weights and two moments of Adam, 12 bytes a weight."""
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(max(1, round(mb / 12.6)))])


def store_of(folder, net, device="cpu", copy_to=""):
    """A store of a net and its optimizer, which has made a step."""
    opts = Options(run_dir=folder, optimizer="adamw", save_every=1, save_seconds=0, copy_to=copy_to)
    store = CheckpointStore(opts, replace(ALONE, devices=(torch.device(device),)), "f" * 64)
    state = state_of(net.to(device), opts, 10**6)
    for p in state.weights:
        p.grad = torch.ones_like(p)
    state.optimizer.step()
    store.restore(state)
    return store


def main():
    args = arguments(__doc__, mb=100, rounds=7, device="cpu")  # mb: of net and optimizer
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-") as folder:
        store = store_of(Path(folder, "run"), net_of(args.mb), args.device)
        state = store.saver.state
        tensors = [t for part in state.tensors().values() for t in part.values() if t.is_floating_point()]
        size = sum(t.nbytes for t in tensors)
        buffers = [torch.full((size,), value, dtype=torch.uint8) for value in (1, 2)]

        def memcpy():
            ctypes.memmove(buffers[1].data_ptr(), buffers[0].data_ptr(), size)

        def torch_save():
            with open(f"{folder}/whole.pt", "wb") as file:
                torch.save({"model": state.net.state_dict(), "optimizer": state.optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())

        def blocked(save):
            state.progress.step += 1
            with torch.no_grad():
                torch._foreach_mul_(tensors, 0.999)  # a step: every byte changes, caches are cold
            os.sync()
            if args.device != "cpu":
                torch.cuda.synchronize(args.device)
            began = time.perf_counter()
            save()
            seconds = time.perf_counter() - began
            store.saver.wait()
            store.check()
            return seconds

        ways = {"memcpy": memcpy, "ours": store.save, "torch.save": torch_save}
        compare(
            "blocked", {name: partial(blocked, save) for name, save in ways.items()}, args.rounds, "memcpy"
        )


if __name__ == "__main__":
    main()
