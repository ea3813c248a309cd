"""How a global batch becomes one gradient: the exact mean over its real samples, at any number of ranks and micro batches."""
import contextlib
import inspect
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

from common.bitwise import Tree
from common.buffers import average_buffers
from common.errors import UserError
from common.sampler import hash_seed, share
from common.single import refuse_single, rounds
from common.world import require_same_bits

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def prepare(net, opts, world, data):
    """The net on its device, with the layers and the memory layout the options ask for; names stay as they are."""
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
    off = "forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers"    # renamed in torch 2.15
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
    """The net under --amp in whatever thread: nn.DataParallel's have autocast on, but of a type of their own."""

    def __init__(self, net, opts, device):
        super().__init__()
        self.net, self.opts, self.device = net, opts, device

    def forward(self, x):
        with autocast(self.opts, self.device):
            return self.net(x)


class Replica(nn.Module):
    """The net, except that an empty share of a short last batch yields zero gradients: the rank still takes part.

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
    """nn.DataParallel's scatter, replicate, apply and gather over CPU "devices", so that the path can be seen without a GPU."""

    def __init__(self, net, count):
        super().__init__()
        self.module, self.count = net, count

    def forward(self, x):
        first, *rest = x.chunk(self.count)                          # the sizes nn.DataParallel would send to GPUs
        outputs = [self.module(first)]                              # as there, the first replica is the net itself
        for chunk in rest:
            copies = {n: t.clone() for n, t in [*self.module.named_parameters(), *self.module.named_buffers()]}
            outputs.append(torch.func.functional_call(self.module, copies, (chunk,)))
        return torch.cat(outputs)


def show_scatter(model, net):
    """Print the sizes inside each replica, and outside, where the batch is whole (seeds of every DataParallel tutorial)."""
    def sizes(x, output):
        return f"input size {tuple(x.shape)} output size {tuple(output.shape)}"

    if model is not net:
        model.register_forward_hook(lambda _, inputs, output: print("Outside:  ", sizes(inputs[0], output)))
    net.register_forward_hook(lambda _, inputs, output: print("In Model: ", sizes(inputs[0], output)))
    if model is net:
        net.register_forward_hook(lambda _, inputs, output: print("Outside:  ", sizes(inputs[0], output)))


def backward(model, batch, state, world):
    """Leaves the mean gradient of the global batch in `.grad`; returns this rank's [summed loss, hits].

    Every rank calls it for every global batch, with an empty share too: exactly one synchronising backward each.
    """
    opts = state.opts
    if opts.virtual_ranks:
        return backward_slices(model, batch, state, world)
    seed(world, opts.seed, "step", state.step, world.rank)          # dropout: derived, never stored
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    x, y = batch.x.to(world.device, non_blocking=True), batch.y.to(world.device, non_blocking=True)
    size = opts.micro_batch_size or max(1, len(x))
    parts = list(zip(x.split(size), y.split(size), strict=True))
    if opts.sync_bn and batch.size % world.size:                    # its layers wait for each other: as many forwards on each rank
        count = rounds(batch.size, opts, world)
        parts = list(zip(x.tensor_split(count), y.tensor_split(count), strict=True))
    began = time.monotonic()
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        with contextlib.nullcontext() if last or world.size == 1 else model.no_sync():
            loss, right = forward(model, *part, state, world)
            if last:
                state.own_seconds += time.monotonic() - began       # the backward to come waits for the others
            # Summed, then divided by the whole batch's size: uneven shares still give the exact mean. DDP divides by the
            # number of ranks, which is taken back.
            scaled = loss * (world.size / batch.size)
            (state.scaler.scale(scaled) if state.scaler else scaled).backward()
        totals[0] += loss.detach()
        totals[1] += right
    if world.size > 1 and state.buffers:
        average_buffers(state, world, len(batch.x) / batch.size)
    return totals


def backward_slices(model, batch, state, world):
    """The same along a fixed tree: each slice computed as if it were alone, so that only who computes it follows the world."""
    tree, at, began = model.tree, 0, time.monotonic()
    tree.begin(state)
    for v in tree.slices:
        n = len(share(batch.size, v, tree.count))                   # in a short last batch it may be 0
        seed(world, state.opts.seed, "step", state.step, v)
        if v == tree.slices[-1]:
            state.own_seconds += time.monotonic() - began           # the exchange to come waits for the others
        if v > tree.slices.start:
            tree.buffers.restore()
        with tree.leaf(v):
            if n:
                x, y = (alone(t[at:at + n], world) for t in (batch.x, batch.y))
                loss, right = forward(model.net, x, y, state, world)
                tree.measure(loss, right, tree.moves(v, n / batch.size))
                scaled = loss / batch.size
                (state.scaler.scale(scaled) if state.scaler else scaled).backward()
        at += n
    return tree.finish()


def seed(world, *key):
    """The generators in use, from a key. (torch.manual_seed notes a stack trace for every kind of device that is not: 0.3 ms.)"""
    torch.default_generator.manual_seed(hash_seed(*key))
    if world.device.type == "cuda":
        torch.cuda.manual_seed_all(hash_seed(*key))


def alone(x, world):
    """A copy on the device: vectorised code may treat memory that starts elsewhere in another order."""
    return torch.empty(x.shape, dtype=x.dtype, device=world.device).copy_(x, non_blocking=True)


def forward(model, x, y, state, world):
    """The summed loss of some samples, and how many of them are hits."""
    x, targets = enter(x, y, state)
    with autocast(state.opts, world.device):
        out = model(x)
    return summed_loss(out, targets, state.opts), hits(out, y) if len(y) else torch.zeros((), device=x.device)


def enter(x, y, state):
    """(inputs, [(weight, targets)]): what goes into a net, and what should come out."""
    if state.opts.channels_last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return mix(x, y, state)


def summed_loss(out, targets, opts):
    """The loss of each sample, added up; where a sample has many tokens, its loss is the mean over them."""
    flat = (out.float() if opts.amp != "off" else out).flatten(0, -2)
    tokens = targets[0][1].shape[1:].numel()
    return sum(w * F.cross_entropy(flat, t.flatten(), reduction="sum", label_smoothing=opts.label_smoothing)
               for w, t in targets) / tokens


def hits(out, y):
    """How many samples are answered right; of a sample with many tokens, the share that is."""
    found = (out.detach().argmax(-1) == y).sum()
    return found if y.dim() == 1 else found / y.shape[1]


def autocast(opts, device):
    return torch.autocast(device.type, AMP[opts.amp]) if opts.amp != "off" else contextlib.nullcontext()


def mix(x, y, state):
    """Mixup or cutmix with the neighbour in the micro batch: (inputs, [(weight, targets)]); strength drawn from the step."""
    opts = state.opts
    if not (opts.mixup or opts.cutmix) or len(x) < 2:
        return x, [(1.0, y)]
    draws = torch.Generator().manual_seed(hash_seed(opts.seed, "mix", state.step))
    boxes = bool(opts.cutmix) and (not opts.mixup or torch.rand((), generator=draws) < 0.5)
    alpha = opts.cutmix if boxes else opts.mixup
    gammas = torch._standard_gamma(torch.full((2,), float(alpha)), generator=draws)
    keep = float(gammas[0] / gammas.sum().clamp_min(1e-12))
    other = x.roll(1, 0)
    if not boxes:
        return x * keep + other * (1 - keep), [(keep, y), (1 - keep, y.roll(1))]
    height, width = x.shape[-2:]
    h, w = int(height * (1 - keep) ** 0.5), int(width * (1 - keep) ** 0.5)
    top, left = (int(torch.randint(side, (), generator=draws)) for side in (height - h + 1, width - w + 1))
    x = x.clone()
    x[..., top:top + h, left:left + w] = other[..., top:top + h, left:left + w]
    keep = 1 - h * w / (height * width)
    return x, [(keep, y), (1 - keep, y.roll(1))]
