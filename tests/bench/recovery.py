"""From SIGKILL of one of two workers to the next step; by the size of the state.

    python tests/bench/recovery.py                       # a small net, against a bare DDP script
    python tests/bench/recovery.py --mb 800 --rounds 5

In turn: a bare DDP script under torchrun (nothing is saved or restored: the floor of every cold restart),
this project under plain torchrun and under launch/torchrun.py.
"""

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

from turns import ROOT, arguments, ratio, take_turns  # isort: skip  (first: it finds the others)

from jobs import events, until

RESTARTS = ["--nproc_per_node=2", "--max_restarts=1000"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", *RESTARTS]
LAUNCHERS = {
    "bare": TORCHRUN,
    "torchrun": TORCHRUN,
    "ours": [sys.executable, ROOT / "launch/torchrun.py", *RESTARTS],
}
OWN = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
def net(data):
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range({layers})], nn.Linear(1024, 10))
def data():
    x, y = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0)), torch.arange(4096) % 10
    return x, y, x[:8], y[:8]
if __name__ == "__main__":
    dist.init_process_group("gloo")
    bare = net(None)
    model = nn.parallel.DistributedDataParallel(bare)
    optimizer = torch.optim.Adam(bare.parameters(), 1e-6)
    x, y, *_ = data()
    for step in range(10**9):
        ids = torch.randint(0, 4096, (4,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[ids]), y[ids]).backward()
        optimizer.step()
        if step == 0:
            pids = [None, None]
            dist.all_gather_object(pids, os.getpid())
            if dist.get_rank() == 0:
                with open(sys.argv[1] + "/ledger.jsonl", "a") as file:
                    file.write(json.dumps(dict(event="life", t=0, pids=pids)) + "\\n")
                    file.write(json.dumps(dict(event="first_step", t=time.time())) + "\\n")
"""


class Bench:
    """Each turn is a training of its own, that is killed once."""

    def __init__(self, folder, mb):
        self.folder = folder
        self.number = 0
        self.draw = random.Random(0)
        (folder / "own.py").write_text(OWN.format(layers=max(1, round(mb / 12.6))))  # Adam: 12 bytes a weight

    def turn(self, name):
        """Seconds from a kill to the next life's first step."""
        self.number += 1
        run = self.folder / f"run-{self.number}"
        run.mkdir(mode=0o700)
        own = self.folder / "own.py"
        script = [own, run]
        if name != "bare":
            script = [
                ROOT / "train_ddp.py",
                f"--model={own}:net",
                f"--dataset={own}:data",
                f"--run-dir={run}",
                "--epochs=1000000",
                "--eval-every=0",
                "--global-batch-size=8",
                "--lr=1e-6",
                "--save-every=0",
                "--save-seconds=0",
                "--no-tensorboard",
                "--log-every=5",
            ]
        # without the variable the bare script hangs
        env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = subprocess.Popen(
            [*map(str, LAUNCHERS[name]), *map(str, script)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def first_steps(count):
            def there():
                assert job.poll() is None, f"{name} has ended"
                return len(events(run, "first_step")) >= count

            until(there, "a first step")
            return events(run, "first_step")[-1]["t"]

        try:
            first_steps(1)
            if name != "bare":
                (run / "control/save").touch()
                until(lambda: events(run, "save"), "a save")
            time.sleep(0.3)
            os.kill(self.draw.choice(events(run, "life")[-1]["pids"]), signal.SIGKILL)
            killed = time.time()
            return first_steps(2) - killed
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(300)


def main():
    args = arguments(__doc__, mb=1.0, rounds=4)
    with tempfile.TemporaryDirectory(prefix="recovery-bench-") as folder:
        bench = Bench(Path(folder), args.mb)
        ways = {name: lambda name=name: bench.turn(name) for name in LAUNCHERS}
        costs = take_turns(ways, args.rounds)
    for name, seconds in costs.items():
        times = ratio(seconds, costs["bare"])
        print(f"{name:9} kill to next step {statistics.median(seconds):.2f} s, {times} bare")
    print(json.dumps(costs))


if __name__ == "__main__":
    main()
