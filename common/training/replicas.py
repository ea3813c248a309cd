"""A net made ready: on its device, with the layers of the options, and a replica on each rank or device."""

import inspect
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.data import Data, leaves, map_tensors
from common.device import is_gpu
from common.errors import UserError
from common.options import Options
from common.training.bitwise import Slices
from common.training.tasks import OWN, Task, autocast
from common.world import World


def prepare(
    net: nn.Module, opts: Options, world: World, data: Data, task: Task, device: torch.device | None = None
) -> nn.Module:
    """The net with the layers and the memory layout of the options, on `device`; names do not change."""
    device = device or world.device
    gpu = is_gpu(world.device)
    for flag, on in {"sync-bn": opts.sync_bn, "tf32": opts.tf32, "amp fp16": opts.amp == "fp16"}.items():
        if on and not gpu:
            raise UserError(
                f"--{flag} works on GPUs only, this process has {world.device}\n"
                "leave it out, or make a GPU visible"
            )
    has_state_of_its_own = any(isinstance(m, nn.RNNBase) and m.dropout for m in net.modules())
    if gpu and has_state_of_its_own and (opts.virtual_ranks or opts.recompute):
        raise UserError(
            "cuDNN's dropout inside an RNN draws from a state of its own, which no seed sets\n"
            "--virtual-ranks and --recompute would have other bits each time\n"
            "put nn.Dropout between RNNs of one layer"
        )
    torch.autograd.set_detect_anomaly(opts.debug)
    if opts.channels_last:
        net = net.to(memory_format=torch.channels_last)
    for module in net.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False  # the same numbers; sparse gradients have no fused update and no fixed sum
    if len(places_of(net)) == 1:  # else its author has placed it
        net = net.to(device)
    task.try_out(net, data, opts, device)
    return net



def places_of(net: nn.Module) -> list[torch.device]:
    """The devices of its weights, in their order."""
    return [*dict.fromkeys(p.device for p in net.parameters())]


def distribute(net: nn.Module, opts: Options, world: World) -> nn.Module | Slices:
    """A replica on every rank; gradients are averaged while backward runs. In train_dp.py one a device."""
    if opts.virtual_ranks:
        return Slices(net, world, opts.virtual_ranks)
    if opts.script == "dp" and len(world.devices) > 1:
        return replicate(net, opts, world)
    net = torch.compile(net) if opts.compile else net
    if world.size == 1:
        return net
    # `backward` averages buffers once a step; DDP would copy those of rank 0, which sees only its own share.
    known = inspect.signature(DistributedDataParallel).parameters
    off = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.15
    # In a script rank 0 need not send its weights: the store has compared them. One's own may not seed.
    flags = {off: False, "init_sync": opts.task == OWN, "gradient_as_bucket_view": True}
    return DistributedDataParallel(Replica(net), **flags)


def replicate(net, opts, world):
    """One process, which scatters the batch over its devices."""
    if opts.compile:
        raise UserError(
            "--compile: train_dp.py copies the net to its devices in each forward, which breaks "
            "compiled code\nleave it out, or use train_ddp.py, or one device"
        )
    if len({device.type for device in world.devices}) > 1:
        raise UserError(
            f"--devices {','.join(map(str, world.devices))}: nn.DataParallel drives devices of one kind\n"
            "name CPUs or GPUs alone"
        )
    replica = Replica(net, partial(autocast, opts, world.device))
    if is_gpu(world.device):
        return Replicas(replica, device_ids=[d.index for d in world.devices])
    return CpuReplicas(replica, len(world.devices))


class Replica(nn.Module):
    """The net; or, given a function of the net, what this returns: DDP then wraps a whole task.

    `casting`: nn.DataParallel's threads cast to another type than --amp.
    """

    def __init__(self, net, casting=nullcontext):
        super().__init__()
        self.net = net
        self.casting = casting

    def forward(self, *args, **kwargs):
        with self.casting():
            if args and callable(args[0]):
                return args[0](self.net)
            return self.net(*args, **kwargs)


class Replicas(DataParallel):
    """nn.DataParallel; a task may also ask for the net's own parts, as it may under train_ddp.py."""

    def __getattr__(self, name):
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(nn.Module.__getattr__(self, "module").net, name)


class CpuReplicas(nn.Module):
    """nn.DataParallel's scatter, replicate, apply and gather over CPU "devices": the path without a GPU."""

    __getattr__ = Replicas.__getattr__

    def __init__(self, net, count):
        super().__init__()
        self.module = net
        self.count = count

    def forward(self, *args, **kwargs):
        count = len(leaves((args, kwargs))[0].chunk(self.count))  # as on GPUs, it may be less
        outputs = []
        for i in range(count):
            share, named = map_tensors(lambda x, i=i: x.chunk(self.count)[i], (args, kwargs))
            # As on GPUs, the first replica is the net itself, and buffers of the others are lost.
            copies = {name: b.clone() for name, b in self.module.named_buffers()} if i else {}
            outputs.append(torch.func.functional_call(self.module, copies, share, named))
        pieces = zip(*map(leaves, outputs), strict=True)
        return map_tensors(lambda _: torch.cat(next(pieces)), outputs[0])
