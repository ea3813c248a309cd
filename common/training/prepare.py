"""A net made ready: on its device, with the layers of the options, wrapped for several devices or ranks.

The second half refuses a BatchNorm that some step would give a single sample, before the first step.
"""
import inspect
import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.errors import UserError
from common.options import Options
from common.sampler import share
from common.training.bitwise.sums import Tree
from common.training.loss import autocast
from common.world import World, require_same_bits


def prepare(net: nn.Module, opts: Options, world: World, data: Any) -> nn.Module:
    """The net on its device, with the layers and the memory layout of the options; names do not change."""
    return fit(net, opts, world, data).to(world.device)


def fit(net: nn.Module, opts: Options, world: World, data: Any) -> nn.Module:
    """`prepare` without the move to the device."""
    if world.device.type != "cuda" and (opts.sync_bn or opts.amp == "fp16"):
        flag = "sync-bn" if opts.sync_bn else "amp fp16"
        raise UserError(f"--{flag} works on GPUs only, this process has {world.device}\n"
                        "leave it out, or make a GPU visible")
    if opts.script == "dp" and opts.compile and len(world.devices) > 1:
        raise UserError("--compile: train_dp.py copies the net to its "
                        f"{len(world.devices)} devices in each forward, which breaks compiled code\n"
                        "leave it out, or use train_ddp.py, or one device")
    torch.autograd.set_detect_anomaly(opts.debug)
    refuse_single(net, opts, world, data)
    if opts.sync_bn and world.size > 1:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if opts.channels_last:
        net = net.to(memory_format=torch.channels_last)
    return net


def distribute(net: nn.Module, opts: Options, world: World) -> nn.Module:
    """For train_ddp.py: a replica on every rank; gradients are averaged while backward still runs."""
    if opts.virtual_ranks:
        return Sliced(net, opts, world)
    net = torch.compile(net) if opts.compile else net
    if world.size == 1:
        return net
    # `backward` averages buffers once a step; DDP would copy those of rank 0, which sees only its own share.
    known = inspect.signature(DistributedDataParallel).parameters
    off = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.15
    return DistributedDataParallel(Replica(net, opts.sync_bn), gradient_as_bucket_view=True, **{off: False})


def replicate(net: nn.Module, opts: Options, world: World) -> nn.Module:
    """For train_dp.py: one process, which scatters the batch over its devices."""
    if len(world.devices) == 1:
        return torch.compile(net) if opts.compile else net
    net = Casting(net, opts, world.device)
    if world.device.type == "cuda":
        return DataParallel(net, device_ids=[d.index for d in world.devices])
    return CpuReplicas(net, len(world.devices))


class Casting(nn.Module):
    """The net under --amp in every thread: those of nn.DataParallel have autocast on, but of another type."""

    def __init__(self, net, opts, device):
        super().__init__()
        self.net, self.opts, self.device = net, opts, device

    def forward(self, x):
        with autocast(self.opts, self.device):
            return self.net(x)


class Replica(nn.Module):
    """The net; an empty share of a short last batch gives zero gradients, so that the rank still takes part.

    With --sync-bn even an empty share runs the net, because its layers wait for every rank.
    """

    def __init__(self, net, synced=False):
        super().__init__()
        self.net, self.synced = net, synced

    def forward(self, x):
        if len(x) or self.synced:
            return self.net(x)
        nothing = sum(p.flatten()[:0].sum() for p in self.net.parameters() if p.requires_grad)
        return nothing + x.new_zeros(0, 1)


class Sliced(nn.Module):
    """The net and the tree that sums the gradients of its slices (--virtual-ranks)."""

    def __init__(self, net, opts, world):
        super().__init__()
        require_same_bits(opts, world)
        self.net, self.tree = net, Tree(net, world, opts.virtual_ranks)

    def forward(self, x):
        return self.net(x)


class CpuReplicas(nn.Module):
    """nn.DataParallel's scatter, replicate, apply and gather over CPU "devices": the path without a GPU."""

    def __init__(self, net, count):
        super().__init__()
        self.module, self.count = net, count

    def forward(self, x):
        first, *rest = x.chunk(self.count)  # the sizes that nn.DataParallel sends to GPUs
        outputs = [self.module(first)]  # as there, the first replica is the net itself
        for chunk in rest:
            tensors = itertools.chain(self.module.named_parameters(), self.module.named_buffers())
            copies = {name: tensor.clone() for name, tensor in tensors}
            outputs.append(torch.func.functional_call(self.module, copies, (chunk,)))
        return torch.cat(outputs)


def show_scatter(model: nn.Module, net: nn.Module) -> None:
    """Prints the sizes inside each replica, and outside of the whole batch, as PyTorch's tutorial does."""
    def sizes(x, output):
        return f"input size {tuple(x.shape)} output size {tuple(output.shape)}"

    if model is not net:
        model.register_forward_hook(lambda _, inputs, output: print("Outside:  ", sizes(inputs[0], output)))
    net.register_forward_hook(lambda _, inputs, output: print("In Model: ", sizes(inputs[0], output)))
    if model is net:
        net.register_forward_hook(lambda _, inputs, output: print("Outside:  ", sizes(inputs[0], output)))


SINGLE_REFUSED = "more than 1 value per channel"     # from torch's ValueError


def refuse_single(net, opts, world, data):
    """UserError if a step would run a forward of one sample, and the net (whole, on the CPU) refuses one."""
    n, size = len(data.train), opts.global_batch_size
    tail = n % size if not opts.max_steps or opts.max_steps > n // size else 0
    wrong = next((batch for batch in (min(n, size), tail) if 1 in forwards(batch, opts, world)), None)
    if wrong is None or opts.eval_only or takes_one(net, data):
        return
    which = f"a global batch of {wrong}"
    if wrong == tail:
        which = f"the last batch of an epoch, {tail} of {n:,} samples,"
    cut, ways = "one process", "--micro-batch-size"
    if opts.virtual_ranks:
        cut, ways = f"{opts.virtual_ranks} slices", "--virtual-ranks"
    elif world.replicas > 1:
        cut, ways = f"{world.replicas} shares", "number of processes"
    raise UserError("a BatchNorm of this net cannot train on one sample alone, "
                    f"and {which} in {cut} leaves one\n"
                    f"choose another --global-batch-size (now {size}) or {ways}, or GroupNorm or LayerNorm")


def forwards(batch, opts, world):
    """The sizes of forwards when a global batch is split over ranks and micro batches.

    With --sync-bn the size counts all ranks together.
    """
    parts = opts.virtual_ranks or world.replicas
    if opts.sync_bn and parts > 1 and batch:
        count, shares = rounds(batch, opts, world), [len(share(batch, rank, parts)) for rank in range(parts)]
        return {sum(n // count + (k < n % count) for n in shares) for k in range(count)}
    # with --shard every rank pads its share to the largest
    sizes = {-(-batch // parts)} | ({batch // parts} if not opts.shard else set())
    if not opts.virtual_ranks:
        sizes = pieces(sizes, lambda part: opts.micro_batch_size or part)
        if opts.script == "dp":
            sizes = pieces(sizes, lambda micro: -(-micro // len(world.devices)))
    return sizes


def rounds(batch, opts, world):
    """The number of forwards for the largest share of a global batch."""
    most = -(-batch // world.replicas)
    return -(-most // (opts.micro_batch_size or most))


def pieces(sizes, most):
    """The sizes that occur when each of `sizes` is split into pieces of at most `most(size)` samples."""
    return {piece for size in sizes if size for piece in (min(size, most(size)), size % most(size)) if piece}


def takes_one(net, data):
    """Whether the net can train on one sample; tried without values, on torch's meta device."""
    if not any(isinstance(m, _BatchNorm) for m in net.modules()):
        return True
    was, x = net.training, data.train.fetch([0])[0]
    tensors = itertools.chain(net.named_parameters(), net.named_buffers())
    hollow = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    try:
        with torch.no_grad():
            torch.func.functional_call(net.train(), hollow, (x.to("meta"),))
    except ValueError as error:
        return SINGLE_REFUSED not in str(error)
    except Exception:
        return True  # the net may look at values: then the first step decides
    finally:
        net.train(was)
    return True
