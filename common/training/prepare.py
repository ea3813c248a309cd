"""A net made ready: on its device, with the layers of the options, wrapped for several devices or ranks.

The second half refuses a BatchNorm that some step would give a single sample, before the first step.
"""
import contextlib
import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.backends import cudnn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.data import forward_sizes, leaves, map_tensors
from common.errors import UserError, refuse
from common.models import named_tensors
from common.options import Options
from common.training.bitwise.sums import Tree
from common.training.loss import autocast
from common.training.task import Task
from common.world import World, require_same_bits


def prepare(net: nn.Module, opts: Options, world: World, data: Any, task: Task,
            device: torch.device | None = None) -> nn.Module:
    """The net with the layers and the memory layout of the options, on `device`; names do not change."""
    device = device or world.device
    given = {"sync-bn": opts.sync_bn, "tf32": opts.tf32, "amp fp16": opts.amp == "fp16"}
    flag = next((flag for flag, on in given.items() if on), "")
    refuse(
        (flag and world.device.type != "cuda",
         f"--{flag} works on GPUs only, this process has {world.device}\n"
         "leave it out, or make a GPU visible"),
        (opts.script == "dp" and opts.compile and len(world.devices) > 1,
         f"--compile: train_dp.py copies the net to its {len(world.devices)} devices in each forward, which "
         "breaks compiled code\nleave it out, or use train_ddp.py, or one device"))
    torch.autograd.set_detect_anomaly(opts.debug)
    refuse_single(net, opts, world, data, task)
    if world.device.type == "cuda" and (opts.virtual_ranks or opts.recompute):
        draw_without_cudnn(net)
    if opts.sync_bn and world.size > 1:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if opts.channels_last:
        net = net.to(memory_format=torch.channels_last)
    net = net.to(device)
    task.try_out(net, data, opts, device)
    return net


def draw_without_cudnn(net):
    """cuDNN's dropout inside an RNN has a state of its own: neither seeds nor recomputations set it."""
    for module in net.modules():
        if isinstance(module, nn.RNNBase) and module.dropout and cudnn.enabled:
            module.register_forward_pre_hook(lambda *_: setattr(cudnn, "enabled", False))
            module.register_forward_hook(lambda *_: setattr(cudnn, "enabled", True), always_call=True)


def distribute(net: nn.Module, opts: Options, world: World) -> nn.Module:
    """A replica on every rank; gradients are averaged while backward runs. In train_dp.py one a device."""
    if opts.script == "dp":
        return replicate(net, opts, world)
    if opts.virtual_ranks:
        require_same_bits(opts, world)
        return Replica(net, Tree(net, world, opts.virtual_ranks))
    net = torch.compile(net) if opts.compile else net
    if world.size == 1:
        return net
    # `backward` averages buffers once a step; DDP would copy those of rank 0, which sees only its own share.
    known = inspect.signature(DistributedDataParallel).parameters
    off = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.15
    # without init_sync, as the store has compared all weights: rank 0 need not send its own
    flags = {off: False, "init_sync": False, "gradient_as_bucket_view": True}
    return Averaged(Replica(net), **flags)


def replicate(net, opts, world):
    """One process, which scatters the batch over its devices."""
    casting = Replica(net, casting=partial(autocast, opts, world.device))
    if len(world.devices) == 1:
        model = torch.compile(net) if opts.compile else net
    elif world.device.type == "cuda":
        model = Replicas(casting, device_ids=[d.index for d in world.devices])
    else:
        model = CpuReplicas(casting, len(world.devices))
    if opts.show_scatter:
        show_scatter(model, net)
    return model


class Averaged(DistributedDataParallel):
    """DDP, with a UserError where some ranks would wait for ever for a gradient."""

    def forward(self, *args, **kwargs):
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise UserError("a weight had no part in the loss, and other ranks would wait for its gradient\n"
                            "freeze what forward never uses (--freeze, requires_grad_(False)); with "
                            "--virtual-ranks\nforward may use other weights in each step") from error


class Replica(nn.Module):
    """The net; or, given a function of the net, what this returns: DDP then wraps a whole task.

    `tree` sums gradients of slices. `casting`: nn.DataParallel's threads cast to another type than --amp.
    """

    def __init__(self, net, tree=None, casting=contextlib.nullcontext):
        super().__init__()
        self.net, self.tree, self.casting = net, tree, casting

    def forward(self, *args, **kwargs):
        with self.casting():
            return args[0](self.net) if args and callable(args[0]) else self.net(*args, **kwargs)


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
        self.module, self.count = net, count

    def forward(self, *args, **kwargs):
        count = len(leaves((args, kwargs))[0].chunk(self.count))  # as on GPUs, it may be less
        (args, kwargs), *rest = [map_tensors(lambda x, i=i: x.chunk(self.count)[i], (args, kwargs))
                                 for i in range(count)]
        outputs = [self.module(*args, **kwargs)]  # as there, the first replica is the net itself
        for args, kwargs in rest:
            copies = {name: tensor.clone() for name, tensor in named_tensors(self.module)}
            outputs.append(torch.func.functional_call(self.module, copies, args, kwargs))
        whole = iter([torch.cat(each) for each in zip(*map(leaves, outputs), strict=True)])
        return map_tensors(lambda _: next(whole), outputs[0])


def show_scatter(model, net):
    """Prints the sizes inside each replica, and outside of the whole batch, as PyTorch's tutorial does."""
    def sizes(x, output):
        return f"input size {tuple(x.shape)} output size {tuple(output.shape)}"

    net.register_forward_hook(lambda _, inputs, output: print("In Model: ", sizes(inputs[0], output)))
    model.register_forward_hook(lambda _, inputs, output: print("Outside:  ", sizes(inputs[0], output)))


def refuse_single(net, opts, world, data, task):
    """UserError if a step would run a forward of one sample, and the net (whole, on the CPU) refuses one."""
    n, size = len(data.train), opts.global_batch_size
    tail = n % size if not opts.max_steps or opts.max_steps > n // size else 0
    wrong = next((batch for batch in (min(n, size), tail) if 1 in forwards(batch, opts, world)), None)
    if wrong is None or opts.eval_only or takes_one(net, data, task, opts):
        return
    which = f"the last batch of an epoch, {tail} of {n:,} samples," if wrong == tail else \
        f"a global batch of {wrong}"
    cut = f"{opts.virtual_ranks} slices" if opts.virtual_ranks else \
        f"{world.replicas} shares" if world.replicas > 1 else "one process"
    raise UserError("a BatchNorm of this net cannot train on one sample alone, "
                    f"and {which} in {cut} leaves one\nchoose another --global-batch-size (now {size}), "
                    "--micro-batch-size, --virtual-ranks\nor number of processes, or GroupNorm or LayerNorm")


def forwards(batch, opts, world):
    """The sizes of forwards when a global batch is split over ranks and micro batches.

    With --sync-bn the size counts all ranks together; with --shard every rank pads its share to the largest.
    """
    each = [forward_sizes(batch, rank, world.replicas, opts) for rank in range(world.replicas)]
    if opts.sync_bn:
        return {sum(together) for together in zip(*each, strict=True)}
    sizes = set(each[-1]) if opts.shard else {size for sizes in each for size in sizes}
    if opts.script == "dp":
        most = {size: -(-size // len(world.devices)) for size in sizes if size}
        sizes = {piece for size in most for piece in (most[size], size % most[size]) if piece}
    return sizes


def takes_one(net, data, task, opts):
    """Whether the net can train on one sample; tried without values, on torch's meta device."""
    if not any(isinstance(m, _BatchNorm) for m in net.modules()):
        return True
    was, batch = net.training, map_tensors(lambda t: t.to("meta"), data.train.fetch([0]))
    hollow = {name: torch.empty_like(tensor, device="meta") if tensor.dim() else tensor.clone()
              for name, tensor in named_tensors(net)}  # a BatchNorm reads how many batches it has seen
    try:
        with torch.no_grad():
            task.function(lambda *args, **kwargs: torch.func.functional_call(net, hollow, args, kwargs),
                          batch, SimpleNamespace(net=net.train(), opts=opts, step=0))
    except ValueError as error:
        return "more than 1 value per channel" not in str(error)
    except Exception:
        return True  # the net may look at values: then the first step decides
    finally:
        net.train(was)
    return True
