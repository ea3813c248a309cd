"""What a run's age costs: a run with a year's files beside the same run when it was young.

    python tests/bench/age.py                                          # minutes; 0.5 GB in a temporary folder
    python tests/bench/age.py --rows 100000 --lives 1000 --kept 100    # a month's

In turn: a start of either run. A start counts its CPU time up to the end of one step, as the seconds to that
step show what else the machine does. Then the report.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from turns import ROOT, arguments, take_turns  # isort: skip  (first: it finds the others)

from jobs import events

from common.checkpoint.folder import FILES, checkpoints, folder_name
from common.checkpoint.reader import read_facts
from common.checkpoint.writer import facts_to_json
from common.sealed import sealed, sha

RANKS = 8
STEPS = 1000  # of a life
LIFE_SECONDS = 3000
ENTRIES = 10  # of its clock
OWN = """
import torch
from torch import nn
def net(data):
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(80)], nn.Linear(8, 10))
def data():
    x, y = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)), torch.arange(256) % 10
    return x, y, x[:8], y[:8]
"""


def grow_old(run, rows, lives, kept):
    """Gives a run so many logged rows, lives and kept checkpoints; returns its last step."""
    last = lives * STEPS
    with open(run / "metrics.jsonl", "w") as file:
        for number in range(1, rows + 1):
            row = {
                "step": number * last // rows,
                "epoch": 1,
                "loss": 0.5,
                "acc": 0.1,
                "lr": 0.001,
                "time": 0.5,
            }
            file.write(f"{json.dumps(row)}\n")
    (first,) = events(run, "life")
    with open(run / "ledger.jsonl", "w") as file:
        for number in range(lives):
            t = first["t"] + LIFE_SECONDS * (number - lives)
            for k, event in enumerate(life_of(first, number * STEPS, t)):
                moment = {"t": t + LIFE_SECONDS * k / 40}
                file.write(f"{json.dumps(moment | event | moment | {'life': f'{number:012d}'})}\n")
    step, folder = checkpoints(run)[0]
    manifest, facts = read_facts(step, folder)
    for number in range(1, kept + 1):
        facts |= {"step": number * last // kept}
        state = facts_to_json(facts)
        new = folder.with_name(folder_name(facts["step"]))
        new.mkdir()
        for name in FILES.values():
            os.link(folder / name, new / name)
        (new / "state.json").write_bytes(state)
        (new / "manifest.json").write_bytes(sealed(manifest | {"step": facts["step"], "state": sha(state)}))
    shutil.rmtree(folder)
    return last


def life_of(first, step, t):
    """The events of a life that was killed."""
    end = step + STEPS
    yield first | {"world": RANKS, "pids": [*range(RANKS)], "hosts": ["a"] * RANKS, "step": step, "began": t}
    yield {"event": "first_step", "rank": 0, "step": step + 1}
    for k in range(1, ENTRIES + 1):
        seconds = {"data_wait_s": 1.0, "steps_s": 250.0, "save_stall_s": 0.5}
        yield {"event": "steps", "rank": 0, "step": step + STEPS * k // ENTRIES} | seconds
    yield {"event": "save", "rank": 0, "step": end, "save_s": 0.1}
    for rank in range(1, RANKS):
        yield {"event": "peer", "rank": rank, "step": end, "why": ""}
        yield {"event": "left", "rank": rank, "stepped": t + LIFE_SECONDS * 0.9}


class Bench:
    """`steps` are made by each run so far; `waits` are seconds to a first step."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "own.py").write_text(OWN)
        self.steps = {"young": 0, "old": 0}
        self.waits = {"young": [], "old": []}

    def start(self, name):
        """CPU seconds of a start that makes one step."""
        run = self.folder / name
        self.steps[name] += 1
        words = [
            f"--model={self.folder}/own.py:net",
            f"--dataset={self.folder}/own.py:data",
            f"--run-dir={run}",
            f"--max-steps={self.steps[name]}",
            f"--keep-every={STEPS}",
            *"--epochs=100000000 --eval-every=0 --save-every=0 --save-seconds=0 --no-tensorboard".split(),
        ]
        _, cpu_seconds, _ = cost(ROOT / "train_ddp.py", *words)
        lines = (run / "ledger.jsonl").read_bytes().splitlines()[-20:]
        told = {event["event"]: event for event in map(json.loads, lines)}  # the last of each name
        self.waits[name].append(told["first_step"]["t"] - told["life"]["began"])
        return cpu_seconds


def cost(*words):
    """(seconds, of which on a CPU, peak MB) of a Python command."""
    began = time.monotonic()
    job = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0
    ticks = []
    while job.poll() is None:
        with suppress(OSError, StopIteration):  # it has ended meanwhile
            lines = Path(f"/proc/{job.pid}/status").read_text().splitlines()
            peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
            ticks = Path(f"/proc/{job.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        time.sleep(0.01)
    assert job.returncode == 0, words
    return time.monotonic() - began, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), peak / 1024


def main():
    args = arguments(__doc__, rows=1_000_000, lives=10_000, kept=1000, rounds=3)
    with tempfile.TemporaryDirectory(prefix="age-bench-") as folder:
        bench = Bench(Path(folder))
        bench.start("young")
        bench.start("old")
        bench.steps["old"] = grow_old(bench.folder / "old", args.rows, args.lives, args.kept)
        ways = {name: lambda name=name: bench.start(name) for name in bench.steps}
        costs = take_turns(ways, args.rounds)
        report = cost("-m", "common.ledger", bench.folder / "old")
    for name, seconds in costs.items():
        to_a_step = statistics.median(bench.waits[name][-args.rounds :])
        middle = statistics.median(seconds)
        print(f"{name:5} start: {middle:.2f} s of CPU, {to_a_step:.2f} s to the first step")
    print("report: {:.2f} s, {:.2f} s of CPU, {:.0f} MB".format(*report))
    print(json.dumps(costs))


if __name__ == "__main__":
    main()
