"""How long a restart takes: SIGKILL of one of two workers until the next life's first step is done.

    python tests/bench/restart.py --rounds 7

Interleaved: a bare DDP script under torchrun (no checkpoint, nothing to restore: the floor of every cold
restart), this project under plain torchrun, and this project under launch/torchrun.py. Medians, and ratios
to the bare script of the same round.
"""
import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max_restarts=1000"]
BARE = '''
import json, os, sys, time
import torch, torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
net = nn.Sequential(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5),
                    nn.MaxPool2d(2), nn.ReLU(),
                    nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10))
model, optimizer = DDP(net), torch.optim.Adam(net.parameters(), 1e-3)
x, y = torch.randn(12000, 1, 28, 28), torch.randint(0, 10, (12000,))
for step in range(10**9):
    ids = torch.randint(0, 12000, (32,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
    optimizer.step()
    if step == 0:
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if dist.get_rank() == 0:
            with open(sys.argv[1], "a") as f:
                f.write(json.dumps({"event": "first_step", "t": time.time(), "pids": pids}) + "\\n")
'''
SAME_DATA = """
import torch
def data():
    x, y = torch.randn(12000, 1, 28, 28, generator=torch.Generator().manual_seed(0)), torch.arange(12000) % 10
    return x, y, x[:100], y[:100]
"""


class Job:
    """A training that runs on while its workers are killed; `lives` are what its log says of first steps."""

    def __init__(self, command, log):
        self.log = Path(log)
        # without it the bare script hangs
        env = dict(os.environ, OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)

    def lives(self):
        found, pids = [], None
        with contextlib.suppress(FileNotFoundError):
            for line in self.log.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    pids = event.get("pids", pids)
                    if event.get("event") == "first_step":
                        found.append((event["t"], pids))
        return found

    def wait_for(self, count):
        deadline = time.monotonic() + 120
        while len(lives := self.lives()) < count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"{self.process.args} did not come back: {len(lives)} of {count} lives")
            time.sleep(0.005)
        return lives[-1]

    def restart(self, draw):
        """Seconds from a kill to the next first step."""
        count = len(self.lives())
        _, pids = self.wait_for(count)
        time.sleep(0.3)
        os.kill(draw.choice(pids), signal.SIGKILL)
        killed = time.time()
        return self.wait_for(count + 1)[0] - killed


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, seconds = random.Random(given.seed), {"bare": [], "torchrun": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder, "bare.py")
        bare.write_text(BARE)
        same = Path(folder, "same.py")
        same.write_text(SAME_DATA)
        for round_ in range(given.rounds):
            for name in seconds:
                run = Path(folder, f"{name}-{round_}")
                flags = ["train_ddp.py", "--dataset", f"{same}:data", "--run-dir", run, "--epochs", "100000",
                         "--log-every", "100",
                         "--save-every", "0"]
                command = {"bare": [*TORCHRUN, bare, f"{run}.log"], "torchrun": [*TORCHRUN, *flags],
                           "ours": [sys.executable, "launch/torchrun.py", "--nproc_per_node=2", *flags]}[name]
                job = Job(list(map(str, command)), f"{run}.log" if name == "bare" else run / "ledger.jsonl")
                try:
                    job.wait_for(1)
                    seconds[name].append(job.restart(draw))
                finally:
                    job.process.send_signal(signal.SIGTERM)
                    job.process.wait(60)
            print(f"round {round_ + 1}:",
                  *(f"{name} {values[-1]:.2f} s " for name, values in seconds.items()), flush=True)
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds["bare"], strict=True))
        print(f"{name:9} median {statistics.median(values):.2f} s   min {min(values):.2f}   max "
              f"{max(values):.2f}"
              f"   x bare {ratio:.2f}")


if __name__ == "__main__":
    main()
