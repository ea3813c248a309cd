"""What is told at the start of a net with BatchNorm over samples, which cannot train on one alone."""

from torch import nn

from common.data import forward_sizes
from common.errors import warn
from common.options import Options
from common.world import World


def warn_of_one_sample(net: nn.Module, opts: Options, samples: int, world: World) -> None:
    """Warn if a batch, or an epoch's last one, leaves a rank one sample."""
    norms = [name for name, module in net.named_modules() if isinstance(module, nn.BatchNorm1d)]
    sizes = {min(opts.global_batch_size, samples), samples % opts.global_batch_size}
    alone = any(
        1 in forward_sizes(size, rank, world.size, opts) for size in sizes for rank in range(world.size)
    )
    if alone and not opts.sync_bn:
        warn(
            f"{samples} samples by {opts.global_batch_size}: with {world.size} processes a forward gets one "
            f"sample, on which the BatchNorm {norms[0]} cannot train\n"
            "take another number of processes or samples a step, GroupNorm, or on GPUs sync_bn"
        )
