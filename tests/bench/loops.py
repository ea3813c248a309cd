"""Ours against the DDP loops that people write by hand; and what feeds it.

    python tests/bench/loops.py                               # all of it, 15 minutes; an hour if it is busy
    python tests/bench/loops.py --what gpt,bf16 --rounds 20   # net, resnet18, gpt, bf16, memory, index

A row is a net, the same one on all sides. The whole of train_ddp.py, the best loop by hand and the plain one
train it in turn, with two processes each. The figures are the CPU time of both processes, ours by theirs. The
best loop has a fused AdamW, gradients as views of their buckets, and memory that is kept; the plain one is as
tutorials write it. `gpt` and `bf16` are a small GPT over tokens on the disk, clipped by all.

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
from functools import partial
from pathlib import Path
from typing import NamedTuple

from turns import ROOT, arguments, compare, ratio  # isort: skip  (first: it finds the others)

import numpy as np
import torch
import torch._dynamo  # DDP imports it: here once, and not in every turn
import torch.nn.functional as F
from jobs import free_port
from samples import Facts
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
GPT = "gpt:4x4x128"
CLIP = 1.0
RANKS = 2


class Row(NamedTuple):
    """A net, and how it is trained."""

    net: str
    shape: tuple  # of all samples; of a GPT the number of tokens
    size: int  # of a batch
    steps: int  # that count, after as many that do not
    bf16: bool = False


ROWS = {
    "net": Row("net", (60_000, 1, 28, 28), 128, 60),
    "resnet18": Row("resnet18", (512, 3, 64, 64), 32, 4),
    "gpt": Row(GPT, (200_000,), 16, 10),
    "bf16": Row(GPT, (200_000,), 16, 10, bf16=True),
}


# ---- loops by hand ----
def net_of(row):
    """That of train_ddp.py."""
    data = Facts("tokens", VOCAB, (LENGTH,), VOCAB) if row.net == GPT else Facts("drawn", 10, row.shape[1:])
    return build_model(Options(model=row.net), data)


def pictures(row, folder, rank):
    """This rank's batches, for ever."""
    x, y, *_ = runpy.run_path(f"{folder}/mine.py")["data"]()
    for epoch in itertools.count():
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for ids in order[rank::RANKS].split(row.size // RANKS):
            yield x.index_select(0, ids), y.index_select(0, ids)


def words(row, folder, rank):
    """As nanoGPT reads them: windows at random places."""
    numbers = np.memmap(f"{folder}/train.bin", "<u2", "r")
    rng = torch.Generator().manual_seed(rank)
    while True:
        places = torch.randint(len(numbers) - LENGTH, (row.size // RANKS,), generator=rng)
        x = torch.stack([torch.from_numpy(numbers[i : i + LENGTH].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(numbers[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in places])
        yield x, y


def by_hand(row, folder, best):
    """The loop; every tenth loss is looked at."""
    if best:
        keep_memory()
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = net_of(row)
    model = DistributedDataParallel(net, gradient_as_bucket_view=best)
    if best:
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
    else:
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    source = words if row.net == GPT else pictures
    for step, (x, y) in enumerate(source(row, folder, distributed.get_rank()), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=row.bf16):
            out = model(x)
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        if row.net == GPT:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        if step % 10 == 0:
            loss.item()


# ---- a turn ----
def count(steps, file):
    """From now on: the CPU time of so many updates, after as many that do not count, goes into a file."""
    made = itertools.count(1)
    began = 0.0

    def update(optimizer, *_):
        nonlocal began
        number = next(made)
        if number == steps:
            began = time.process_time()
        if number == 2 * steps:
            file.write_text(str(time.process_time() - began))
            os._exit(0)

    register_optimizer_step_post_hook(update)


def turn(rank, name, whose, folder, port):
    """A rank of one turn, in a process of its own."""
    row = ROWS[name]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ |= {variable: str(number) for variable, number in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    count(row.steps, folder / f"cost-{rank}")
    if whose != "ours":
        by_hand(row, folder, whose == "best")
    flags = f"--global-batch-size={row.size} --device=cpu --optimizer=adamw --no-tensorboard --progress=off"
    sys.argv = ["train_ddp.py", f"--run-dir={folder}/run", f"--model={row.net}", *flags.split()]
    if row.net == GPT:
        sys.argv += [f"--dataset=tokens:{LENGTH}", f"--data-dir={folder}"]
        sys.argv += [f"--vocab-size={VOCAB}", f"--clip-grad-norm={CLIP}"]
    else:
        sys.argv += [f"--dataset={folder}/mine.py:data"]
    if row.bf16:
        sys.argv += ["--amp=bf16"]
    runpy.run_path(f"{ROOT}/train_ddp.py", run_name="__main__")


def loop(name, rounds, folder):
    row = ROWS[name]
    if row.net == GPT:
        numbers = np.random.default_rng(0).integers(0, VOCAB, row.shape, np.uint16)
        numbers.tofile(folder / "train.bin")
        numbers[:2000].tofile(folder / "val.bin")
    else:
        (folder / "mine.py").write_text(DATA.format(shape=row.shape))

    def cost(whose):
        shutil.rmtree(folder / "run", ignore_errors=True)
        multiprocessing.start_processes(turn, (name, whose, folder, free_port()), RANKS, start_method="fork")
        return sum(float((folder / f"cost-{rank}").read_text()) for rank in range(RANKS))

    costs = compare(
        name, {whose: partial(cost, whose) for whose in ("ours", "best", "plain")}, rounds, "best"
    )
    print(f"{name}: {ratio(costs['ours'], costs['plain'])} plain", flush=True)


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
    print(f"memory: {statistics.median(speeds):,.0f} images per CPU second")


def index(rounds):
    """The first ids from anywhere in an epoch."""
    times = []
    for epoch in range(rounds):
        order = ElasticSampler(10**12, 64)
        began = time.perf_counter()
        order.set_epoch(epoch, 64 * epoch**3)
        next(iter(order))
        times.append(1e3 * (time.perf_counter() - began))
    print(f"index: {statistics.median(times):.2f} ms to the first batch of ids of 10^12 samples")


def main():
    args = arguments(__doc__, what="net,resnet18,gpt,bf16,memory,index", rounds=20)
    torch.set_num_threads(1)
    for name in args.what.split(","):
        with tempfile.TemporaryDirectory() as folder:
            if name in ROWS:
                loop(name, args.rounds, Path(folder))
            else:
                {"memory": memory, "index": index}[name](args.rounds)


if __name__ == "__main__":
    main()
