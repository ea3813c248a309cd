"""--shard: FSDP over the replicas of each stage; a rank keeps some rows, and gathers a block to run it.

A block is the outermost module of a kind that the net has several of: a layer of a transformer.
"""
from collections import Counter

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from common.data import map_tensors
from common.pipeline.cut import belongs

CONTAINERS = nn.Sequential, nn.ModuleList, nn.ModuleDict


class Uses(TorchFunctionMode):
    """While it is entered, notes the modules that run at every use of a weight: `of[weight]`."""

    def __init__(self):
        super().__init__()
        self.running, self.of = [], {}

    def __enter__(self):
        self.hooks = [register_module_forward_pre_hook(lambda module, _: self.running.append(module)),
                      register_module_forward_hook(self._leave, always_call=True)]
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        map_tensors(self._note, (args, kwargs or {}))
        return function(*args, **kwargs or {})

    def _leave(self, *_):
        self.running.pop()

    def _note(self, tensor):
        if isinstance(tensor, nn.Parameter):
            self.of[tensor] = self.of.get(tensor, set(self.running)) & set(self.running)


def shard(net, stages, world, used):
    """Shards each weight with its block, or with the innermost module around it that runs at all its uses.

    A weight that is also used where no module runs stays whole.
    """
    mesh = DeviceMesh.from_group(world.peers or dist.group.WORLD, world.device.type)
    kinds, ran = Counter(map(type, net.modules())), set().union(*used.values())
    inside, left, sharded = set(), set(net.parameters()), set()
    for module in net.modules():  # the outer ones first
        if module in ran and kinds[type(module)] > 1 and not isinstance(module, CONTAINERS):
            inside |= set(module.modules()) - {module}
    for module in reversed([module for module in net.modules() if module not in inside]):
        if own := {p for p in module.parameters() if p in left and module in used.get(p, ())}:
            left -= own
            sharded.add(module)
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=left)
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the size of the whole batch
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that also multiplies
    for stage in stages:  # around its blocks: they share what was gathered last, instead of keeping it each
        owns = [prefix for piece in stage.group for prefix in piece.owns]
        blocks = [m for name, m in net.named_modules() if m in sharded and belongs(name, owns)]
        stage.blocks = nn.ModuleList(blocks)
        fully_shard(stage, mesh=mesh, ignored_params=left)
