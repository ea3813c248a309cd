"""A net made ready: on its device, with the layers of the options, and a replica on each rank."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.data import map_tensors
from common.device import devices_of, is_gpu
from common.errors import UserError
from common.options import Options
from common.training.optimizer import turns_of, weights_of
from common.training.tasks import AMP, OWN, autocast
from common.world import World


def prepare(net: nn.Module, opts: Options, world: World) -> None:
    """Give the net the layers and the memory layout of the options; names do not change."""
    for flag, on in {"sync-bn": opts.sync_bn, "tf32": opts.tf32, "amp fp16": opts.amp == "fp16"}.items():
        if on and not is_gpu(world.device):
            raise UserError(
                f"--{flag} works on GPUs only, this process has {world.device}\n"
                "leave it out, or make a GPU visible"
            )
    torch.autograd.set_detect_anomaly(opts.debug)
    if opts.channels_last:
        net.to(memory_format=torch.channels_last)
    for module in net.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False  # the same numbers; sparse gradients have no fused update and no fixed sum


# ---- where the net goes: what a loop calls -------------------------------------------------------------
def on_device(net: nn.Module, opts: Options, world: World) -> nn.Module:
    """Put it on the device of this process."""
    if len(devices_of(net)) == 1:  # else its author has placed it
        net.to(world.device)
    return torch.compile(net) if opts.compile else net


class Called:
    """The net where it was placed, in the types of --amp; it has the net's attributes."""

    def __init__(self, placed: nn.Module, state: Any) -> None:
        self.placed = placed
        self.state = state
        self.progress = state.progress  # tells a task how far the run is

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        state = self.state
        state.heartbeat += 1
        compiles_again = state.opts.compile and not torch.is_grad_enabled()
        model = state.net if compiles_again else self.placed  # an evaluation has other shapes
        with autocast(state.opts, state.device):
            out = model(*inputs, **named)
        if state.opts.amp == "off":
            return out
        return map_tensors(lambda x: x.float() if x.dtype in AMP.values() else x, out)

    def __getattr__(self, name):
        return getattr(self.state.net, name)


# ---- how the gradient is averaged over the ranks -------------------------------------------------------
def engines_of(net, optimizer, opts, world):
    """Return one for each turn; None if this process is alone, and with --virtual-ranks."""
    turns = turns_of(optimizer)
    if opts.virtual_ranks or world.size == 1:
        return [None] * len(turns)
    # `Gradient` averages buffers once a step; DDP would copy those of rank 0, which sees only its own share.
    known = inspect.signature(DistributedDataParallel).parameters
    off = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.15
    # In a script rank 0 need not send its weights: the store has compared them. One's own may not seed.
    flags = {off: False, "init_sync": opts.task == OWN, "gradient_as_bucket_view": True}
    engines = {}
    for one in dict.fromkeys(turns):
        weights = net if one is optimizer else nn.ParameterList(weights_of(one))
        engines[one] = DistributedDataParallel(Weights(weights), **flags)
    return [engines[one] for one in turns]


class Weights(nn.Module):
    """The net's weights as DDP sees them: its forward only announces the next backward.

    So a loop may call the net as it likes: several times, its parts, its other methods.
    """

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self):
        pass
