"""Ours against the DDP loops that people write by hand; and what feeds it.

    python tests/bench/loops.py                               # all of it, 15 minutes; an hour if it is busy
    python tests/bench/loops.py --what gpt,bf16 --rounds 20   # net, pool, resnet18, gpt, bf16, memory, index
    python tests/bench/loops.py --what net --device cuda      # one process on a GPU: the time by the clock

A row is a net, the same one on all sides. The whole of train_ddp.py, the best loop by hand and the plain one
train it in turn, with two processes each. The figures are the CPU time of both processes, ours by theirs. The
best loop has a fused AdamW, gradients as views of their buckets, and memory that is kept; the plain one is as
tutorials write it. `gpt` and `bf16` are a small GPT over tokens on the disk, clipped by all. `pool` alone
has torch's own pooling by hand, and ours in ours: it shows what that gains.

Of the best loop's time 0.88 (`net`: 0.79) are forward, backward and update of one batch; with DDP's exchange,
but without data and log, they are 1.00 to 1.02. So no loop around DDP is faster. What ours pays besides, in a
step of 55 ms: 0.12 ms for the sum of all counts, 0.16 for the division by it, 0.07 for a float32 copy of
logits in bf16, 0.2 of Python. Threads that watch peers and renew the fence are paid by the second: on a busy
machine a step lasts longer, and theirs is a larger part of it.
"""

import itertools
import os
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from turns import ROOT, arguments, ratio, take_turns  # isort: skip  (first: it finds the others)

import numpy as np
import torch
import torch._dynamo  # DDP imports it: here once, and not in every turn
import torch.nn.functional as F
from jobs import free_port
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.data import batches, load_data
from common.models import build_model
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
VOCAB = 512
LENGTH = 64  # tokens of a sample
SIZE = "4x4x128"  # of the GPT
CLIP = 1.0


class Row(NamedTuple):
    """A net, and how it is trained."""

    net: str
    shape: tuple  # of all samples; of a GPT the number of tokens
    size: int  # of a batch
    steps: int  # that count, after as many that do not
    bf16: bool = False
    tutorial: bool = False  # by hand the net as tutorials write it


ROWS = {
    "net": Row("net", (60_000, 1, 28, 28), 128, 60),
    "pool": Row("net", (60_000, 1, 28, 28), 128, 60, tutorial=True),
    "resnet18": Row("resnet18", (512, 3, 64, 64), 32, 4),
    "gpt": Row("gpt", (200_000,), 16, 10),
    "bf16": Row("gpt", (200_000,), 16, 10, bf16=True),
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


# ---- loops by hand ----
def net_of(row):
    """The net of the loops by hand: that of train_ddp.py, unless the row is there to compare two."""
    if row.tutorial:
        return Tutorial()
    if row.net == "gpt":
        data = SimpleNamespace(name="tokens", vocab=VOCAB, classes=VOCAB, sample_shape=(LENGTH,))
        return build_model(Options(model=f"gpt:{SIZE}"), data)
    data = SimpleNamespace(name="drawn", vocab=None, classes=10, sample_shape=row.shape[1:])
    return build_model(Options(model=row.net), data)


def pictures(row, folder, rank, ranks):
    """This rank's batches, for ever."""
    x, y, *_ = runpy.run_path(f"{folder}/mine.py")["data"]()
    for epoch in itertools.count():
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for ids in order[rank::ranks].split(row.size // ranks):
            yield x.index_select(0, ids), y.index_select(0, ids)


def words(row, folder, rank, ranks):
    """As nanoGPT reads them: windows at random places."""
    numbers = np.memmap(f"{folder}/train.bin", "<u2", "r")
    rng = torch.Generator().manual_seed(rank)
    while True:
        places = torch.randint(len(numbers) - LENGTH, (row.size // ranks,), generator=rng)
        x = torch.stack([torch.from_numpy(numbers[i : i + LENGTH].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(numbers[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in places])
        yield x, y


def by_hand(row, folder, device, best):
    """The loop; every tenth loss is looked at."""
    if best:
        keep_memory()
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    ranks = distributed.get_world_size()
    torch.manual_seed(0)
    net = net_of(row).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=best) if ranks > 1 else net
    if best:
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
    else:
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    source = words if row.net == "gpt" else pictures
    casting = torch.autocast(device, torch.bfloat16) if row.bf16 else nullcontext()
    for step, (x, y) in enumerate(source(row, folder, rank, ranks), 1):
        x = x.to(device)
        y = y.to(device)
        with casting:
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        if row.net == "gpt":
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        if step % 10 == 0:
            loss.item()


# ---- a turn ----
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
        number = next(made)
        if number == steps:
            began = now()
        if number == 2 * steps:
            file.write_text(str(now() - began))
            os._exit(0)

    register_optimizer_step_post_hook(update)


def turn(rank, name, whose, folder, device, port):
    """A rank of one turn, in a process of its own."""
    row = ROWS[name]
    ranks = ranks_on(device)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {variable: str(number) for variable, number in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    count(row.steps, folder / f"cost-{rank}", device)
    if whose != "ours":
        by_hand(row, folder, device, whose == "best")
    sys.argv = [
        "train_ddp.py",
        f"--global-batch-size={row.size}",
        f"--run-dir={folder}/run",
        f"--device={device}",
        "--optimizer=adamw",
        "--no-tensorboard",
        "--progress=off",
    ]
    if row.net == "gpt":
        sys.argv += [f"--model=gpt:{SIZE}", f"--dataset=tokens:{LENGTH}", f"--data-dir={folder}"]
        sys.argv += [f"--vocab-size={VOCAB}", f"--clip-grad-norm={CLIP}"]
    else:
        sys.argv += [f"--model={row.net}", f"--dataset={folder}/mine.py:data"]
    if row.bf16:
        sys.argv += ["--amp=bf16"]
    runpy.run_path(f"{ROOT}/train_ddp.py", run_name="__main__")


def ranks_on(device):
    return 2 if device == "cpu" else 1


def loop(name, rounds, folder, device):
    row = ROWS[name]
    if row.net == "gpt":
        numbers = np.random.default_rng(0).integers(0, VOCAB, row.shape, np.uint16)
        numbers.tofile(folder / "train.bin")
        numbers[:2000].tofile(folder / "val.bin")
    else:
        (folder / "mine.py").write_text(DATA.format(shape=row.shape))

    def cost(whose):
        shutil.rmtree(folder / "run", ignore_errors=True)
        given = (name, whose, folder, device, free_port())
        multiprocessing.start_processes(turn, given, ranks_on(device), start_method="fork")
        return sum(float((folder / f"cost-{rank}").read_text()) for rank in range(ranks_on(device)))

    costs = take_turns({whose: partial(cost, whose) for whose in ("ours", "best", "plain")}, rounds)
    measure = "the CPU time of" if device == "cpu" else "the time of"
    print(f"{name:>9}: {ratio(costs['ours'], costs['plain'])} {measure} a plain loop by hand", flush=True)
    return f"{ratio(costs['ours'], costs['best'])} {measure} the best loop by hand"


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
    args = arguments(__doc__, what="net,pool,resnet18,gpt,bf16,memory,index", device="cpu", rounds=20)
    torch.set_num_threads(1)
    for name in args.what.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if name in ROWS:
                found = loop(name, args.rounds, Path(folder), args.device)
            else:
                found = {"memory": memory, "index": index}[name](args.rounds)
        print(f"{name:>9}: {found}", flush=True)


if __name__ == "__main__":
    main()
