"""Ours against the DDP loop that people write by hand; and what feeds it.

    python tests/bench/loops.py                               # all of it, about ten minutes
    python tests/bench/loops.py --what resnet18 --rounds 40   # net, resnet18, memory, index
    python tests/bench/loops.py --what net --device cuda      # one process on a GPU: the time by the clock

`net` and `resnet18` start the whole of train_ddp.py, and the loop by hand, with torchrun, in turn. The figure
is the CPU time of both processes, ours by theirs.
"""

import itertools
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import ROOT, arguments, ratio, take_turns  # isort: skip  (first: it finds the others)

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.data import batches, load_data
from common.options import Options
from common.sampler import ElasticSampler
from common.world.world import keep_memory

DATA = """
import torch
def data():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn({shape}, generator=rng)
    y = torch.randint(0, 10, (len(x),), generator=rng)
    return x, y, x[:64], y[:64]
"""
LOOPS = {  # the shape of all samples, the size of a batch, steps
    "net": ((60_000, 1, 28, 28), 128, 225),
    "resnet18": ((512, 3, 64, 64), 32, 8),
}


class Tutorial(nn.Module):
    """The MNIST network, as tutorials write it."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        return self.fc2(F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training))


def by_hand(kind, x, y, size, device):
    """The loop; every tenth loss is looked at."""
    distributed.init_process_group("gloo")
    ranks = distributed.get_world_size()
    torch.manual_seed(0)
    net = Tutorial()
    if kind == "resnet18":
        from torchvision import models

        net = models.resnet18(num_classes=10)
    net.to(device)
    model = DistributedDataParallel(net) if ranks > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    step = 0
    for epoch in itertools.count():
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for ids in order[distributed.get_rank() :: ranks].split(size // ranks):
            images = x.index_select(0, ids).to(device)
            loss = F.cross_entropy(model(images), y.index_select(0, ids).to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0:
                loss.item()


def count(steps, file, device):
    """From now on: the seconds of so many updates, after as many that do not count, go into a file."""
    made = itertools.count(1)
    began = 0.0

    def now():
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def update(optimizer, *_):
        nonlocal began
        if len(optimizer.param_groups[0]["params"]) == 1:  # ours tries it on one weight before it begins
            return
        number = next(made)
        if number == steps:
            began = now()
        if number == 2 * steps:
            file.write_text(str(now() - began))
            os._exit(0)

    register_optimizer_step_post_hook(update)


def turn(kind, whose, folder, device):
    """In a rank of one turn."""
    _, size, steps = LOOPS[kind]
    count(steps, folder / f"cost-{os.environ['RANK']}", device)
    if whose == "bare":
        x, y, *_ = runpy.run_path(f"{folder}/mine.py")["data"]()
        by_hand(kind, x, y, size, device)
    sys.argv[1:] = [
        f"--model={kind}",
        f"--dataset={folder}/mine.py:data",
        f"--global-batch-size={size}",
        f"--run-dir={folder}/run",
        f"--device={device}",
        "--no-tensorboard",
        "--progress=off",
    ]
    runpy.run_path(f"{ROOT}/train_ddp.py", run_name="__main__")


def loop(kind, rounds, folder, device):
    shape, _, _ = LOOPS[kind]
    ranks = 2 if device == "cpu" else 1
    (folder / "mine.py").write_text(DATA.format(shape=shape))

    def cost(whose):
        shutil.rmtree(folder / "run", ignore_errors=True)
        subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={ranks}",
                __file__,
                "--turn",
                whose,
                "--what",
                kind,
                "--folder",
                folder,
                "--device",
                device,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=300,
        )
        return sum(float((folder / f"cost-{rank}").read_text()) for rank in range(ranks))

    costs = take_turns({"ours": lambda: cost("ours"), "bare": lambda: cost("bare")}, rounds)
    measure = "the CPU time of a DDP loop" if device == "cpu" else "the time of a loop"
    return f"{ratio(costs['ours'], costs['bare'])} {measure} by hand"


def memory(rounds):
    """Batches from a dataset in memory, with all that a step needs."""
    keep_memory()
    opts = Options(dataset="digits", device="cpu")
    data = load_data(opts)
    speeds = []
    for epoch in range(rounds):
        order = ElasticSampler(data.train, 64)
        order.set_epoch(epoch)
        began = time.process_time()
        for _ in batches(data.train, order, opts):
            pass
        speeds.append(len(data.train) / (time.process_time() - began))
    return f"{statistics.median(speeds):,.0f} images per CPU second"


def index(rounds):
    """The first ids from anywhere in an epoch."""
    times = []
    for epoch in range(rounds):
        order = ElasticSampler(10**12, 64)
        began = time.perf_counter()
        order.set_epoch(epoch, 64 * epoch**3)
        next(iter(order))
        times.append(1e3 * (time.perf_counter() - began))
    return f"{statistics.median(times):.2f} ms to the first batch of ids of 10^12 samples"


def main():
    # the last two are for the processes that this one starts
    args = arguments(
        __doc__, what="net,resnet18,memory,index", device="cpu", rounds=20, turn="", folder=Path()
    )
    torch.set_num_threads(1)
    if args.turn:
        turn(args.what, args.turn, args.folder, args.device)
    for name in args.what.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if name in LOOPS:
                found = loop(name, args.rounds, Path(folder), args.device)
            else:
                found = {"memory": memory, "index": index}[name](args.rounds)
        print(f"{name:>9}: {found}", flush=True)


if __name__ == "__main__":
    main()
