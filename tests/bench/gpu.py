"""What training costs on a GPU against a bare loop: step time, save.

    python tests/bench/gpu.py --json found.json           # one GPU, about ten minutes
    python tests/bench/gpu.py --nets resnet50 --steps 50
    python tests/bench/gpu.py --device cpu --tiny         # that the bench itself runs

The bare loop has the same net, batch, precision and optimizer. Both take turns; figures are medians.
"""
import argparse
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from turns import take_turns  # isort: skip  (first: it finds the others)

import torch
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


def step_times(args, device):
    for name in args.nets.split(","):
        model, batch, shape, more = (TINY if args.tiny else NETS)[name]
        for compiled in (False, True) if args.compile else (False,):
            world = World(0, 1, 0, 1, (device,), "bench", 0)
            opts = Options(model=model, global_batch_size=batch, optimizer="adam", compile=compiled,
                           device=device.type, tensorboard=False, **more)
            data, draw = data_of(shape)
            ways = {"ours": ours(world, data, opts)[0], "bare": bare(world, data, opts)}
            drawn = [t.pin_memory() if device.type == "cuda" else t for t in draw(range(batch))]
            costs = take_turns({way: partial(seconds, step, drawn, args.steps, device)
                                for way, step in ways.items()}, args.rounds)
            pairs = zip(costs["ours"], costs["bare"], strict=True)
            yield {"net": name, "compile": compiled, "ours_ms": statistics.median(costs["ours"]) * 1e3,
                   "bare_ms": statistics.median(costs["bare"]) * 1e3,
                   "speed": statistics.median(bare / ours for ours, bare in pairs)}


def save_stall(args, device):
    """How long `save` holds the loop, and how much longer the step after it is."""
    width, layers = (64, 2) if args.tiny else (4096, 16)  # 1 GiB of weights, three times that with Adam's
    with tempfile.TemporaryDirectory() as folder:
        opts = parse_options("", [f"--run-dir={folder}/run", f"--device={device.type}"], script="ddp")
        world = World(0, 1, 0, 1, (device,), "bench", 0)
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


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--device", default="cuda:0")
    flags.add_argument("--nets", default=",".join(NETS))
    flags.add_argument("--rounds", type=int, default=5)
    flags.add_argument("--steps", type=int, default=20, help="of a turn")
    flags.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    flags.add_argument("--tiny", action="store_true", help="small nets, one step a turn, nothing compiled")
    flags.add_argument("--json", help="a file for the figures")
    args = flags.parse_args()
    if args.tiny:
        args.rounds, args.steps, args.compile = 1, 1, False
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPUs"
    found = {"machine": name, "torch": torch.__version__, "steps": []}
    print(f"{name}, torch {torch.__version__}\nnet         compile   ours ms   bare ms   speed")
    for row in step_times(args, device):
        found["steps"].append(row)
        print(f"{row['net']:11} {row['compile']!s:7} {row['ours_ms']:9.2f} {row['bare_ms']:9.2f} "
              f"{row['speed']:7.3f}", flush=True)
    found["save"] = save_stall(args, device)
    print(*(f"{key} {value:.2f}" for key, value in found["save"].items()), sep="   ")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
