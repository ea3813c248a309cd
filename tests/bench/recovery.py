"""From SIGKILL of one of two workers to the next step; by the size of the state.

    python tests/bench/recovery.py                       # a small net, against a bare DDP script
    python tests/bench/recovery.py --mb 800 --rounds 5

In turn: a bare DDP script under torchrun (nothing is saved or restored: the floor of every cold restart),
this project under plain torchrun and under launch/torchrun.py.
"""

import json
import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

from turns import ROOT, arguments, compare  # isort: skip  (first: it finds the others)

from jobs import Jobs, events, until

LAUNCHERS = {"bare": "torchrun", "torchrun": "torchrun", "ours": ROOT / "launch/torchrun.py"}
FLAGS = (
    *"--epochs=1000000 --eval-every=0 --global-batch-size=8 --lr=1e-6".split(),
    *"--save-every=0 --save-seconds=0 --no-tensorboard --log-every=5".split(),
)
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


def turn(jobs, draw, own, name):
    """Seconds from a kill to the next life's first step, in a training of its own."""
    run = Path(tempfile.mkdtemp(dir=jobs.folder))
    script = [own, run]
    if name != "bare":
        script = [
            ROOT / "train_ddp.py",
            f"--model={own}:net",
            f"--dataset={own}:data",
            f"--run-dir={run}",
            *FLAGS,
        ]
    words = (LAUNCHERS[name], "--nproc_per_node=2", "--max_restarts=1000", *script)
    # without the variable the bare script hangs
    job = jobs.start(*words, cold=True, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def first_steps(count):
        until(lambda: job.poll() is not None or len(events(run, "first_step")) >= count, "a first step")
        return events(run, "first_step")[count - 1]["t"]

    first_steps(1)
    if name != "bare":
        (run / "control/save").touch()
        until(lambda: events(run, "save"), "a save")
    time.sleep(0.3)
    jobs.kill(draw.choice(events(run, "life")[-1]["pids"]))
    killed = time.time()
    seconds = first_steps(2) - killed
    job.kill(signal.SIGTERM)
    job.wait()
    return seconds


def main():
    args = arguments(__doc__, mb=1.0, rounds=4)
    with tempfile.TemporaryDirectory(prefix="recovery-bench-") as folder, Jobs(folder) as jobs:
        own = Path(folder, "own.py")
        own.write_text(OWN.format(layers=max(1, round(args.mb / 12.6))))  # Adam: 12 bytes a weight
        ways = {name: partial(turn, jobs, random.Random(0), own, name) for name in LAUNCHERS}
        print(json.dumps(compare("kill to next step", ways, args.rounds, "bare")))


if __name__ == "__main__":
    main()
