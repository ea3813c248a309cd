"""One sample in a forward: BatchNorm may not take it, for one value has no spread; that is said before the first step."""
import itertools

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import UserError
from common.sampler import share

REFUSED = "more than 1 value per channel"        # from torch's ValueError


def refuse_single(net, opts, world, data):
    """UserError if some step would have a forward of one sample and the net, whole and on the CPU, takes none."""
    n, size = len(data.train), opts.global_batch_size
    tail = n % size if not opts.max_steps or opts.max_steps > n // size else 0
    wrong = next((batch for batch in (min(n, size), tail) if 1 in forwards(batch, opts, world)), None)
    if wrong is None or opts.eval_only or takes_one(net, data):
        return
    which = f"the last batch of an epoch, {tail} of {n:,} samples," if wrong == tail else f"a global batch of {wrong}"
    cut, ways = "one process", "--micro-batch-size"
    if opts.virtual_ranks:
        cut, ways = f"{opts.virtual_ranks} slices", "--virtual-ranks"
    elif world.replicas > 1:
        cut, ways = f"{world.replicas} shares", "number of processes"
    raise UserError(f"a BatchNorm of this net cannot train on one sample alone, and {which} in {cut} leaves one\n"
                    f"another --global-batch-size (now {size}) or {ways}, or GroupNorm or LayerNorm in its place")


def forwards(batch, opts, world):
    """How many samples the forwards of a global batch have, on any rank; with --sync-bn on all of them together."""
    parts = opts.virtual_ranks or world.replicas
    if opts.sync_bn and parts > 1 and batch:                        # one BatchNorm over the forwards of all ranks
        count, shares = rounds(batch, opts, world), [len(share(batch, rank, parts)) for rank in range(parts)]
        return {sum(n // count + (k < n % count) for n in shares) for k in range(count)}
    found = {-(-batch // parts)} | ({batch // parts} if not opts.shard else set())     # with --shard the others fill up
    if not opts.virtual_ranks:
        found = pieces(found, lambda part: opts.micro_batch_size or part)
        if opts.script == "dp":
            found = pieces(found, lambda micro: -(-micro // len(world.devices)))
    return found


def rounds(batch, opts, world):
    """How many forwards the largest share of a global batch takes."""
    most = -(-batch // world.replicas)
    return -(-most // (opts.micro_batch_size or most))


def pieces(sizes, most):
    """The sizes of what is left when each of `sizes` is split into pieces of `most` samples."""
    return {piece for size in sizes if size for piece in (min(size, most(size)), size % most(size)) if piece}


def takes_one(net, data):
    """Whether the net's forward in training takes one sample; tried without values, on torch's meta device."""
    if not any(isinstance(m, _BatchNorm) for m in net.modules()):
        return True
    was, x = net.training, data.train.fetch([0])[0]
    hollow = {n: torch.empty_like(t, device="meta") for n, t in itertools.chain(net.named_parameters(), net.named_buffers())}
    try:
        with torch.no_grad():
            torch.func.functional_call(net.train(), hollow, (x.to("meta"),))
    except ValueError as error:
        return REFUSED not in str(error)
    except Exception:
        return True                                                 # it looks at values, say: then the step itself will tell
    finally:
        net.train(was)
    return True
