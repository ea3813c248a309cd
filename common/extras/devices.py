"""Several devices of one process: a batch over all of them (nn.DataParallel), copies of a GPU."""

from contextlib import suppress
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from common.data import leaves, map_tensors
from common.device import devices_of, is_gpu
from common.errors import UserError
from common.training import autocast, on_device


def named_devices(opts, seen, place, placed):
    """Return the devices on which a net lies already, or those that --devices names of what is seen."""
    if placed:
        if opts.devices:
            raise UserError(
                f"--devices cannot take effect: the net lies on {', '.join(map(str, placed))}\nleave it out"
            )
        return tuple(placed)
    known = {str(device): device for device in (torch.device("cpu"), *seen)}
    names = [name if name in known else f"{name}:0" for name in opts.devices]
    if not known.keys() >= {*names}:
        raise UserError(
            f"--devices {','.join(opts.devices)}: there are {', '.join(known)}\n"
            f"choose among them, or make more visible (CUDA_VISIBLE_DEVICES: {place.gpus or 'none'})"
        )
    return tuple(known[name] for name in names)


def replicate(net, opts, world):
    """Put the net on all devices of this process, in each forward anew: they share the batch."""
    if len(world.devices) == 1 or len(devices_of(net)) > 1:
        return on_device(net, opts, world)
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
    replica = Replica(net.to(world.device), partial(autocast, opts, world.device))
    if is_gpu(world.device):
        return DataParallel(replica, device_ids=[d.index for d in world.devices])
    return CpuReplicas(replica, len(world.devices))


class Replica(nn.Module):
    """The net in one of nn.DataParallel's threads, which cast to another type than --amp."""

    def __init__(self, net, casting):
        super().__init__()
        self.net = net
        self.casting = casting

    def forward(self, *args, **kwargs):
        with self.casting():
            return self.net(*args, **kwargs)


class CpuReplicas(nn.Module):
    """nn.DataParallel's scatter, replicate, apply and gather over CPU "devices": the path without a GPU."""

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


def pinned(buffer, device):
    """Lock the pages of a buffer, so that this GPU copies into it; return False if it cannot.

    Memory that torch allocates for that is as large as the next power of two.
    """
    with torch.cuda.device(device):
        refused = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), len(buffer), 0))
    if refused:
        with suppress(RuntimeError):  # CUDA keeps the error for the next call: let it be this one
            torch.zeros(1, device=device)
    return not refused
