"""What a step costs on a GPU against a bare loop; of a save: python tests/bench/checkpoint.py --device cuda:0

    python tests/bench/gpu.py                             # one GPU, about ten minutes
    python tests/bench/gpu.py --nets resnet50 --steps 50
    python tests/bench/gpu.py --compile                   # both ways with torch.compile
    python tests/bench/gpu.py --device cpu --nets net,resnet18,gpt:tiny

The bare loop has the same net, batch, precision and optimizer. All take turns; figures are medians.
`asked` is the bare loop, but asks until the gradient is there before it updates: so nothing is launched
behind a collective that may hang.
"""

import time
from dataclasses import replace
from functools import partial

from turns import arguments, compare  # isort: skip  (first: it finds the others)

import torch
from samples import ALONE, Facts, Samples, Steps
from torch import nn

from common.models import build_model
from common.options import Options
from common.training import prepare

BF16 = {"amp": "bf16"}
NETS = {  # name: (model, batch, shape of a sample or tokens, options); the last two: small enough for a CPU
    "resnet50": ("resnet50", 256, (3, 224, 224), BF16 | {"channels_last": True}),
    "gpt:medium": ("gpt:medium", 16, 1024, BF16),
    "net": ("net", 64, (1, 28, 28), {}),
    "resnet18": ("resnet18", 4, (3, 32, 32), BF16 | {"channels_last": True}),
    "gpt:tiny": ("gpt:2x2x16", 4, 16, BF16),
}


def data_of(batch, shape):
    """A batch, and what a net is built for."""
    if isinstance(shape, int):
        tokens = torch.randint(0, 256, (batch, shape + 1))
        return Samples(tokens[:, :-1], tokens[:, 1:]), Facts("drawn", 256, (shape,), 256)
    return Samples(torch.randn(batch, *shape), torch.arange(batch) % 10), Facts("drawn", 10, shape)


def ours(net, world, samples, opts):
    """A step of this project."""
    prepare(net, opts, world)
    steps = Steps(net, opts, world, split=samples, samples=1 << 20)
    return lambda x, y: steps.step(steps.batch(x, y))


def bare(net, world, samples, opts, before_update=lambda: None):
    """The same step as a tutorial writes it."""
    device = world.device
    layout = torch.channels_last if opts.channels_last else torch.contiguous_format
    net = net.to(device, memory_format=layout)
    model = torch.compile(net) if opts.compile else net
    optimizer = torch.optim.Adam(net.parameters(), opts.lr or 1e-3, fused=True)

    def step(x, y):
        x = x.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=opts.amp == "bf16"):
            out = model(x.contiguous(memory_format=layout) if opts.channels_last else x)
            loss = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten())
        loss.backward()
        before_update()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def asked(net, world, samples, opts):
    """The bare loop, that asks until the gradient is there before it launches the update."""

    def ask():
        if world.device.type == "cuda":
            event = torch.cuda.current_stream(world.device).record_event()
            while not event.query():
                time.sleep(2e-5)

    return bare(net, world, samples, opts, ask)


def seconds(step, batch, count, device):
    """Of one step, when the device has made `count` of them."""
    began = time.perf_counter()
    for _ in range(count):
        step(*batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / count


def main():
    args = arguments(
        __doc__,
        device="cuda:0",
        nets="resnet50,gpt:medium,net",
        rounds=5,
        steps=20,
        compile=False,
    )
    device = torch.device(args.device)
    torch.backends.cudnn.benchmark = True  # as in a training
    world = replace(ALONE, devices=(device,))
    for name in args.nets.split(","):
        model, size, shape, more = NETS[name]
        opts = Options(
            model=model,
            global_batch_size=size,
            optimizer="adam",
            compile=args.compile,
            device=device.type,
            **more,
        )
        samples, facts = data_of(size, shape)
        batch = [t.pin_memory() if device.type == "cuda" else t for t in (samples.x, samples.y)]
        ways = {}
        for way in (ours, asked, bare):
            step = way(build_model(opts, facts), world, samples, opts)
            ways[way.__name__] = partial(seconds, step, batch, args.steps, device)
        compare(name, ways, args.rounds, "bare")


if __name__ == "__main__":
    main()
