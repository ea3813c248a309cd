"""A net made ready: on its device, with the layers the options ask for, wrapped for as many devices or ranks
as there are.
"""
import inspect
import itertools

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.errors import UserError
from common.sampler import share
from common.training.bitwise.sums import Tree
from common.training.loss import autocast
from common.world import require_same_bits


def prepare(net, opts, world, data):
    """The net on its device, with the layers and the memory layout the options ask for; names stay as they
    are.
    """
    return fit(net, opts, world, data).to(world.device)


def fit(net, opts, world, data):
    if world.device.type != "cuda" and (opts.sync_bn or opts.amp == "fp16"):
        raise UserError(f"--{'sync-bn' if opts.sync_bn else 'amp fp16'} works on GPUs only, this process has {world.device}\n"
                        "leave it out, or make a GPU visible")
    if opts.script == "dp" and opts.compile and len(world.devices) > 1:
        raise UserError(f"--compile: train_dp.py copies the net to its {len(world.devices)} devices anew in each forward, "
                        "which compiled code does not survive\nleave it out, or use train_ddp.py, or one device")
    torch.autograd.set_detect_anomaly(opts.debug)
    refuse_single(net, opts, world, data)
    if opts.sync_bn and world.size > 1:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if opts.channels_last:
        net = net.to(memory_format=torch.channels_last)
    return net


def distribute(net, opts, world):
    """What train_ddp.py calls: a replica on every rank, gradients averaged while backward still runs."""
    if opts.virtual_ranks:
        return Sliced(net, opts, world)
    net = torch.compile(net) if opts.compile else net
    if world.size == 1:
        return net
    # Buffers are averaged below, once a step: DDP would instead copy rank 0's, which sees only its own share.
    parameters = inspect.signature(DistributedDataParallel).parameters
    # renamed in torch 2.15
    off = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"
    return DistributedDataParallel(Replica(net, opts.sync_bn), gradient_as_bucket_view=True, **{off: False})


def replicate(net, opts, world):
    """What train_dp.py calls: one process, the batch scattered over its devices."""
    if len(world.devices) == 1:
        return torch.compile(net) if opts.compile else net
    net = Casting(net, opts, world.device)
    if world.device.type == "cuda":
        return DataParallel(net, device_ids=[d.index for d in world.devices])
    return CpuReplicas(net, len(world.devices))


class Casting(nn.Module):
    """The net under --amp in whatever thread: nn.DataParallel's have autocast on, but of a type of their own.
    """

    def __init__(self, net, opts, device):
        super().__init__()
        self.net, self.opts, self.device = net, opts, device

    def forward(self, x):
        with autocast(self.opts, self.device):
            return self.net(x)


class Replica(nn.Module):
    """The net, except that an empty share of a short last batch yields zero gradients: the rank still takes
    part.

    With --sync-bn it takes part in the net itself, in whose layers the others wait for it.
    """

    def __init__(self, net, synced=False):
        super().__init__()
        self.net, self.synced = net, synced

    def forward(self, x):
        if len(x) or self.synced:
            return self.net(x)
        return sum(p.flatten()[:0].sum() for p in self.net.parameters() if p.requires_grad) + x.new_zeros(0, 1)


class Sliced(nn.Module):
    """The net, and the tree along which the gradients of its slices are summed (--virtual-ranks)."""

    def __init__(self, net, opts, world):
        super().__init__()
        require_same_bits(opts, world)
        self.net, self.tree = net, Tree(net, world, opts.virtual_ranks)

    def forward(self, x):
        return self.net(x)


class CpuReplicas(nn.Module):
    """nn.DataParallel's scatter, replicate, apply and gather over CPU "devices", so that the path can be seen
    without a GPU.
    """

    def __init__(self, net, count):
        super().__init__()
        self.module, self.count = net, count

    def forward(self, x):
        first, *rest = x.chunk(self.count)  # the sizes nn.DataParallel would send to GPUs
        outputs = [self.module(first)]  # as there, the first replica is the net itself
        for chunk in rest:
            copies = {n: t.clone() for n, t in [*self.module.named_parameters(), *self.module.named_buffers()]}
            outputs.append(torch.func.functional_call(self.module, copies, (chunk,)))
        return torch.cat(outputs)


def show_scatter(model, net):
    """Print the sizes inside each replica, and outside, where the batch is whole (seeds of every DataParallel
    tutorial).
    """
    def sizes(x, output):
        return f"input size {tuple(x.shape)} output size {tuple(output.shape)}"

    if model is not net:
        model.register_forward_hook(lambda _, inputs, output: print("Outside:  ", sizes(inputs[0], output)))
    net.register_forward_hook(lambda _, inputs, output: print("In Model: ", sizes(inputs[0], output)))
    if model is net:
        net.register_forward_hook(lambda _, inputs, output: print("Outside:  ", sizes(inputs[0], output)))


REFUSED = "more than 1 value per channel"        # from torch's ValueError


def refuse_single(net, opts, world, data):
    """UserError if some step would have a forward of one sample and the net, whole and on the CPU, takes
    none.
    """
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
    """How many samples the forwards of a global batch have, on any rank; with --sync-bn on all of them
    together.
    """
    parts = opts.virtual_ranks or world.replicas
    if opts.sync_bn and parts > 1 and batch:  # one BatchNorm over the forwards of all ranks
        count, shares = rounds(batch, opts, world), [len(share(batch, rank, parts)) for rank in range(parts)]
        return {sum(n // count + (k < n % count) for n in shares) for k in range(count)}
    # with --shard the others fill up
    found = {-(-batch // parts)} | ({batch // parts} if not opts.shard else set())
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
    """Whether the net's forward in training takes one sample; tried without values, on torch's meta device.
    """
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
        return True  # it looks at values, say: then the step itself will tell
    finally:
        net.train(was)
    return True
