"""A net becomes a pipeline of stages, over the ranks or over the devices of one process.

W ranks are W / stages pipelines side by side. In one process the net is one module on several devices.
"""
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from common.data import Batch, Data
from common.errors import UserError, blamed
from common.options import Options
from common.pipeline.cut import HOST, cut, edges, refuse_ties
from common.pipeline.stages import Pipeline
from common.training import TrainState, autocast, distribute, prepare
from common.training import backward as plain_backward
from common.world import World

CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict


def split(net: nn.Module, opts: Options, world: World, data: Data, task: Any) -> Pipeline:
    """The pipeline of a net, cut as --balance says, each stage in its place; call on every rank."""
    if world.stages == 1 and len(world.devices) == 1 and opts.stages == 0:
        raise UserError(f"train_mp.py splits a net over two devices or more, here is one: {world.device}\n"
                        "for example --devices cuda:0,cuda:1, or torchrun --nproc_per_node=2 train_mp.py\n"
                        "on one device use train_ddp.py")
    net = prepare(net, opts, world, data, task, HOST)
    groups, devices = by_hand(net, opts, world)
    if not groups:
        devices = [world.device] * world.stages if world.stages > 1 else world.devices
        groups = cut(net, len(devices), opts.balance)
    refuse_ties(net, groups)
    example = data.train.fetch(2 * [getattr(data.train, "first", 0)])
    shapes = []
    if world.stages > 1:
        with blamed("this net cannot be cut into stages",
                    "a net is cut where one tensor goes from one part to the next: use train_ddp.py"):
            x = task.input_of(example, SimpleNamespace(net=net, opts=opts, step=0))
            shapes = edges(net, groups, x, world.device, autocast(opts, world.device))
    model = Pipeline(net, groups, shapes, opts, world, devices, example)
    if opts.shard:
        shard(model.stages[0], world)
    if opts.virtual_ranks:
        model.tree = distribute(net, opts, world).tree
    return model


def by_hand(net, opts, world):
    """(groups, devices) of a net that says on which of two devices each of its parts is to be."""
    groups = []
    places = []
    placement = getattr(net, "placement", ())
    if len(placement) != len(net._modules):
        return [], []  # else parts without a place would be lost
    if world.stages == 1 and len(world.devices) == 2 and opts.balance == "parameters":
        for name, place in zip(net._modules, placement, strict=True):
            if places[-1:] != [place]:
                groups.append([])
                places.append(place)
            groups[-1].append((name,))
    return groups, [world.devices[place] for place in places]


def shard(stage, world):
    """--shard: FSDP over the replicas of a stage; a rank keeps some rows, and gathers a block to run it.

    A block is one of several modules of a kind in a container: a layer of a transformer. What is left (an
    embedding, a head, a block whose weight another part has too) is gathered for the whole stage.
    """
    mesh = DeviceMesh.from_group(world.peers or dist.group.WORLD, world.device.type)
    uses = _uses(stage.net)
    blocks = []
    inside = set()
    for parent in stage.net.modules():  # the outer ones first
        if parent in inside or not isinstance(parent, CONTAINERS):
            continue
        kinds = Counter(map(type, parent.children()))
        for block in parent.children():
            called = type(block).forward is not nn.Module.forward  # by itself: it is no list of modules
            weights = _uses(block)
            untied = all(uses[p] == times for p, times in weights.items())
            if kinds[type(block)] > 1 and called and weights and untied:
                blocks.append(block)
                inside |= set(block.modules())
    for module in [*blocks, stage]:
        fully_shard(module, mesh=mesh, reshard_after_forward=module is not stage)
        module.set_gradient_divide_factor(1.0)  # the loss is divided by the size of the whole batch
        module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also multiplies


def _uses(net):
    """How often each weight occurs in a net."""
    return Counter(p for _, p in net.named_parameters(remove_duplicate=False))


def backward(model: Pipeline, batch: Batch, state: TrainState, world: World) -> Tensor:
    """`backward` of common.training for a pipeline: one gradient of one global batch, on every rank."""
    if world.size > 1:
        return model.backward(batch, state)
    whole = SimpleNamespace(net=model, tree=model.tree) if model.tree else model
    return plain_backward(whole, batch, state, world)


def describe(model: Pipeline, samples: int, optimizer: torch.optim.Optimizer) -> list[str]:
    """The cut as lines of a table, and how long so many micro batches leave stages idle."""
    stages, opts = model.world.stages, model.opts
    lines = ["stage  place     layers                              parameters"]
    for i, group in enumerate(model.groups):
        names = [name for piece in group for name in piece]
        layers = names[0] or "all of it"
        if len(names) > 1:
            layers += f" ... {names[-1]} ({len(names)})"
        place = f"rank {i}" if stages > 1 else str(model.devices[i])
        lines.append(f"{i:5}  {place:8}  {layers:34}  {model.parameters_of[i]:11,}")
    if stages > 1:
        kind, size = "micro batches", opts.micro_batch_size or samples
        if opts.virtual_ranks:
            kind, size = "slices", -(-opts.global_batch_size // opts.virtual_ranks)
        size = min(size, samples)
        flights = -(-samples // max(1, size))
        lines.append(f"{flights} {kind} of {size} or less over {stages} ranks, "
                     f"idle {(stages - 1) / (flights + stages - 1):.0%} of the time")
    return lines
