"""What a save costs the training loop: time blocked against one memcpy of the same bytes and against other
ways; memory; loading.

    python tests/bench/checkpoint.py --mb 100    # all ways in rotation in one process: read the ratios
    python tests/bench/checkpoint.py --mb 1000 --rounds 5
    python tests/bench/checkpoint.py --what memory --mb 300   # each way in a process of its own: peak
    python tests/bench/checkpoint.py --what load --mb 300    # until net and optimizer hold the values, hashed

`blocked` is the wall time of the call; `durable` until the bytes are on the disk (for those who sync: ours
also reads them back). A way that writes in the background is waited for before the next one starts.
"""
import argparse
import contextlib
import ctypes
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402

from common.checkpoint import CheckpointStore  # noqa: E402
from common.options import Options  # noqa: E402
from common.training import TrainState, build_optimizer  # noqa: E402
from common.world import World  # noqa: E402


class Bench:
    def __init__(self, folder, mb):
        self.folder, self.step = Path(folder), 0
        torch.manual_seed(0)
        layers = max(1, round(mb * 1e6 / (12 * 1024 * 1025)))
        self.net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)])
        self.opts = Options(run_dir=self.folder / "run", optimizer="adamw", keep=2, save_every=1,
                            save_seconds=0)
        self.state = TrainState(self.net, build_optimizer(self.net, self.opts), self.opts, samples=10**6)
        for part in self.state.tensors().values():
            for tensor in part.values():
                tensor.data.normal_() if tensor.is_floating_point() else None
        self.bytes = sum(t.numel() * t.element_size() for part in self.state.tensors().values()
                         for t in part.values())
        self.store = self.buffers = self.stager = None

    def ready(self, way):
        """What a way needs before the first save: done once, not timed."""
        if way == "ours" and not self.store:
            world = World(0, 1, 0, 1, 0, (torch.device("cpu"),), uuid.uuid4().hex[:12], 0)
            self.store = CheckpointStore(self.opts, world, "f" * 64, report=lambda text: None)
            self.store.restore(self.state)
        if way == "memcpy" and not self.buffers:
            self.buffers = [torch.empty(self.bytes, dtype=torch.uint8).fill_(value) for value in (1, 2)]
        if way.startswith("dcp") and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        if way == "dcp.async_save, buffers kept" and not self.stager:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
            self.stager = DefaultStager(StagingOptions(False, False, False, False))

    def train(self):
        """A step: every byte of the state changes, caches are cold."""
        self.step += 1
        self.state.step = self.step
        with torch.no_grad():
            for part in self.state.tensors().values():
                torch._foreach_mul_([t for t in part.values() if t.is_floating_point()], 0.999)

    def dict(self):
        return {"model": self.net.state_dict(), "optimizer": self.state.optimizer.state_dict(),
                "step": self.step}

    def save(self, way):
        """Starts a save; returns what waits for its end, or None."""
        path = self.folder / f"{way.replace(' ', '-').replace(',', '')}.{self.step % 2}"
        if way == "memcpy":
            ctypes.memmove(self.buffers[1].data_ptr(), self.buffers[0].data_ptr(), self.bytes)
        elif way == "ours":
            self.store.save(self.state)
            return self.wait_for_ours
        elif way == "torch.save":
            torch.save(self.dict(), path)
        elif way == "torch.save, fsync":
            with open(path, "wb") as file:
                torch.save(self.dict(), file)
                file.flush()
                os.fsync(file.fileno())
        elif way == "dcp.save":
            dcp.save(self.dict(), checkpoint_id=path)
        elif way == "dcp.async_save":
            return dcp.async_save(self.dict(), checkpoint_id=path).result
        elif way == "dcp.async_save, buffers kept":
            answer = dcp.async_save(self.dict(), checkpoint_id=path, async_stager=self.stager)
            return getattr(answer, "upload_completion", answer).result
        return None

    def wait_for_ours(self):
        self.store.wait()
        self.store.check()

    def close(self):
        with contextlib.suppress(Exception):
            self.store and self.store.close()
        with contextlib.suppress(Exception):
            self.stager and self.stager.close()


WAYS = ("memcpy", "ours", "torch.save", "torch.save, fsync", "dcp.save", "dcp.async_save",
        "dcp.async_save, buffers kept")


def time_saves(bench, rounds, ways):
    for way in ways:
        bench.ready(way)
    blocked, durable = {way: [] for way in ways}, {way: [] for way in ways}
    for number in range(rounds + 1):  # the first round warms up and does not count
        for way in ways if number % 2 else reversed(ways):
            bench.train()
            os.sync()
            began = time.perf_counter()
            wait = bench.save(way)
            middle = time.perf_counter()
            if wait:
                wait()
            if number:
                blocked[way].append(middle - began)
                durable[way].append(time.perf_counter() - began)
    print(f"{bench.bytes / 1e6:.0f} MB in {sum(map(len, bench.state.tensors().values()))} tensors, {rounds} "
          f"rounds in rotation, "
          f"torch {torch.__version__}, {torch.get_num_threads()} thread, load {os.getloadavg()[0]:.1f}")
    print(f"{'way':30} {'blocked ms':>11} {'min':>8} {'max':>8} {'x memcpy':>9} {'min/min':>8} "
          f"{'durable ms':>11}")
    limit = blocked[ways[0]]
    for way in ways:
        ratio = statistics.median(mine / theirs for mine, theirs in zip(blocked[way], limit, strict=True))
        middle, least, most = (f(blocked[way]) * 1e3 for f in (statistics.median, min, max))
        print(f"{way:30} {middle:11.1f} {least:8.1f} {most:8.1f} {ratio:9.2f} "
              f"{min(blocked[way]) / min(limit):8.2f} "
              f"{statistics.median(durable[way]) * 1e3:11.1f}")


def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def measure_memory(folder, mb, ways):
    print(f"{'way':30} {'peak MB above before':>21} {'x state':>8}")
    for way in ways:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            bench = Bench(Path(folder) / way.replace(" ", "-"), mb)
            bench.folder.mkdir()
            bench.train()
            with open("/proc/self/clear_refs", "w") as file:  # the peak from here on
                file.write("5")
            before = status("VmRSS")
            bench.ready(way)
            for _ in range(3):
                bench.train()
                wait = bench.save(way)
                wait and wait()
            peak = status("VmHWM") - before
            print(f"{way:30} {peak / 1e6:21.0f} {peak / bench.bytes:8.2f}", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)


def time_loads(bench, rounds):
    bench.ready("ours")
    bench.train()
    bench.save("ours")()
    bench.store.close()
    torch.save(bench.dict(), path := bench.folder / "whole.pt")
    os.sync()

    def ours():
        world = World(0, 1, 0, 1, 0, (torch.device("cpu"),), uuid.uuid4().hex[:12], 0)
        store = CheckpointStore(bench.opts, world, "f" * 64, report=lambda text: None)
        assert store.restore(bench.state)
        store.close()

    def theirs():
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256") if hasattr(hashlib,
                                                           "file_digest") else hashlib.sha256(file.read())
        loaded = torch.load(path, mmap=True, weights_only=True)
        bench.net.load_state_dict(loaded["model"])
        # its load_state_dict would keep pointing into the file
        live = bench.state.optimizer.state_dict()["state"]
        for number, values in loaded["optimizer"]["state"].items():
            for name, value in values.items():
                live[number][name].copy_(value)

    times = {"ours": [], "torch.load(mmap), hashed": []}
    for number in range(rounds + 1):
        for way, load in zip(times, (ours, theirs), strict=True):
            began = time.perf_counter()
            load()
            if number:
                times[way].append(time.perf_counter() - began)
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    for way, values in times.items():
        print(f"{way:30} {statistics.median(values) * 1e3:9.1f} ms, at best {min(values) * 1e3:.1f}")
    print(f"ours / torch.load(mmap), hashed: {ratio:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100, help="size of net and optimizer together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--what", choices=("time", "memory", "load"), default="time")
    parser.add_argument("--ways", help="names separated by semicolons", default=";".join(WAYS))
    parser.add_argument("--dir", help="where to write (default: a temporary folder)")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    ways = given.ways.split(";")
    folder = tempfile.mkdtemp(prefix="checkpoint-bench-", dir=given.dir)
    try:
        if given.what == "memory":
            return measure_memory(folder, given.mb, [way for way in ways if way != "memcpy"])
        bench = Bench(folder, given.mb)
        time_saves(bench, given.rounds, ways) if given.what == "time" else time_loads(bench, given.rounds)
        bench.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
