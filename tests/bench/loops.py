"""Ours against the loop that people write by hand: steps of training, tokens, pictures; and what feeds them.

    python tests/bench/loops.py                             # all of them, about ten minutes
    python tests/bench/loops.py --what tokens --rounds 40   # net, resnet18, tokens, pictures, memory, index

Both take turns, a few seconds each, so that whatever else the machine does hits both. The figure is the
CPU time of all processes, ours by theirs: median over the rounds, and the quartiles. `net`, `resnet18` and
`tokens` start the whole of train_ddp.py, and the loop by hand, with torchrun, in processes of their own.
"""
import argparse
import itertools
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

import numpy as np
import torch
import torch.nn.functional as F
from ranks import fork_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.data import batches, load_data
from common.models import build_model
from common.options import Options
from common.sampler import ElasticSampler
from common.world.world import keep_memory


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


def bare(net, feed, **how):
    """By hand; every tenth loss is looked at."""
    model = DistributedDataParallel(net) if distributed.is_initialized() else net
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, **how)
    for step, (x, y) in enumerate(feed):
        out = model(x)
        loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            loss.item()


def in_memory(x, y, size):
    """Batches of tensors, a new order every epoch."""
    epoch, rank, ranks = 0, distributed.get_rank(), distributed.get_world_size()
    while True:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[rank::ranks]
        for ids in order.split(size // ranks):
            yield x.index_select(0, ids), y.index_select(0, ids)
        epoch += 1


def windows(path, length, size):
    """nanoGPT's get_batch."""
    while True:
        tokens = np.memmap(path, np.uint16, "r")
        ids = torch.randint(len(tokens) - length - 1, (size,)).tolist()
        x = torch.stack([torch.from_numpy(tokens[i:i + length].astype(np.int64)) for i in ids])
        yield x, torch.stack([torch.from_numpy(tokens[i + 1:i + 1 + length].astype(np.int64)) for i in ids])


def counting(steps, found):
    """From now on: the CPU seconds of so many updates, after as many that do not count, go into a file."""
    made, began = itertools.count(1), 0.0

    def update(optimizer, *_):
        nonlocal began
        if len(optimizer.param_groups[0]["params"]) == 1:  # ours tries it on one weight before it begins
            return
        number = next(made)
        if number == steps:
            began = time.process_time()
        if number == 2 * steps:
            Path(found).write_text(str(time.process_time() - began))
            os._exit(0)

    register_optimizer_step_post_hook(update)


def take_turns(kind, rounds, folder):
    """[(CPU seconds of ours, of a bare loop)], over all ranks."""
    ranks, _, prepare, _, _ = LOOPS[kind]
    prepare(folder)
    found = []
    for number in range(rounds):
        costs = {}
        for whose in ("ours", "bare")[::1 - 2 * (number % 2)]:
            shutil.rmtree(folder / "run", ignore_errors=True)
            subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                            f"--nproc_per_node={ranks}", __file__, "--turn", whose, "--what", kind,
                            "--folder", folder], check=True, stdout=subprocess.DEVNULL, timeout=300)
            costs[whose] = sum(float((folder / f"cost-{rank}").read_text()) for rank in range(ranks))
        found.append((costs["ours"], costs["bare"]))
    return found


def turn(kind, whose, folder):
    """In a rank of one turn."""
    ranks, steps, _, flags, by_hand = LOOPS[kind]
    counting(steps, folder / f"cost-{os.environ['RANK']}")
    if whose == "ours":
        sys.argv[1:] = [*flags(folder), f"--run-dir={folder}/run", "--device=cpu", "--workers=0",
                        "--no-tensorboard", "--progress=off"]
        runpy.run_path(str(ROOT / "train_ddp.py"), run_name="__main__")
    if ranks > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    by_hand(folder)


def images(samples, *shape):
    """Writes a file with a dataset of random images."""
    def write(folder):
        (folder / "mine.py").write_text(
            "import torch\ndef data():\n rng = torch.Generator().manual_seed(0)\n"
            f" x = torch.randn({samples}, *{shape}, generator=rng)\n"
            f" y = torch.randint(0, 10, ({samples},), generator=rng)\n return x, y, x[:64], y[:64]\n")
    return write


def image_flags(model, size):
    return lambda folder: [f"--model={model}", f"--dataset={folder}/mine.py:data",
                           f"--global-batch-size={size}"]


def images_by_hand(build, size):
    def train(folder):
        x, y, *_ = runpy.run_path(str(folder / "mine.py"))["data"]()
        bare(build(), in_memory(x, y, size))
    return train


def resnet18():
    from torchvision import models
    return models.resnet18(num_classes=10)


def token_files(folder):
    for name, size in (("train", 10**6), ("val", 10**4)):
        np.random.default_rng(0).integers(0, 50304, size).astype("<u2").tofile(folder / f"{name}.bin")


def token_flags(folder):
    return ["--model=gpt:2x2x64", "--dataset=tokens:128", f"--data-dir={folder}", "--vocab-size=50304",
            "--global-batch-size=8"]


def tokens_by_hand(folder):
    opts = Options(**{flag[2:].split("=")[0].replace("-", "_"): flag.split("=")[1]
                      for flag in token_flags(folder)[:3]}, vocab_size=50304)
    bare(build_model(opts, load_data(opts)), windows(folder / "train.bin", 128, 8), fused=True)


LOOPS = {  # ranks, steps, what is made before, flags of ours, the loop by hand
    "net": (2, 225, images(60_000, 1, 28, 28), image_flags("net", 128), images_by_hand(Tutorial, 128)),
    "resnet18": (2, 8, images(512, 3, 64, 64), image_flags("resnet18", 32), images_by_hand(resnet18, 32)),
    "tokens": (1, 20, token_files, token_flags, tokens_by_hand),
}


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
    data = load_data(opts)
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
    data, found = load_data(opts), []
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


KINDS = {**{kind: partial(take_turns, kind) for kind in LOOPS}, "pictures": pictures, "memory": memory,
         "index": index}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", default=",".join(KINDS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turn", choices=["ours", "bare"], help="for the processes that this one starts")
    parser.add_argument("--folder", type=Path)
    opts = parser.parse_args()
    torch.set_num_threads(1)
    if opts.turn:
        turn(opts.what, opts.turn, opts.folder)
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
