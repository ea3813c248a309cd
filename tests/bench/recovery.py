"""What a large state costs: a save, and a death (SIGKILL of one of two workers until the next first step).

    python tests/bench/recovery.py --mb 1 100 1000 4000 --rounds 2  # growth: a line for each size
    python tests/bench/recovery.py --mb 800 --rounds 5 -- --memory-tier off

Flags after -- go to the training, under launch/local.sh. Two ordinary steps lie in each recovery (the one
that was cut off and the first one of the next life) and are taken off. Interleaved with it, in one process:
`torch.save`, fsync and `torch.load` of as many bytes, and one memcpy of them (of 1 GB at most, in proportion
if there are more). Medians, and the median of each round's ratio. `stall` is how long the loop waits for a
save, `durable` until that save is on the disk and read back, `restore` the part of a recovery that loads,
`memory` the most that both workers and the folder in memory have at once.
"""
import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 1000  # MB of the yardsticks
COLUMNS = ("recovery s", "a step s", "save+load s", "ratio", "memcpy s", "stall s", "durable s", "restore s",
           "memory MB")
DIGITS = {"memcpy s": 4, "stall s": 4, "memory MB": 0}
OWN = '''
import os, time
import torch
from torch import nn
from common.checkpoint import CheckpointStore
LAYERS = {layers}
class Net(nn.Sequential):
    def forward(self, x):
        if os.environ.get("RANK") == "0" and self.training:
            with open("{folder}/steps", "a") as file:
                file.write(f"{{time.time()}}\\n")
        return super().forward(x)
def net(data):
    return Net(*[nn.Linear(1024, 1024) for _ in range(LAYERS)], nn.Linear(1024, 10))
def timed(self, state, save=CheckpointStore.save):
    began = time.monotonic()
    save(self, state)
    if self.fence:
        with open("{folder}/stalls", "a") as file:
            file.write(f"{{time.monotonic() - began}}\\n")
CheckpointStore.save = timed
def data():
    x, y = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0)), torch.arange(4096) % 10
    return x, y, x[:8], y[:8]
'''


class Run:
    """A training under launch/local.sh whose workers are killed one at a time."""

    def __init__(self, folder, mb, flags):
        self.folder = folder
        folder.mkdir()
        layers = round(mb / 12.6)  # weights and two moments of Adam: 12 bytes a weight
        (folder / "own.py").write_text(OWN.format(layers=layers, folder=folder))
        command = ["launch/local.sh", "--nproc", "2", "--model", f"{folder}/own.py:net",
                   "--dataset", f"{folder}/own.py:data", "--run-dir", folder / "run", "--epochs", "1000000",
                   "--eval-every", "0", "--global-batch-size", "8", "--lr", "1e-6", "--save-every", "0",
                   "--save-seconds", "0", "--check-every", "0", "--no-tensorboard", "--log-every", "5"]
        self.output = open(folder / "output", "w")
        self.process = subprocess.Popen([*map(str, command), *flags], cwd=ROOT, stdout=self.output,
                                        stderr=self.output)

    def events(self, name):
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "run" / "ledger.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    found += [event] * (event.get("event") == name)
        return found

    def steps(self, name="steps"):
        with contextlib.suppress(FileNotFoundError):
            return [float(line) for line in (self.folder / name).read_text().rpartition("\n")[0].split()]
        return []

    def save(self):
        """(how long the loop waits, how long until it is read back) of a save that a person asks for."""
        count, stalls = len(self.events("save")), len(self.steps("stalls"))
        (self.folder / "run/control/save").touch()
        self.wait(lambda: len(self.events("save")) > count, "a save")
        return self.steps("stalls")[stalls:][-1], self.events("save")[-1]["save_s"]

    def memory(self):
        """Bytes that the workers alone have, and those of the checkpoints in memory."""
        total = 0
        with contextlib.suppress(FileNotFoundError):  # they go when the disk has them
            for folder in Path("/dev/shm").glob(f"elastic-{os.getuid()}-*"):
                total += sum(path.stat().st_blocks << 9 for path in folder.rglob("*"))
        for pid in self.events("life")[-1]["pids"]:
            with contextlib.suppress(OSError, StopIteration), open(f"/proc/{pid}/status") as file:
                total += next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
        return total

    def wait(self, done, what):
        deadline = time.monotonic() + 300
        while not done():
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"{what} did not come:\n{(self.folder / 'output').read_text()[-3000:]}")
            time.sleep(0.002)

    def recover(self, draw):
        """Seconds from a kill to the next life's first step, less two ordinary steps; a step; the restore."""
        count, before = len(self.events("first_step")), len(self.steps())
        self.wait(lambda: len(self.steps()) > before + 6, "six steps")
        times = self.steps()[-5:]
        step = statistics.median(b - a for a, b in zip(times, times[1:], strict=False))
        pids = self.events("life")[-1]["pids"]
        os.kill(draw.choice(pids), signal.SIGKILL)
        killed = time.time()
        self.wait(lambda: len(self.events("first_step")) > count, "the next life")
        seconds = self.events("first_step")[-1]["t"] - killed - 2 * step
        return seconds, step, self.events("life")[-1]["restore_s"]

    def quiet(self):
        """Until the life's disk copy is written, so that it does not slow the yardsticks."""
        last = self.events("rescue")[-1]["step"]
        self.wait(lambda: any(event["step"] >= last for event in self.events("save")), "the disk copy")

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        self.output.close()


@contextlib.contextmanager
def most(look):
    """A list that holds, at the end of the block, the largest value that `look` had in it."""
    over, found = threading.Event(), [look()]

    def watch():
        while not over.wait(0.02):
            found[0] = max(found[0], look())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def yardsticks(folder, mb):
    """Seconds of (save, fsync and load of as many bytes; one memcpy of them)."""
    import torch
    size = int(min(mb, LARGEST) * 1e6)
    state = {f"tensor {at}": torch.ones(min(4 << 20, size - at) // 4 + 1) for at in range(0, size, 4 << 20)}
    one, other = (torch.full((size,), value, dtype=torch.uint8) for value in (1, 2))
    began = time.perf_counter()
    with open(folder / "whole.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    torch.load(folder / "whole.pt", weights_only=True)
    middle = time.perf_counter()
    ctypes.memmove(one.data_ptr(), other.data_ptr(), size)
    times = mb * 1e6 / size
    return times * (middle - began), times * (time.perf_counter() - middle)


def measure(mb, rounds, flags, draw, report):
    """A row of COLUMNS for each round; the first round warms up and does not count."""
    with tempfile.TemporaryDirectory(prefix="recovery-bench-") as folder:
        run, rows = Run(Path(folder, "own"), mb, flags), []
        try:
            run.wait(lambda: run.events("first_step"), "the first life")
            for number in range(rounds + 1):
                stall, durable = run.save()
                with most(run.memory) as memory:
                    recovery, step, restore = run.recover(draw)
                    run.quiet()
                saved, copied = yardsticks(Path(folder), mb)
                row = (recovery, step, saved, recovery / saved, copied, stall, durable, restore,
                       memory[0] / 1e6)
                rows += [row] * (number > 0)
        finally:
            run.close()
        if report:
            subprocess.run([sys.executable, "-m", "common.ledger", run.folder / "run"], cwd=ROOT, check=False)
    return rows


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 100, 800], help="of net and optimizer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", action="store_true", help="the parts of each restart, from the ledger")
    parser.add_argument("flags", nargs="*", help="flags of the training, after --")
    given, draw = parser.parse_args(), random.Random(0)
    print(f"{'MB':>6}", *(f"{name:>{len(name) + 1}}" for name in COLUMNS), "   recoveries")
    for mb in given.mb:
        rows = measure(mb, given.rounds, given.flags, draw, given.report)
        middle = zip(COLUMNS, map(statistics.median, zip(*rows, strict=True)), strict=True)
        print(f"{mb:6.0f}", *(f"{value:{len(name) + 1}.{DIGITS.get(name, 2)}f}" for name, value in middle),
              "  ", *(f"{row[0]:.2f}" for row in rows), flush=True)


if __name__ == "__main__":
    main()
