"""A rank's share of a global batch of given tensors, as `batches` would cut it."""
from common.data import Batch, forward_sizes
from common.sampler import share


def share_of(x, y, opts, rank=0, world=1):
    mine, parts = share(len(x), rank, world, opts.virtual_ranks), []
    at = mine.start
    for n in forward_sizes(len(x), rank, world, opts):
        parts.append((n, (x[at:at + n], y[at:at + n]) if n or opts.sync_bn or opts.shard else None))
        at += n
    return Batch(parts, list(mine), len(x))
