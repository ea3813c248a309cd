"""What training costs on a GPU against a bare loop: step time, idle share, save, rescue and restart.

    python tests/bench/gpu.py --json found.json           # one GPU, about ten minutes
    python tests/bench/gpu.py --nets resnet50 --steps 50
    python tests/bench/gpu.py --overlap                   # several GPUs: is the exchange beside the backward?
    python tests/bench/gpu.py --device cpu --tiny         # that the bench itself runs

The bare loop has the same net, batch, precision and optimizer. Both take turns; figures are medians.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

import torch
from jobs import events
from samples import share_of
from torch import nn

from common.checkpoint import CheckpointStore
from common.models import build_model
from common.options import Options, parse_options
from common.training import TrainState, backward, build_optimizer, distribute, find_task, prepare
from common.world import World

# name: (model, batch, shape of a sample or tokens, options)
NETS = {"resnet50": ("resnet50", 256, (3, 224, 224), {"amp": "bf16", "channels_last": True}),
        "gpt:medium": ("gpt:medium", 16, 1024, {"amp": "bf16"}),
        "net": ("net", 64, (1, 28, 28), {})}
TINY = {"resnet50": ("resnet18", 4, (3, 32, 32), {"amp": "bf16", "channels_last": True}),
        "gpt:medium": ("gpt:2x2x16", 4, 16, {"amp": "bf16"}),
        "net": ("net", 4, (1, 28, 28), {})}


def data_of(shape):
    """What a net is built for, and a function that draws a batch."""

    def draw(ids, *_):
        if isinstance(shape, int):
            x = torch.randint(0, 256, (len(ids), shape + 1))
            return x[:, :-1], x[:, 1:]
        return torch.randn(len(ids), *shape), torch.arange(len(ids)) % 10

    split = type("Split", (), {"fetch": lambda self, *given: draw(*given), "__len__": lambda self: 1 << 20})()
    classes, vocab, shaped = (256, 256, (shape,)) if isinstance(shape, int) else (10, None, shape)
    return SimpleNamespace(name="drawn", train=split, classes=classes, vocab=vocab, sample_shape=shaped), draw


def ours(world, data, opts):
    """(a step of this project, its state)."""
    task = find_task(opts)
    net = prepare(build_model(opts, data), opts, world, data, task)
    state = TrainState(net, build_optimizer(net, opts), opts, 1 << 20, task=task)
    model = distribute(net, opts, world)

    def step(x, y):
        totals = backward(model, share_of(x, y, opts, world.rank, world.size), state, world)
        state.update(len(x))
        return totals
    return step, state


def bare(world, data, opts):
    """The same step as a tutorial writes it."""
    device, last = world.device, torch.channels_last
    net = build_model(opts, data).to(device)
    net = net.to(memory_format=last) if opts.channels_last else net
    model = torch.compile(net) if opts.compile else net
    optimizer = torch.optim.Adam(net.parameters(), opts.lr or 1e-3, fused=True)

    def step(x, y):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        x = x.contiguous(memory_format=last) if opts.channels_last else x
        with torch.autocast(device.type, torch.bfloat16, enabled=opts.amp == "bf16"):
            out = model(x)
            loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def seconds(step, batch, count, device):
    """Of one step, when the device has made `count` of them."""
    began = time.perf_counter()
    for _ in range(count):
        step(*batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / count


def idle_share(step, batch, count, device):
    """The share of the time in which no kernel ran, from a profile; None without a GPU."""
    if device.type != "cuda":
        return None
    spans = [span for _, *span in kernels(step, batch, count, device)]
    return 1 - length(spans) / (max(stop for _, stop in spans) - min(start for start, _ in spans))


def kernels(step, batch, count, device):
    """[(name, start, end)] of all that the GPU did, from a profile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds(step, batch, count, device)
    return [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns())
            for e in profile.profiler.kineto_results.events()
            if e.device_type() == torch.autograd.DeviceType.CUDA]


def length(spans):
    """Of the union of spans."""
    total, end = 0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def hidden_share(found):
    """The share of the time of NCCL's kernels in which another kernel runs, too."""
    nccl = [span for name, *span in found if "nccl" in name.lower()]
    rest = [span for name, *span in found if "nccl" not in name.lower()]
    return (length(nccl) + length(rest) - length(nccl + rest)) / length(nccl)


def overlap(args):
    """{implementation: {ms, hidden}} of a step over all GPUs.

    Since torch 2.15 there are two of NCCL; the default one may order all later kernels behind each exchange.
    """
    found = {}
    for name, chosen in (("default", {}), ("TORCH_DIST_USE_NCCL2=0", {"TORCH_DIST_USE_NCCL2": "0"})):
        command = [sys.executable, "launch/torchrun.py", f"--nproc_per_node={torch.cuda.device_count()}",
                   __file__, "--one-rank", f"--steps={args.steps}"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | chosen, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        print(f"{name:23} {found[name]['ms']:8.2f} ms a step, {found[name]['hidden']:.0%} of the exchange "
              "beside other kernels", flush=True)
    return found


def one_rank(args):
    """What each process of `overlap` does."""
    from common.world import join, leave
    model, batch, shape, more = NETS["gpt:medium"]
    opts = Options(model=model, global_batch_size=batch * int(os.environ["WORLD_SIZE"]), optimizer="adam",
                   device="cuda", tensorboard=False, **more)
    world = join(opts)
    data, draw = data_of(shape)
    step, drawn = ours(world, data, opts)[0], [t.pin_memory() for t in draw(range(opts.global_batch_size))]
    seconds(step, drawn, args.steps, world.device)
    ms = seconds(step, drawn, args.steps, world.device) * 1e3
    hidden = hidden_share(kernels(step, drawn, args.steps, world.device))
    if world.rank == 0:
        print(json.dumps({"ms": ms, "hidden": hidden}), flush=True)
    leave(world)


def step_times(args, device):
    for name in args.nets.split(","):
        model, batch, shape, more = (TINY if args.tiny else NETS)[name]
        for compiled in (False, True) if args.compile else (False,):
            world = World(0, 1, 0, 1, 0, (device,), "bench", 0)
            opts = Options(model=model, global_batch_size=batch, optimizer="adam", compile=compiled,
                           device=device.type, tensorboard=False, **more)
            data, draw = data_of(shape)
            ways = {"ours": ours(world, data, opts)[0], "bare": bare(world, data, opts)}
            drawn = [t.pin_memory() if device.type == "cuda" else t for t in draw(range(batch))]
            times = {way: [] for way in ways}
            for turn in range(args.rounds + 1):
                for way, step in sorted(ways.items(), reverse=bool(turn % 2)):
                    times[way].append(seconds(step, drawn, args.steps, device))
            median = {way: statistics.median(found[1:]) for way, found in times.items()}
            pairs = list(zip(times["ours"], times["bare"], strict=True))[1:]
            yield {"net": name, "compile": compiled, "ours_ms": median["ours"] * 1e3,
                   "bare_ms": median["bare"] * 1e3, "speed": statistics.median(b / o for o, b in pairs),
                   "idle": idle_share(ways["ours"], drawn, args.steps, device),
                   "bare_idle": idle_share(ways["bare"], drawn, args.steps, device)}


def save_stall(args, device):
    """How long `save` holds the loop, and how much longer the step after it is."""
    width, layers = (64, 2) if args.tiny else (4096, 16)  # 1 GiB of weights, three times that with Adam's
    with tempfile.TemporaryDirectory() as folder:
        opts = parse_options("", [f"--run-dir={folder}/run", f"--device={device.type}"], script="ddp")
        world = World(0, 1, 0, 1, 0, (device,), "bench", 0)
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)
        state = TrainState(net, build_optimizer(net, opts), opts, 64)
        store = CheckpointStore(opts, world)
        store.restore(state)
        stalls, longer = [], []

        def step(x):
            net(x).square().mean().backward()
            state.update(8)

        for _ in range(args.rounds + 1):
            x = [torch.ones(8, width, device=device)]
            plain, began = seconds(step, x, 1, device), time.perf_counter()
            store.save(state)
            stalls.append((time.perf_counter() - began) * 1e3)
            longer.append((seconds(step, x, 1, device) - plain) * 1e3)
            store.wait()
        store.close()
    return {"MB": sum(p.nbytes for p in net.parameters()) * 3e-6, "save_ms": statistics.median(stalls[1:]),
            "next_step_ms": statistics.median(longer[1:])}


def lives(args, device):
    """SIGTERM until the process is gone, saved; and the start of the same run until its first step."""
    with tempfile.TemporaryDirectory() as folder:
        run, ended, begun = Path(folder) / "run", [], []
        command = [sys.executable, "train_ddp.py", f"--run-dir={run}", f"--device={device.type}",
                   "--epochs=9999", "--save-every=0", "--save-seconds=0", "--no-tensorboard"]
        for life in range(2 if args.tiny else args.rounds):
            began = time.time()
            with open(Path(folder) / "output", "w") as out:
                job = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
                while len(first := [event["t"] for event in events(run, "first_step")]) <= life:
                    assert job.poll() is None, (Path(folder) / "output").read_text()
                    time.sleep(0.01)
                begun.append(first[-1] - began)
                asked = time.time()
                job.send_signal(signal.SIGTERM)
                job.wait(120)
            ended.append(time.time() - asked)
    return {"stop_s": statistics.median(ended), "restart_s": statistics.median(begun[1:])}


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--device", default="cuda:0")
    flags.add_argument("--nets", default=",".join(NETS))
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--steps", type=int, default=20, help="of a turn")
    flags.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    flags.add_argument("--tiny", action="store_true", help="small nets, one step a turn, nothing compiled")
    flags.add_argument("--json", help="a file for the figures")
    flags.add_argument("--overlap", action="store_true", help="only this: a step over all GPUs")
    flags.add_argument("--one-rank", action="store_true", help="what --overlap starts")
    args = flags.parse_args()
    if args.overlap or args.one_rank:
        return one_rank(args) if args.one_rank else overlap(args)
    if args.tiny:
        args.rounds, args.steps, args.compile = 1, 1, False
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPUs"
    found = {"machine": name, "torch": torch.__version__, "steps": []}
    print(f"{name}, torch {torch.__version__}\nnet         compile   ours ms   bare ms   speed   idle (bare)")
    for row in step_times(args, device):
        found["steps"].append(row)
        idle = "" if row["idle"] is None else f"{row['idle']:.1%} ({row['bare_idle']:.1%})"
        print(f"{row['net']:11} {row['compile']!s:7} {row['ours_ms']:9.2f} {row['bare_ms']:9.2f} "
              f"{row['speed']:7.3f}   {idle}", flush=True)
    found |= {"save": save_stall(args, device), "lives": lives(args, device)}
    print(*(f"{key} {value:.2f}" for key, value in (found["save"] | found["lives"]).items()), sep="   ")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
