"""A net becomes a pipeline of stages, over the ranks or over the devices of one process.

W ranks are W / stages pipelines side by side; in one process the net is one module on several devices. A
nn.Sequential can be cut between any two of its parts. It keeps its names: on a rank, the parts of other
stages are nn.Identity. A piece is a tuple of names: parts that stay together; ("",) is all of a net.
"""

import functools
import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _NormBase

from common.data import Batch, Data
from common.errors import UserError, blamed
from common.options import Options
from common.pipeline.stages import Pipeline, blocks, module, weight
from common.training import TrainState, autocast, distribute, prepare
from common.training import backward as plain_backward
from common.world import World

HOST = torch.device("cpu")


def split(net: nn.Module, opts: Options, world: World, data: Data, task: Any) -> Pipeline:
    """The pipeline of a net, each stage in its place; call on every rank."""
    stages = max(world.stages, len(world.devices))
    if stages == 1 and opts.stages == 0:
        raise UserError(
            f"train_mp.py splits a net over two devices or more, here is one: {world.device}\n"
            "for example --devices cuda:0,cuda:1, or torchrun --nproc_per_node=2 train_mp.py\n"
            "on one device use train_ddp.py"
        )
    net = prepare(net, opts, world, data, task, HOST)
    groups = cut(net, stages, opts.balance, world.size == 1)
    example = data.train.example()
    shapes = []
    if world.stages > 1:
        with blamed(
            "this net cannot be cut into stages",
            "a net is cut where one tensor goes from one part to the next: use train_ddp.py",
        ):
            x = task.input_of(example)
            shapes = edges(net, groups, x, world.device, autocast(opts, world.device))
    model = Pipeline(net, groups, shapes, opts, world, example)
    if opts.shard and world.size > 1:
        with blamed("--shard", "leave it out, or --channels-last, or give each weight a dimension"):
            shard(model.stages[0], world, opts)  # before it moves: all of it may not fit on a device
    for stage in model.stages:
        for call in stage.calls:
            call.to(stage.device)
    if opts.virtual_ranks:
        model.tree = distribute(model, opts, world)
    return model


def backward(model: Pipeline, batch: Batch, state: TrainState, world: World) -> Tensor:
    """`backward` of common.training for a pipeline: one gradient of one global batch, on every rank."""
    if world.size > 1:
        return model.backward(batch, state)
    return plain_backward(model.tree or model, batch, state, world)


# ---- where ----
def pieces(net):
    """The net as pieces, each with weights of its own: a part without weights joins the one before it."""
    unusual = net._forward_hooks or net._forward_pre_hooks or net._parameters or net._buffers
    if unusual or getattr(type(net), "forward", None) is not nn.Sequential.forward:
        return [("",)]
    joined = []
    for name in net._modules:
        if joined and not (weight(net, (name,)) and weight(net, joined[-1])):
            joined[-1] += (name,)
        else:
            joined.append((name,))
    return joined


def cut(net, stages, by, rounds):
    """The pieces of each stage, in a row: by weight, or by the counts in `by`.

    With `rounds` counts may go over the devices again: 1,1,1,1 alternates between two.
    """
    parts = pieces(net)
    names = ", ".join("+".join(piece) or "all of it" for piece in parts)[:200]
    counts = [int(count) for count in by.split(",") if count.isdecimal()]
    if by == "parameters" and stages <= len(parts):
        counts = balance([weight(net, piece) + 1 for piece in parts], stages)
    if rounds:
        fits = len(counts) % stages == 0
    else:
        fits = len(counts) == stages
    if not fits or sum(counts) != len(parts):
        raise UserError(
            f"--balance {by} for {stages} stages, but this net has {len(parts)} pieces: {names}\n"
            f"ask for at most {len(parts)} stages, by counts that add up to {len(parts)}, "
            "or choose a --model with more pieces (a longer nn.Sequential)"
        )
    rest = iter(parts)
    groups = [list(itertools.islice(rest, count)) for count in counts]
    refuse_ties(net, groups)
    return groups


def balance(weights, stages):
    """The number of pieces of each stage: none empty, the heaviest as light as possible (exactly)."""

    @functools.cache
    def best(start, stages):
        """(the heaviest stage, counts) of the pieces from `start`."""
        if stages == 1:
            return sum(weights[start:]), [len(weights) - start]
        tries = []
        for end in range(start + 1, len(weights) - stages + 2):
            heaviest, counts = best(end, stages - 1)
            tries.append((max(sum(weights[start:end]), heaviest), [end - start, *counts]))
        return min(tries)

    return best(0, stages)[1]


def refuse_ties(net, groups):
    """UserError if a tensor would be in two stages: each would train a copy of its own."""
    stage_of = {name: stage for stage, group in enumerate(groups) for name in sum(group, ())}
    places = {}
    for name, tensor in net.state_dict(keep_vars=True).items():
        stage = stage_of.get(name.partition(".")[0], 0)
        other, place = places.setdefault(tensor, (name, stage))
        if place != stage:
            raise UserError(
                f"{other} and {name} are one tensor, but the cut has them in stages {place} and "
                f"{stage}\nuntie them, or cut elsewhere: --balance with counts of pieces, as in "
                "--balance 3,1"
            )


@torch.no_grad()
def edges(net, groups, x, device, cast):
    """(shape, dtype) of a sample behind each stage; one piece at a time is on the device: all may not fit."""
    shapes = []
    samples = len(x)
    net.eval()  # nothing is drawn, no running statistics move
    for group in groups:
        for piece in group:
            part = module(net, piece).to(device)
            with cast:
                x = part(x.to(device))
            part.to(HOST)
        if len(x) != samples:
            raise ValueError(f"{'+'.join(piece)} returns no row per sample")
        shapes.append((tuple(x.shape[1:]), x.dtype))
    net.train()
    return shapes


# ---- --shard ----
def shard(stage, world, opts):
    """FSDP over the shards of a stage, and its copies: a rank keeps some rows, and gathers a block to run it.

    A block is a part of a container: a layer of a transformer. What is left, and a part with a weight that
    occurs twice, is gathered for the whole stage.
    """
    ranks = torch.arange(world.stage, world.size, world.stages).view(world.copies, world.shards)
    mesh = DeviceMesh.from_group(
        [world.column, world.shard_group], world.device.type, ranks, mesh_dim_names=("copy", "shard")
    )
    uses = Counter(p for _, p in stage.net.named_parameters(remove_duplicate=False))
    tied = {p for p, times in uses.items() if times > 1}
    for part in [*blocks(stage.net), stage]:
        weights = set(part.parameters())
        if part is stage or weights and not weights & tied:
            fully_shard(
                part, mesh=mesh, reshard_after_forward=part is not stage, mp_policy=precision(part, opts)
            )
            part.set_gradient_divide_factor(1.0)  # the loss is divided by the size of the whole batch
            part.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also multiplies


def precision(part, opts):
    """--amp bf16 gathers bf16, which autocast alone would keep from the forward to the backward, too.

    Batch norm is computed in float32, with its running statistics.
    """
    if opts.amp != "bf16" or any(isinstance(module, _NormBase) for module in part.modules()):
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32)


# ---- what a person sees ----
def describe(model: Pipeline) -> list[str]:
    """The cut as lines of a table, and who may die."""
    lines = ["stage  place     layers                              parameters"]
    for i, group in enumerate(model.groups):
        layers = ", ".join(name for piece in group for name in piece) or "all of it"
        place = f"rank {i}" if model.world.stages > 1 else str(model.stages[i].device)
        lines.append(f"{i:5}  {place:8}  {layers[:34]:34}  {model.parameters_of[i]:11,}")
    if model.world.parts > 1:
        lines.append(copies_in_words(model.world))
    return lines


def copies_in_words(world):
    """How many copies of the net there are, of what, and what may die without a loss."""
    parts = f"{world.shards} shards" if world.shards > 1 else f"{world.stages} stages"
    if world.shards > 1 and world.stages > 1:
        parts = f"{world.stages} stages x {parts}"
    if world.copies == 1:
        return f"1 copy of {parts}: a death costs up to a save interval"
    # A part's ranks are as far from each other as a copy is long.
    whole_machine = world.local_size <= world.size - world.parts
    return f"{world.copies} copies of {parts}: any {'machine' if whole_machine else 'process'} may die"
