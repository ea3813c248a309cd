"""Ours against the loop that people write by hand: steps of training, tokens, pictures; and what feeds them.

    python tests/bench/loops.py                             # all of them, about four minutes
    python tests/bench/loops.py --what tokens --rounds 40   # net, resnet18, tokens, pictures, memory, index

Both take turns, a second or two each, so that whatever else the machine does hits both. The figure is the
CPU time of all processes, ours by theirs: median over the rounds, and the quartiles.
"""
import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

import numpy as np
import torch
import torch.nn.functional as F
from ranks import fork_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.data import batches, load_data
from common.models import build_model
from common.options import Options
from common.sampler import ElasticSampler
from common.training import TrainState, backward, build_optimizer, distribute, find_task, prepare
from common.world.join import keep_memory


class Tutorial(nn.Module):
    """The MNIST network, as tutorials write it."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.drop = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5), nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.drop(self.conv2(x)), 2))
        return self.fc2(F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training))


def ours(world, data=None, **flags):
    """A generator that makes a step of the inner loop of train_ddp.py each time."""
    opts = Options(device="cpu", workers=0, check_every=0, **flags)
    data = data or load_data(opts, world)
    order = ElasticSampler(data.train, opts.global_batch_size, world.rank, world.size, opts.seed)
    task = find_task(opts)
    net = prepare(build_model(opts, data), opts, world, data, task)
    state = TrainState(net, build_optimizer(net, opts), opts, len(data.train), order=order.name, task=task)
    model = distribute(net, opts, world)
    net.train()
    for epoch in range(10**6):
        order.set_epoch(epoch, 0)
        for batch in batches(data.train, order, opts):
            totals = backward(model, batch, state, world)
            if (state.step + 1) % opts.log_every == 0:
                world.all_sum(totals)
            state.update(batch.size)
            yield


def bare(world, net, feed, **how):
    """The same by hand; every tenth loss is looked at."""
    model = DistributedDataParallel(net) if world.size > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, **how)
    for step, (x, y) in enumerate(feed):
        out = model(x)
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            loss.item()
        yield


def in_memory(world, x, y, size):
    """Batches of tensors, a new order every epoch."""
    epoch = 0
    while True:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[world.rank::world.size]
        for ids in order.split(size // world.size):
            yield x.index_select(0, ids), y.index_select(0, ids)
        epoch += 1


def windows(path, length, size):
    """nanoGPT's get_batch."""
    while True:
        tokens = np.memmap(path, np.uint16, "r")
        ids = torch.randint(len(tokens) - length - 1, (size,)).tolist()
        x = torch.stack([torch.from_numpy(tokens[i:i + length].astype(np.int64)) for i in ids])
        yield x, torch.stack([torch.from_numpy(tokens[i + 1:i + 1 + length].astype(np.int64)) for i in ids])


def cost(world, make, steps):
    """CPU seconds of so many steps, after as many that do not count, over all ranks."""
    loop = make(world)
    for _ in range(steps):
        next(loop)
    began = time.process_time()
    for _ in range(steps):
        next(loop)
    return float(world.all_sum(torch.tensor(time.process_time() - began, dtype=torch.float64)))


def take_turns(ranks, rounds, steps, mine, theirs):
    """[(CPU seconds of ours, of a bare loop)], in turn, each in processes of its own."""
    def own(world):
        keep_memory()
        return cost(world, mine, steps)

    def bare_one(world):
        return cost(world, theirs, steps)

    found = []
    for number in range(rounds):
        pair = [(own, bare_one)[which] for which in (0, 1)[::1 - 2 * (number % 2)]]
        costs = {loop: fork_ranks(ranks, loop, deadline=300)[0] for loop in pair}
        found.append((costs[own], costs[bare_one]))
    return found


def mnist_net(rounds, folder):
    flags = {"dataset": "digits", "global_batch_size": 128}
    data = load_data(Options(**flags), None)
    x, y = data.train.fetch(range(len(data.train)))
    return take_turns(2, rounds, 60, lambda world: ours(world, data, model="net", **flags),
                      lambda world: bare(world, Tutorial(), in_memory(world, x, y, 128)))


def resnet18(rounds, folder):
    (folder / "mine.py").write_text(
        "import torch\ndef data():\n rng = torch.Generator().manual_seed(0)\n"
        " x = torch.randn(512, 3, 64, 64, generator=rng), torch.randint(0, 10, (512,), generator=rng)\n"
        " return *x, *x\n")
    from torchvision import models
    flags = {"dataset": f"{folder}/mine.py:data", "global_batch_size": 32}
    data = load_data(Options(**flags), None)
    return take_turns(2, rounds, 4, lambda world: ours(world, data, model="resnet18", **flags),
                      lambda world: bare(world, models.resnet18(num_classes=10),
                                         in_memory(world, data.train.x, data.train.y, 32)))


def tokens(rounds, folder):
    for name, size in (("train", 10**6), ("val", 10**4)):
        np.random.default_rng(0).integers(0, 50304, size).astype("<u2").tofile(folder / f"{name}.bin")
    flags = {"dataset": "tokens:128", "data_dir": str(folder), "vocab_size": 50304, "model": "gpt:2x2x64",
             "global_batch_size": 8}
    opts = Options(**flags)
    data = load_data(opts, None)
    return take_turns(1, rounds, 8, lambda world: ours(world, data, **flags),
                      lambda world: bare(world, build_model(opts, data),
                                         windows(folder / "train.bin", 128, 8), fused=True))


def pictures(rounds, folder):
    """Loading alone, two workers; a turn is an epoch, in a process of its own, whose workers end with it."""
    from PIL import Image
    from torchvision import datasets, transforms
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(400 if part == "train" else 2):
            (folder / part / str(number % 2)).mkdir(parents=True, exist_ok=True)
            rows, columns = rng.integers(160, 420), rng.integers(180, 500)
            wave = 128 + 60 * np.sin(np.arange(columns) / 9)[None, :, None]
            wave = (wave + rng.normal(0, 20, (rows, columns, 3))).clip(0, 255).astype(np.uint8)
            Image.fromarray(wave).save(folder / part / str(number % 2) / f"{number}.jpg")
    opts = Options(dataset="imagefolder", data_dir=str(folder), global_batch_size=32, workers=2, device="cpu")
    data = load_data(opts, SimpleNamespace(once_per_node=lambda name, find: find()))
    theirs = datasets.ImageFolder(folder / "train", transforms.Compose([
        transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]))

    def epoch(loader):
        began = sum(os.times()[:4])
        for _ in loader:
            pass
        return sum(os.times()[:4]) - began

    def one(world, number, mine):
        if not mine:
            return epoch(torch.utils.data.DataLoader(theirs, 32, shuffle=True, num_workers=2))
        keep_memory()
        order = ElasticSampler(data.train, 32)
        order.set_epoch(number)
        return epoch(batches(data.train, order, opts))

    found = [{mine: fork_ranks(1, one, number, mine)[0] for mine in (number % 2 == 0, number % 2 == 1)}
             for number in range(rounds + 1)]
    return [(pair[True], pair[False]) for pair in found[1:]]


def memory(rounds, folder):
    """Images per CPU second out of memory, with everything a batch needs."""
    keep_memory()
    opts = Options(dataset="digits", device="cpu")
    data, found = load_data(opts, None), []
    for epoch in range(rounds):
        order = ElasticSampler(data.train, 64)
        order.set_epoch(epoch)
        began = time.process_time()
        for _ in batches(data.train, order, opts):
            pass
        found.append(len(data.train) / (time.process_time() - began))
    return found


def index(rounds, folder):
    """Milliseconds to the first batch of ids of 10^12 samples, anywhere in an epoch."""
    found = []
    for epoch in range(rounds):
        order = ElasticSampler(10**12, 64)
        began = time.perf_counter()
        order.set_epoch(epoch, 64 * epoch**3)
        next(iter(order))
        found.append(1e3 * (time.perf_counter() - began))
    return found


KINDS = {"net": mnist_net, "resnet18": resnet18, "tokens": tokens, "pictures": pictures, "memory": memory,
         "index": index}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=20)
    opts = parser.parse_args()
    torch.set_num_threads(1)
    for name in opts.what.split(","):
        with tempfile.TemporaryDirectory() as folder:
            rounds = KINDS[name](opts.rounds, Path(folder))
        if isinstance(rounds[0], float):
            print(f"{name:>9}: {statistics.median(rounds):,.4g}", flush=True)
            continue
        low, middle, high = statistics.quantiles([mine / theirs for mine, theirs in rounds], n=4)
        print(f"{name:>9}: {middle:.3f} x the CPU time (quartiles {low:.3f} to {high:.3f}), "
              f"{1 / middle:.3f} x the speed", flush=True)


if __name__ == "__main__":
    main()
